"""What an agent gives back: an answer, or a filled cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.report import PrefillReport

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished generation. `finish_reason`: eos, stop or length. `ttft_s`: from the call to the first token's logits."""

    text: str
    token_ids: list[int]
    finish_reason: str
    report: PrefillReport
    ttft_s: float
    total_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "report": self.report.as_dict(),
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
        }


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt's cache for `model.generate(token_ids, ...)`: T - 1 positions, so that generate computes the last one itself.

    Unpacks as `cache, report`. `logits` [V] are those of the next token.
    """

    cache: DynamicCache
    report: PrefillReport
    logits: torch.Tensor

    def __iter__(self) -> Any:
        return iter((self.cache, self.report))
