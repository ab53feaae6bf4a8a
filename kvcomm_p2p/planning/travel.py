"""Whether KV travels as it is or as int8: a quarter of the bytes on slow links, for a little divergence.

What travelled as int8 is approximate: it counts as repaired once more, so only exact copies travel so, nothing exact is made of
them, and what becomes of them is kept to oneself (`spans.span_hops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.costs import PullCost
from kvcomm_p2p.planning.spans import pull_cost, span_hops
from kvcomm_p2p.planning.types import Costs, Int8From, ReuseRules, Span
from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX
from kvcomm_p2p.protocol.ids import NodeId

INT8_MARGIN = 0.1
"""A plan with KV as int8 has to be faster by this share than the best one without: divergence is spent on speed."""


def worth_encoding(
    int8: Int8From, rules: ReuseRules, costs: Costs, pulls: Mapping[NodeId, PullCost]
) -> frozenset[NodeId]:
    """Of these holders, those on links so slow that KV is here sooner as int8; none where the model's divergence was not
    measured."""
    if not rules.approximate or rules.int8_kl is None or not 0 < costs.int8_share < 1:
        return frozenset()

    def sooner(holder: NodeId) -> bool:
        byte_s = 1 / pull_cost(costs, pulls, holder).bytes_per_s
        return costs.int8_share * byte_s + 1 / costs.int8_bytes_per_s < (1 - INT8_MARGIN) * byte_s

    return frozenset(holder for holder in int8.holders if int8.always or sooner(holder))


def travelling(run: Candidate, holders: frozenset[NodeId], rules: ReuseRules) -> Candidate:
    """The candidate, travelling as int8 if its holder is one of these and it may."""
    donor = run.donor
    if donor.local or donor.holder not in holders or rules.int8_kl is None:
        return run
    if any(span_hops(span) >= HOPS_PUBLISHED_MAX for span in run.whole()):
        return run
    return replace(run, encoded=True, wire_kl=rules.int8_kl)


def pays(spans: Sequence[Span], planned_s: float, raw_s: float, dense_s: float, always: bool) -> bool:
    """Whether a plan with KV as int8, expected to take `planned_s`, is taken instead of what takes `raw_s` without."""
    limit_s = dense_s if always else (1 - INT8_MARGIN) * raw_s
    return planned_s < limit_s and any(span.encoded for span in spans)
