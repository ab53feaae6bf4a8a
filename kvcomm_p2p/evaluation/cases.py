"""Prompts that could be filled from copies computed elsewhere, with full prefill of each to compare with.

Every scenario is one way in which the context of a copy differs from the prompt's. Documents are real text
(`documents.library`): what is tuned uses every other topic, what is held out the topics between, so that nothing is
measured on text that it was tuned on, whatever the scenario.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.evaluation.documents import ROLES, Problem, Topic, cut_documents, library, questions, shortened
from kvcomm_p2p.evaluation.metrics import Continuation, continue_greedily
from kvcomm_p2p.model.cache import KVCache
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.planning.candidates import Candidate, choose, find_candidates
from kvcomm_p2p.planning.placing import placed
from kvcomm_p2p.planning.types import Donor
from kvcomm_p2p.prompts import prepare
from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS, AnchorMeta, BlockKey, Visibility
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, NodeId, SequenceId
from kvcomm_p2p.reuse.blocks import copy_block

TokenIds = npt.NDArray[np.uint32]

LONG_TOKENS = (320, 440, 600)
"""Lengths of single documents, in turn."""
SHORT_TOKENS = 240
"""Length of each of several documents."""
SEVERAL_TOKENS = (500, 900, 700)
"""Lengths of several long documents."""
BLOCKS_TOKENS = (30, 100, 45, 70)
"""Lengths of short blocks, in turn: two per prompt."""
BLOCK_TOKENS_MIN = 24
"""Shortest run that counts in the scenario of short blocks; elsewhere LENGTH_MIN."""
LENGTH_MIN = 64

_HOLDER = NodeId(bytes(16))
_KEY = b"evaluation"


class Scenario(str, enum.Enum):
    """Where the copy was computed, or what was done to the text."""

    NEAR = "document, nearly the same system prompt"
    ROLE = "document, another role's system prompt"
    BARE = "document, computed bare"
    TEXT = "document, another document before it in both"
    OTHER = "document, behind another document"
    REORDERED = "three documents, reordered"
    REORDERED_BARE = "three documents, each computed bare"
    LONG = "three long documents, reordered"
    EDITED = "document with 10 % edits, another role's system prompt"
    SHORT = "short blocks, another template"

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class DonorCopy:
    """What a holder has of one prompt: its tokens (uint32 [T]) as anchors, and the bytes of their blocks."""

    donor: Donor
    blocks: Mapping[BlockKey, memoryview]


@dataclass(frozen=True)
class Case:
    """A prompt (uint32 [T]), copies that share runs with it, and its full prefill: rows [0, T) of `cache`, and the greedy
    continuation `full`. `runs`: what can be reused, ascending, disjoint."""

    scenario: Scenario
    token_ids: TokenIds
    copies: tuple[DonorCopy, ...]
    cache: KVCache
    full: Continuation
    runs: tuple[Candidate, ...]

    @cached_property
    def reusable(self) -> npt.NDArray[np.bool_]:
        """bool [T]: which tokens the runs hold."""
        inside = np.zeros(len(self.token_ids), dtype=bool)
        for run in self.runs:
            for piece in run.pieces:
                inside[piece.prompt_start : piece.prompt_end] = True
        return inside

    def blocks_of(self, donor: Donor) -> Mapping[BlockKey, memoryview]:
        return next(copy.blocks for copy in self.copies if copy.donor is donor)


def cases(
    runner: ModelRunner,
    scenario: Scenario,
    count: int,
    *,
    held_out: bool = False,
    tokens: int = 24,
    problems: Sequence[Problem] = (),
    one_template: bool = False,
) -> Iterator[Case]:
    """`count` cases, each compared over `tokens` greedy tokens; the same ones every time, and the first ones whatever
    `count`. `held_out`: from text that the others share nothing with.

    Past what the library gives (about 40 cases), its texts come again behind other roles. `problems`: with their solutions,
    for SHORT; without any, short documents are taken. `one_template`: all behind the same two roles. Raises UsageError at
    once for fewer problems than cases.
    """
    if scenario is Scenario.SHORT and problems:
        if len(problems) < count:
            raise UsageError(f"{count} problems are needed, {len(problems)} were given")
        texts = [(number, [each.question, each.answer]) for number, each in enumerate(problems[:count])]
    else:
        texts = list(_texts(runner, scenario, count, held_out))
    builder = _Builder(runner, tokens)
    return (builder.case(scenario, 0 if one_template else number, each) for number, each in texts)


def copy_donor(runner: ModelRunner, token_ids: TokenIds, cache: KVCache) -> DonorCopy:
    """A copy, in blocks, of the KV of a prompt (uint32 [T], in rows [0, T) of `cache`); its anchors are as long as anchors
    can be. Raises UsageError if the cache holds fewer rows."""
    tokens = len(token_ids)
    if cache.length < tokens:
        raise UsageError(f"the cache holds {cache.length} of the donor's {tokens} tokens")
    name = SequenceId(hashlib.sha256(b"evaluation" + token_ids.tobytes()).digest()[:8])
    anchors: list[AnchorMeta] = []
    blocks: dict[BlockKey, memoryview] = {}
    for start in range(0, tokens, ANCHOR_TOKENS_MAX):
        end = min(start + ANCHOR_TOKENS_MAX, tokens)
        anchor_id = AnchorId(hashlib.sha256(name + start.to_bytes(8, "little")).digest()[:16])
        anchors.append(
            AnchorMeta(
                anchor_id=anchor_id,
                model_id=runner.spec.model_id,
                sequence_id=name,
                start=start,
                end=end,
                chain_end=ChainHash(b""),
                fingerprints=b"",
                hops=0,
                visibility=Visibility.PUBLIC,
                group=b"",
                kv_bytes=(end - start) * runner.spec.layout.token_bytes,
            )
        )
        for index, first in enumerate(range(start, end, BLOCK_TOKENS)):
            blocks[BlockKey(anchor_id, index)] = copy_block(cache, first, min(first + BLOCK_TOKENS, end))
    donor = Donor(_HOLDER, True, name, 0, token_ids, tuple(anchors))
    return DonorCopy(donor, blocks)


def prefilled(runner: ModelRunner, token_ids: TokenIds, extra: int = 0) -> tuple[KVCache, torch.Tensor]:
    """A full prefill, with room for `extra` more tokens. Raises UsageError for a model whose KV cannot be exchanged."""
    cache = runner.new_cache(len(token_ids) + extra)
    if not isinstance(cache, KVCache):
        raise UsageError(f"KV of {runner.spec.name} cannot be exchanged: {runner.spec.share_refusal}")
    return cache, runner.prefill(token_ids.astype(np.int64), cache)


def compared(
    runner: ModelRunner,
    scenario: Scenario,
    prompt: TokenIds,
    donors: Sequence[TokenIds],
    length_min: int,
    tokens: int,
) -> Case:
    """A case from any prompt and the prompts whose KV it can take over (all uint32): everything is prefilled here. Runs have
    at least `length_min` tokens; what stands behind equal text from position 0 is none, that would be exact reuse."""
    copies = tuple(copy_donor(runner, ids, prefilled(runner, ids)[0]) for ids in donors)
    cache, logits = prefilled(runner, prompt, tokens)
    full = continue_greedily(runner, cache, logits, tokens)
    found = find_candidates(prompt, [copy.donor for copy in copies], length_min)
    clipped = [run.clipped(0, len(prompt) - 1) for run in found]
    moved = [run for run in clipped if run is not None and not _exact(run, prompt)]
    runs = choose(moved, lambda run: float(run.tokens), length_min)
    return Case(scenario, prompt, copies, cache, full, tuple(placed(run, prompt, _KEY) for run in runs))


class _Builder:
    def __init__(self, runner: ModelRunner, tokens: int) -> None:
        self._runner, self._tokens = runner, tokens

    def case(self, scenario: Scenario, number: int, texts: Sequence[str]) -> Case:
        ours, theirs = _roles(number)
        asked, other = questions(number + 2)[-2:]
        prompt = self._chat(ours, texts if len(texts) == 1 else _reordered(texts), asked)
        if scenario is Scenario.NEAR:
            donors = [self._chat(_reworded(ours), texts, other)]
        elif scenario is Scenario.BARE:
            donors = [self._bare(texts[0])]
        elif scenario is Scenario.OTHER:
            prompt = self._chat(ours, texts[:1], asked)
            donors = [self._chat(theirs, [texts[1], texts[0]], other)]
        elif scenario is Scenario.TEXT:
            prompt = self._chat(ours, [texts[1], texts[0]], asked)
            donors = [self._chat(theirs, [texts[2], texts[0]], other)]
        elif scenario is Scenario.REORDERED_BARE:
            donors = [self._bare(text) for text in texts]
        elif scenario is Scenario.EDITED:
            donors = [self._chat(theirs, [_edited(texts[0], number)], other)]
        elif scenario is Scenario.SHORT:
            prompt = self._template(ours, _OUR_TEMPLATE, texts)
            donors = [self._template(theirs, _THEIR_TEMPLATE, texts)]
        else:
            donors = [self._chat(theirs, texts, other)]
        length_min = BLOCK_TOKENS_MIN if scenario is Scenario.SHORT else LENGTH_MIN
        return compared(self._runner, scenario, prompt, donors, length_min, self._tokens)

    def _chat(self, system: str, texts: Sequence[str], question: str) -> TokenIds:
        names = [f"document{index}" for index in range(len(texts))]
        body = "\n\n".join(f"{{{name}}}" for name in names) + "\n\n" + question
        messages = [{"role": "system", "content": system}, {"role": "user", "content": body}]
        return prepare(self._runner.tokenizer, messages, dict(zip(names, texts, strict=True))).token_ids

    def _template(self, system: str, template: str, texts: Sequence[str]) -> TokenIds:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": template}]
        return prepare(self._runner.tokenizer, messages, dict(zip(("first", "second"), texts, strict=True))).token_ids

    def _bare(self, text: str) -> TokenIds:
        return prepare(self._runner.tokenizer, text, chat=False).token_ids


_OUR_TEMPLATE = (
    "Task of today:\n{first}\n\nWhat a colleague answered:\n{second}\n\nCheck it and say what you would change."
)
_THEIR_TEMPLATE = "Somebody was asked this: {first}\n\nHere is the answer. {second}\n\nContinue."


def _exact(run: Candidate, prompt: TokenIds) -> bool:
    """Whether everything before the run is equal too: that would be exact reuse."""
    first = run.pieces[0]
    return first.prompt_start == first.donor_start and np.array_equal(
        run.donor.token_ids[: first.donor_start], prompt[: first.prompt_start]
    )


def _texts(runner: ModelRunner, scenario: Scenario, count: int, held_out: bool) -> Iterator[tuple[int, list[str]]]:
    """The texts of each case, with the number that says which roles read them."""
    topics, repeats = library()[int(held_out) :: 2], 0
    for number in range(count):
        try:
            texts = _cut(runner.tokenizer, scenario, number, topics)
        except UsageError:
            topics, repeats = library()[int(held_out) :: 2], repeats + 1
            texts = _cut(runner.tokenizer, scenario, number, topics)
        yield number + repeats, texts


def _cut(tokenizer: Any, scenario: Scenario, number: int, topics: list[Topic]) -> list[str]:
    """The texts of one case. `topics`: what is left of the library; mutated."""
    if scenario is Scenario.SHORT:
        short = cut_documents(tokenizer, max(BLOCKS_TOKENS), 2, topics)
        lengths = BLOCKS_TOKENS[2 * (number % 2) :]
        return [shortened(tokenizer, each, length).text for each, length in zip(short, lengths, strict=False)]
    if scenario in (Scenario.REORDERED, Scenario.REORDERED_BARE):
        return [each.text for each in cut_documents(tokenizer, SHORT_TOKENS, 3, topics)]
    if scenario is Scenario.LONG:
        several = cut_documents(tokenizer, max(SEVERAL_TOKENS), 3, topics)
        return [shortened(tokenizer, each, SEVERAL_TOKENS[i]).text for i, each in enumerate(several)]
    long = cut_documents(tokenizer, max(LONG_TOKENS), 1, topics)
    beside = {Scenario.OTHER: 1, Scenario.TEXT: 2}.get(scenario, 0)
    if beside:
        long += cut_documents(tokenizer, SHORT_TOKENS, beside, topics)
    return [
        shortened(tokenizer, long[0], LONG_TOKENS[number % len(LONG_TOKENS)]).text,
        *(each.text for each in long[1:]),
    ]


def _roles(number: int) -> tuple[str, str]:
    """System prompts of the one who asks and of the one who computed the copy; all pairs in turn."""
    texts = list(ROLES.values())
    ours = number % len(texts)
    return texts[ours], texts[(ours + 1 + number // len(texts) % (len(texts) - 1)) % len(texts)]


def _reworded(text: str) -> str:
    """A system prompt that differs in a few words, at its beginning (so that nothing is an exact prefix) and at its end."""
    return f"Today {text[0].lower()}{text[1:]} Be brief."


def _reordered(texts: Sequence[str]) -> list[str]:
    return [texts[-1], *texts[:-1]]


def _edited(text: str, seed: int, share: float = 0.1) -> str:
    """About `share` of the words replaced, left out or repeated, in bursts of about five."""
    rng = random.Random(seed)
    words = text.split(" ")
    kept: list[str] = []
    at = 0
    while at < len(words):
        burst = rng.randint(2, 8)
        if rng.random() < share / 5:
            action = rng.choice(("drop", "replace", "insert"))
            if action != "drop":
                kept += [rng.choice(words) for _ in range(burst)]
            at += 0 if action == "insert" else burst
        else:
            kept.append(words[at])
            at += 1
    return " ".join(kept)
