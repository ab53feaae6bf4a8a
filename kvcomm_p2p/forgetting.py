"""What `Agent.forget` does: from a text, or an anchor's name, to erasures that every holder can carry out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.identity import Identity
from kvcomm_p2p.net.signatures import signed_erasure
from kvcomm_p2p.protocol.erasure_names import stretches
from kvcomm_p2p.protocol.ids import ANCHOR_ID_BYTES, AnchorId, NodeId
from kvcomm_p2p.protocol.messages import ERASURE_ID_BYTES, STRETCH_TOKENS, Erasure

DIGITS_MIN = 8
"""Of an anchor's id; as many as people are shown of it."""

AMBIGUOUS_SHOWN = 4
"""Ids that an error names."""

_ANCHOR = re.compile(rf"[0-9a-fA-F]{{{DIGITS_MIN},{2 * ANCHOR_ID_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """`anchors`: how many went from this node's own pool. `told`: members that were told to do the same."""

    anchors: int
    told: int


async def forget(driver: Driver, tokenizer: Any, what: str, erasing_key: bytes, *, everywhere: bool) -> Forgotten:
    """On the driver's loop. `what`: a text, or an anchor's id (see `anchor_named`). Raises UsageError for a text that is too
    short to be told from others, and for the beginning of an id that does not name one anchor."""
    anchor_id = anchor_named(what.strip(), driver.known_anchors)
    if anchor_id is not None:
        erasures = anchor_erasures(driver, anchor_id, erasing_key)
    else:
        erasures = text_erasures(driver.node_id, tokenizer, what, erasing_key)
    identity = driver.identity
    signed = [_signed(identity, erasure) for erasure in erasures]
    anchors = await driver.erase(signed, everywhere=everywhere)
    alive = sum(peer.state == "alive" for peer in driver.peers())
    return Forgotten(anchors, alive if everywhere else 0)


def anchor_named(word: str, known: Callable[[], Iterable[AnchorId]]) -> AnchorId | None:
    """The anchor whose id is `word`: all its 32 hex digits, or the first DIGITS_MIN or more where they name one of `known`.

    None: `word` is a text; so is a number that no known id begins with. Raises UsageError if several ids begin with it, or none.
    """
    if not _ANCHOR.fullmatch(word):
        return None
    digits = word.lower()
    if len(digits) == 2 * ANCHOR_ID_BYTES:
        return AnchorId(bytes.fromhex(digits))
    found = sorted(each for each in known() if each.hex().startswith(digits))
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(each.hex() for each in found[:AMBIGUOUS_SHOWN])
        more = ", …" if len(found) > AMBIGUOUS_SHOWN else ""
        raise UsageError(f"{len(found):,} anchors have ids that begin with {word} ({ids}{more}): give more digits")
    if digits.isdecimal():
        return None
    raise UsageError(
        f"no anchor that is known here has an id that begins with {word}: give all {2 * ANCHOR_ID_BYTES} digits "
        "of one that only others hold; if this is a text, give some of what stands around it, too"
    )


def text_erasures(me: NodeId, tokenizer: Any, text: str, erasing_key: bytes) -> list[Erasure]:
    """A text is tokenized as it would begin a line, and as it would go on one. Raises UsageError if it is too short."""
    variants = [_tokens(tokenizer, spelled) for spelled in dict.fromkeys((text, " " + text.lstrip()))]
    try:
        tokens, hashes = stretches(variants, erasing_key)
    except ValueError as error:
        raise UsageError(f"cannot forget this text: {error}; give more of it") from None
    return [Erasure(os.urandom(ERASURE_ID_BYTES), me, 0.0, tokens, each) for each in hashes]


def anchor_erasures(driver: Driver, anchor_id: AnchorId, erasing_key: bytes) -> list[Erasure]:
    """An anchor is erased by name and, where this node holds it, by its content, since copies may have other names."""
    named = Erasure(os.urandom(ERASURE_ID_BYTES), driver.node_id, 0.0, STRETCH_TOKENS[0], b"", (anchor_id,))
    held = driver.held(anchor_id)
    if held is None or held.meta.tokens < 2 * STRETCH_TOKENS[0]:
        return [named]
    tokens, hashes = stretches([held.token_ids], erasing_key)
    return [named, *(Erasure(os.urandom(ERASURE_ID_BYTES), driver.node_id, 0.0, tokens, each) for each in hashes)]


def _signed(identity: Identity | None, erasure: Erasure) -> Erasure:
    return erasure if identity is None else signed_erasure(identity, erasure)


def _tokens(tokenizer: Any, text: str) -> Sequence[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
