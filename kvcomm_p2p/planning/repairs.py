"""How much of each reused run is recomputed: the divergence budget, spent where it buys most."""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.costs import attended, forward_s
from kvcomm_p2p.planning.types import Costs, Repair, ReuseRules


def expected_kl(run: Candidate, repair: Repair, prompt_tokens: int) -> float:
    """Share of a request's divergence (nats per token) that one reused run is expected to bring.

    Measured divergences hold for prompts that are wholly reused; a run brings its share of the prompt's tokens of it.
    """
    return repair.kl * run.tokens / prompt_tokens


def repaired_tokens(run: Candidate, repair: Repair, rules: ReuseRules) -> int:
    """Tokens of a run that its repair recomputes: head, first tokens behind holes, and probes. Holes are no tokens of it."""
    return run.recomputed(repair, rules)


def repair_s(run: Candidate, repair: Repair, rules: ReuseRules, costs: Costs) -> float:
    """Seconds of the forward that the repair of one run takes, without the forward's fixed cost."""
    tokens = repaired_tokens(run, repair, rules)
    return forward_s(costs, tokens, attended(tokens, (run.start + run.end) // 2)) - costs.forward_s if tokens else 0.0


def allowed_repairs(run: Candidate, rules: ReuseRules, prompt_tokens: int) -> list[Repair]:
    """The measured repairs with which this run alone keeps `rules.kl_max`, cheapest first. Empty: it must be recomputed."""
    options = rules.options(run.provenance, run.start, run.tokens)
    return [repair for repair in options if expected_kl(run, repair, prompt_tokens) <= rules.kl_max]


def choose_repairs(runs: Sequence[Candidate], rules: ReuseRules, costs: Costs, prompt_tokens: int) -> list[Repair]:
    """One allowed repair per run (each must have any): the cheapest, then whichever step up saves most divergence per second
    until the expected sum is `rules.kl_target`, or nothing helps."""
    options = [allowed_repairs(run, rules, prompt_tokens) for run in runs]
    chosen = [0] * len(runs)
    kl = [[expected_kl(run, repair, prompt_tokens) for repair in each] for run, each in zip(runs, options, strict=True)]
    seconds = [[repair_s(run, repair, rules, costs) for repair in each] for run, each in zip(runs, options, strict=True)]
    while sum(kl[i][at] for i, at in enumerate(chosen)) > rules.kl_target:
        steps = [
            ((kl[i][at] - kl[i][better]) / max(seconds[i][better] - seconds[i][at], 1e-6), -i, better)
            for i, at in enumerate(chosen)
            for better in range(at + 1, len(options[i]))
            if kl[i][better] < kl[i][at]
        ]
        if not steps:
            break
        _, index, better = max(steps)
        chosen[-index] = better
    return [options[i][at] for i, at in enumerate(chosen)]
