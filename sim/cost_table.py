"""What one request costs on one kind of machine: measured by `kvcomm bench costs`, or written by hand and marked as such."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.planning.types import Costs
from kvcomm_p2p.protocol.anchors import KVLayout

TABLES = Path(__file__).parent / "costs"
DEFAULT_TABLE = "smollm2-135m-2-cores"


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds, tokens and bytes per second of one model on one machine.

    Computing R tokens against C cached ones takes forward_s + R * token_s + (R * C + R * R / 2) * attention_s; where they are
    not consecutive, repair_s + R * repair_token_s more. `find_s` and `plan_s` are what looking up and planning a prompt of
    1,000 tokens take of the processor, waiting for peers not counted; `request_s` and, per token, `request_token_s` what a
    request takes beside that: tokenizing, crossing threads, keeping account. `check_bytes_per_s`: checks of pulled blocks
    beside their digests; `publish_bytes_per_s`: copying and hashing rows for others; `foresee_token_s`: predicting how wrong a
    reused token is. `frame_s` is what taking in one control frame and answering it takes. `decode_token_s`: one more token of
    an answer. `int8_encode_bytes_per_s` and `int8_decode_bytes_per_s`: KV that one thread brings into the form in which it
    travels as int8, and back.
    `origin`: "measured", "published" (`source` names where) or "written" (somebody's estimate).
    """

    name: str
    origin: str
    source: str
    machine: str
    date: str
    forward_s: float
    token_s: float
    attention_s: float
    align_bytes_per_s: float
    digest_bytes_per_s: float
    decode_token_s: float
    find_s: float
    plan_s: float
    frame_s: float
    request_s: float
    request_token_s: float
    repair_s: float
    repair_token_s: float
    check_bytes_per_s: float
    publish_bytes_per_s: float
    foresee_token_s: float
    int8_encode_bytes_per_s: float = 1.7e9
    int8_decode_bytes_per_s: float = 6.7e9
    """If a table does not say: as of the default model on one core (decision 22)."""
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    context_tokens_max: int

    def __post_init__(self) -> None:
        if self.origin not in ("measured", "published", "written"):
            raise ValueError(f"origin must be measured, published or written, not {self.origin!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, not {value}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more, not {value}")

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.layers, self.kv_heads, self.key_dim, self.value_dim, self.dtype)

    def costs(self, *, pull_latency_s: float, pull_bytes_per_s: float) -> Costs:
        """What an agent on this machine knows before it has pulled anything."""
        return Costs(
            forward_s=self.forward_s,
            token_s=self.token_s,
            attention_s=self.attention_s,
            pull_latency_s=pull_latency_s,
            pull_bytes_per_s=pull_bytes_per_s,
            align_bytes_per_s=self.align_bytes_per_s,
            token_bytes=self.layout.token_bytes,
            int8_share=self.layout.int8_share,
        )

    def dense_s(self, tokens: int) -> float:
        """Seconds for computing a whole prompt."""
        return self.forward_s + tokens * self.token_s + tokens * tokens / 2 * self.attention_s


_POSITIVE = (
    "forward_s",
    "token_s",
    "attention_s",
    "align_bytes_per_s",
    "digest_bytes_per_s",
    "decode_token_s",
    "find_s",
    "plan_s",
    "frame_s",
    "check_bytes_per_s",
    "publish_bytes_per_s",
    "int8_encode_bytes_per_s",
    "int8_decode_bytes_per_s",
    "layers",
    "kv_heads",
    "key_dim",
    "value_dim",
    "context_tokens_max",
)


_NOT_NEGATIVE = ("request_s", "request_token_s", "repair_s", "repair_token_s", "foresee_token_s")


def shipped() -> list[str]:
    """Names of the tables that come with the simulator."""
    return sorted(path.stem for path in TABLES.glob("*.json"))


def load_table(name: str) -> CostTable:
    """A shipped table by name, or a JSON file by path. Raises ConfigError, naming the fix."""
    path = TABLES / f"{name}.json" if name in shipped() else Path(name)
    if not path.is_file():
        raise ConfigError(f"costs = {name!r}: neither a shipped table ({', '.join(shipped())}) nor a file that exists")
    try:
        return msgspec.convert(json.loads(path.read_bytes()), CostTable)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not a table of costs: {error}") from error


def save_table(table: CostTable, path: Path) -> None:
    """As `load_table` reads it."""
    path.write_text(json.dumps(msgspec.to_builtins(table), indent=2) + "\n")


def described(table: CostTable) -> str:
    """One line for people: whose figures these are."""
    return (
        f"{table.name} ({table.origin}, {table.machine}, {table.date}): 1,000 tokens in {table.dense_s(1000):.3g} s, "
        f"{table.layout.token_bytes / 1000:.3g} kB per token, one more token of an answer {1000 * table.decode_token_s:.3g} ms"
    )
