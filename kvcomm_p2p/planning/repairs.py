"""How much of each reused run is recomputed: the divergence budget, spent where it buys most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvcomm_p2p.planning.candidates import Candidate, head_tokens
from kvcomm_p2p.planning.costs import attended, forward_s
from kvcomm_p2p.planning.types import Costs, Repair, ReuseRules


def expected_kl(run: Candidate, repair: Repair, prompt_tokens: int) -> float:
    """Share of a request's divergence (nats per token) that one reused run is expected to bring.

    Measured divergences hold for prompts that are wholly reused; a run brings its share of the prompt's tokens of it.
    What travelled as int8 adds its own.
    """
    return (repair.kl + run.wire_kl) * run.tokens / prompt_tokens


def repaired_tokens(run: Candidate, repair: Repair, rules: ReuseRules) -> int:
    """Tokens of a run that its repair recomputes: head, first tokens behind holes, and probes. Holes are no tokens of it."""
    return run.recomputed(repair, rules)


def repair_s(run: Candidate, repair: Repair, rules: ReuseRules, costs: Costs) -> float:
    """Seconds of the forward that the repair of one run takes, without the forward's fixed cost."""
    tokens = repaired_tokens(run, repair, rules)
    return forward_s(costs, tokens, attended(tokens, (run.start + run.end) // 2)) - costs.forward_s if tokens else 0.0


def allowed_repairs(run: Candidate, rules: ReuseRules, prompt_tokens: int) -> list[Repair]:
    """The measured repairs with which this run alone keeps `rules.kl_max`, cheapest first. Empty: it must be recomputed.

    Heads of short runs are cut (`head_tokens`): of repairs that come to the same there, only the cheapest counts, since no
    more was measured of it than its own divergence.
    """
    options: dict[Repair, Repair] = {}
    for repair in rules.options(run.provenance, run.start, run.tokens, run.edge):
        options.setdefault(replace(repair, head_tokens=head_tokens(repair, run.tokens), kl=0.0), repair)
    return [repair for repair in options.values() if expected_kl(run, repair, prompt_tokens) <= rules.kl_max]


def choose_repairs(runs: Sequence[Candidate], rules: ReuseRules, costs: Costs, prompt_tokens: int) -> list[Repair]:
    """One allowed repair per run: the cheapest, then whichever step up saves most divergence per second until the expected
    sum is at most `rules.kl_target`, or no allowed repair helps.

    The steps are the same whatever the target, and each costs time: a larger target never costs more. Raises ValueError for
    a run that has no allowed repair.
    """
    options = [_steps(run, rules, costs, prompt_tokens) for run in runs]
    chosen = [0] * len(runs)
    while sum(steps[at].kl for steps, at in zip(options, chosen, strict=True)) > rules.kl_target:
        ahead = [
            ((steps[at].kl - step.kl) / (step.seconds - steps[at].seconds), -number, -index)
            for number, (steps, at) in enumerate(zip(options, chosen, strict=True))
            for index, step in enumerate(steps[at + 1 :], start=at + 1)
        ]
        if not ahead:
            break
        _, number, index = max(ahead)
        chosen[-number] = -index
    return [steps[at].repair for steps, at in zip(options, chosen, strict=True)]


class _Step(NamedTuple):
    """One way to repair a run, with what it takes and what is expected to be left."""

    seconds: float
    kl: float
    repair: Repair


def _steps(run: Candidate, rules: ReuseRules, costs: Costs, prompt_tokens: int) -> list[_Step]:
    """Allowed repairs of a run by their cost there, without those that another one beats: each costs more and leaves less
    than the one before. (Their order on the prompts where they were measured may be another.)"""
    allowed = allowed_repairs(run, rules, prompt_tokens)
    if not allowed:
        raise ValueError(f"no repair of the run [{run.start}, {run.end}) is allowed")
    found = [_Step(repair_s(run, each, rules, costs), expected_kl(run, each, prompt_tokens), each) for each in allowed]
    kept: list[_Step] = []
    for step in sorted(found, key=lambda step: step[:2]):
        if not kept or step.kl < kept[-1].kl:
            kept.append(step)
    return kept
