"""What stands before a candidate's copy, against what stands before it in the prompt."""

from __future__ import annotations

from dataclasses import replace

from kvcomm_p2p.planning.candidates import GAP_MAX, Candidate
from kvcomm_p2p.planning.chains import TokenIds
from kvcomm_p2p.planning.edges import edge_of
from kvcomm_p2p.planning.provenance import BARE_TOKENS_MAX, context_likeness, kind
from kvcomm_p2p.planning.types import Run


def placed(run: Candidate, prompt: TokenIds, key: bytes) -> Candidate:
    """The candidate with the context and the provenance of its copy. `key`: content key.

    What stands before its longest piece counts, that is most of it, and what stands before the first if that is worse: behind
    another beginning all is wrong, however alike the tokens right before a later piece are. A beginning as short as a hole
    is one, if both have it: a name in a system prompt does not make another role.
    """
    longest = max(run.pieces, key=lambda piece: piece.length)
    deciding = [longest] if _begins_alike(run.pieces[0]) else [longest, run.pieces[0]]
    contexts = [context_likeness(prompt, piece.prompt_start, run.donor, piece.donor_start, key) for piece in deciding]
    worst = max(contexts, key=kind)
    edge = edge_of(prompt, run.donor, kind(worst))
    return replace(run, provenance=kind(worst), likeness=worst.likeness, context=worst, edge=edge)


def _begins_alike(piece: Run) -> bool:
    shorter, longer = sorted((piece.prompt_start, piece.donor_start))
    return longer <= BARE_TOKENS_MAX or (longer <= GAP_MAX and 2 * shorter >= longer)
