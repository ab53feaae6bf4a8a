"""Token ids of anchors."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS
from kvcomm_p2p.protocol.messages.fields import (
    BLOCKS_PER_ANCHOR_MAX,
    AnchorIdField,
    CounterField,
    DigestField,
    PositionField,
    require,
)


class GetTokens(Struct, frozen=True, array_like=True, tag=8):
    """Send me the token ids of positions [start, end) of an anchor you hold (`start` on the block grid)."""

    request_id: CounterField
    anchor_id: AnchorIdField
    start: PositionField
    end: PositionField

    def __post_init__(self) -> None:
        require(0 < self.end - self.start <= ANCHOR_TOKENS_MAX, "range is empty or too long")
        require(self.start % BLOCK_TOKENS == 0, "start is not on the block grid")


class Tokens(Struct, frozen=True, array_like=True, tag=9):
    """Answer to GetTokens: token ids as little-endian u32, and the SHA-256 of each block they touch."""

    request_id: CounterField
    token_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * ANCHOR_TOKENS_MAX)]
    digests: Annotated[tuple[DigestField, ...], Meta(max_length=BLOCKS_PER_ANCHOR_MAX)]

    def __post_init__(self) -> None:
        require(len(self.token_ids) % 4 == 0, "token ids are not whole")
        blocks = -(-(len(self.token_ids) // 4) // BLOCK_TOKENS)
        require(len(self.digests) == blocks, "not one digest per block")


class NoTokens(Struct, frozen=True, array_like=True, tag=10):
    """Answer to GetTokens: not held, or not for you; the two look the same."""

    request_id: CounterField
