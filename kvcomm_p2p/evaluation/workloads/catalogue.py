"""The workloads by name, with the sizes they have unless somebody asks for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.evaluation.documents import load_gsm8k
from kvcomm_p2p.evaluation.workloads.code import code, load_humaneval
from kvcomm_p2p.evaluation.workloads.creative import creative
from kvcomm_p2p.evaluation.workloads.mathematics import mathematics
from kvcomm_p2p.evaluation.workloads.rag import DOCUMENT_TOKENS, READERS, rag, rag_documents
from kvcomm_p2p.evaluation.workloads.types import Workload

NAMES = ("rag", "mathematics", "code", "creative")
REQUESTS = {"rag": 15, "mathematics": 24, "code": 20, "creative": 10}


@dataclass(frozen=True, slots=True)
class Data:
    """What workloads are made of. `readers`: roles to which each retrieval question goes; `execute`: run the code that
    is written; `document_tokens`: lengths of the shortest and the longest document."""

    gsm8k: Path | None = None
    humaneval: Path | None = None
    readers: int = READERS
    execute: bool = False
    document_tokens: tuple[int, int] = DOCUMENT_TOKENS

    def missing(self, name: str) -> str:
        """Which file a workload lacks and how to give it, or ""."""
        if name == "mathematics" and self.gsm8k is None:
            return "it needs problems: give --gsm8k PATH, a gsm8k.jsonl"
        if name == "code" and self.humaneval is None:
            return "it needs tasks: give --humaneval PATH, a humaneval.jsonl"
        return ""


def build(name: str, tokenizer: Any, data: Data, requests: int | None, seed: int) -> Workload:
    """The workload `name`, one of NAMES, with at least `requests` requests (None: REQUESTS[name]), in whole tasks.

    Raises ConfigError for a file that is missing or wrong, UsageError for sizes that are not possible.
    """
    if why := data.missing(name):
        raise ConfigError(f"{name}: {why}")
    count = REQUESTS[name] if requests is None else requests
    if name == "rag":
        documents = rag_documents(tokenizer, seed, tokens=data.document_tokens)
        return rag(documents, requests=count, seed=seed, readers=data.readers)
    if name == "mathematics":
        assert data.gsm8k is not None
        return mathematics(load_gsm8k(data.gsm8k), requests=count, seed=seed)
    if name == "code":
        assert data.humaneval is not None
        return code(load_humaneval(data.humaneval), requests=count, seed=seed, execute=data.execute)
    return creative(requests=count, seed=seed)
