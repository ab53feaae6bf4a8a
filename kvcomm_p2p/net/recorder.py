"""Records what happens to a node, and plays it back to a fresh one: docs/recording.md describes the file.

A node does nothing but answer events, so its settings, its record, the state of its random numbers and its events with their
times give every effect again. Of the effects a recording holds digests only. It never holds KV, nor any secret: where erased
content was recognised it says what was found, not by which key. Events hold token ids, unless they are redacted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import numpy as np

from kvcomm_p2p.errors import ConfigError, UsageError
from kvcomm_p2p.net.recorded_nodes import ReplayedNode
from kvcomm_p2p.protocol.anchors import HeldAnchor
from kvcomm_p2p.protocol.config import ERASING_KEY_BYTES, NodeConfig
from kvcomm_p2p.protocol.events import AnchorsPublished, AnchorTokens, Effect, Event
from kvcomm_p2p.protocol.ids import short
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION, MemberRecord, Tokens
from kvcomm_p2p.settings import Settings

FORMAT = "kvcomm recording"
FORMAT_VERSION = 2
RECORD_BYTES_MAX = 64 << 20
RECORDING_BYTES_MAX = 256 << 20
BUFFER_BYTES = 64 * 1024
FLUSH_S = 1.0
"""What a process that is killed loses at most, in seconds of its node's clock."""

DIGEST_BYTES = 16
SUFFIX = ".kvrec"

log = logging.getLogger("kvcomm_p2p.net")

_LENGTH = struct.Struct("<I")
_EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}


class RecordingError(UsageError):
    """A file that is not a recording, or of another version."""


class Recorder:
    """Writes one node's recording. Use it from one thread. Stops by itself, with an end mark, at `bytes_max`."""

    def __init__(self, path: Path, *, bytes_max: int = RECORDING_BYTES_MAX, redact: bool = False) -> None:
        """Makes `path` (mode 0600); raises OSError, also if it exists. `redact`: token ids are replaced by digests under a
        key that is thrown away, equal ids by equal digests."""
        self.path = path
        self.redacted = redact
        self._bytes_max = bytes_max
        self._key = os.urandom(32) if redact else b""
        # Its own buffer: that of a file object would be written a second time by children that were forked.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file: FileIO | None = FileIO(descriptor, "wb")
        self._buffer = bytearray()
        self._pid = os.getpid()
        self._whole = hashlib.sha256()
        self._written = 0
        self._events = 0
        self._flushed_at = 0.0

    def begin(
        self, config: NodeConfig, me: MemberRecord, rng: random.Random, now: float, more: Mapping[str, Any]
    ) -> None:
        """Before the node is made from the same values. `more`: its other arguments: numbers, bytes and tuples of texts."""
        version, state, gauss = rng.getstate()
        self._flushed_at = now
        head = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "protocol": PROTOCOL_VERSION,
            "redacted": bool(self._key),
            "config": _plain(replace(config, erasing_key=bytes(ERASING_KEY_BYTES))),
            "me": _plain(me),
            "rng": [version, list(state), gauss],
            "now": now,
            "more": dict(more),
        }
        self._write(head)

    def add(
        self, event: Event, now: float, effects: Sequence[Effect] | None, found: Sequence[Sequence[int]] = ()
    ) -> None:
        """One event was handled; `effects` None: the node raised. `found`: what each look for erased content gave meanwhile."""
        if self._file is None:
            return
        event, effects = self._redacted(event), None if effects is None else [self._redacted(each) for each in effects]
        step = [now, type(event).__name__, _plain(event), _digest(effects)]
        self._write([*step, [list(places) for places in found]] if found else step)
        self._events += 1
        if self._written >= self._bytes_max:
            self.close("full")
        elif now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        """Everything so far can be read by others."""
        if self._file is None or os.getpid() != self._pid:
            return
        try:
            while self._buffer:
                del self._buffer[: self._file.write(self._buffer)]
        except OSError as error:
            # A disk that is full ends the recording, without an end mark; never what the node does.
            log.error("recording ends here: %s cannot be written (%s)", self.path, error)
            self._end()

    def close(self, why: str = "closed") -> None:
        """Write the end mark. Calling it again does nothing, nor does calling it in a child that was forked."""
        if self._file is not None and os.getpid() == self._pid:
            self._write({"end": why, "events": self._events, "sha256": self._whole.digest()})
            self.flush()
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        self._buffer.clear()
        with suppress(OSError):
            if file is not None:
                file.close()

    def _write(self, record: Any) -> None:
        packed: bytes = msgpack.packb(record, use_bin_type=True)
        self._buffer += _LENGTH.pack(len(packed)) + packed
        self._whole.update(packed)
        self._written += _LENGTH.size + len(packed)
        if len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def _redacted(self, value: Any) -> Any:
        return redacted(value, self._key) if self._key else value


def make_recorder(settings: Settings, name: str, node_id: bytes) -> Recorder | None:
    """As the settings say: None without `record_dir`. The file is called after the node. Raises ConfigError."""
    if not settings.record_dir:
        return None
    plain = "".join(character if character.isalnum() or character in "._-" else "_" for character in name)
    path = Path(settings.record_dir) / f"{plain}-{short(node_id)}{SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Recorder(path, bytes_max=settings.record_bytes_max, redact=settings.record_redact)
    except OSError as error:
        raise ConfigError(f"record_dir: {path} cannot be made ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True)
class Step:
    """One event, when it was handled, the digest of its effects, and what looks for erased content found meanwhile: where
    stretches begin in what was looked through, one tuple per look."""

    now: float
    event: Event
    digest: bytes
    found: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """`more`: other arguments of the node. `end`: why it ended ("closed", "full", "copied"); "" for a file that was cut off:
    `steps` are then those before the cut."""

    config: NodeConfig
    me: MemberRecord
    rng_state: tuple[Any, ...]
    now: float
    more: Mapping[str, Any]
    redacted: bool
    steps: tuple[Step, ...]
    end: str

    def node(self) -> ReplayedNode:
        """A fresh node, as it was when recording began."""
        rng = random.Random()
        rng.setstate(self.rng_state)
        return ReplayedNode(self.config, me=self.me, rng=rng, now=self.now, **self.more)


@dataclass(frozen=True, slots=True)
class Replay:
    """`events` were replayed with equal effects; `differs_at` is the index of the first that was not (None: all were)."""

    events: int
    differs_at: int | None
    end: str


def read_recording(path: Path) -> Recording:
    """The whole file, or as much of it as there is before a cut. Raises RecordingError, OSError."""
    records = _records(path)
    head = _first(records)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise RecordingError(f"{path} is not a recording: make one with kvcomm up --record DIR")
    if (head["version"], head["protocol"]) != (FORMAT_VERSION, PROTOCOL_VERSION):
        found = f"format {head['version']} of protocol {head['protocol']}"
        here = f"format {FORMAT_VERSION} of protocol {PROTOCOL_VERSION}"
        raise RecordingError(f"{path} is a recording in {found}, this version replays {here}: use the version it is of")
    steps: list[Step] = []
    end = ""
    try:
        for record in records:
            if isinstance(record, dict):
                end = str(record["end"])
                break
            now, name, given, digest, *looks = record
            places = tuple(tuple(map(int, each)) for each in looks[0]) if looks else ()
            steps.append(Step(now, event_of(name, given), digest, places))
        version, state, gauss = head["rng"]
        config, me = (_value(head[name], kind) for name, kind in (("config", NodeConfig), ("me", MemberRecord)))
    except (msgspec.ValidationError, msgpack.UnpackException, KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} is damaged after {len(steps):,} events: {error!s:.200}") from None
    more = {name: tuple(value) if isinstance(value, list) else value for name, value in head["more"].items()}
    state = (version, tuple(state), gauss)
    return Recording(config, me, state, head["now"], more, head["redacted"], tuple(steps), end)


def replay(recording: Recording) -> Replay:
    """Handle the same events again, up to the first whose effects differ."""
    node = recording.node()
    for index, step in enumerate(recording.steps):
        if effects_digest(node, step) != step.digest:
            return Replay(index, index, recording.end)
    return Replay(len(recording.steps), None, recording.end)


def effects_digest(node: ReplayedNode, step: Step) -> bytes:
    """Of what `node` answers to a step now."""
    try:
        return _digest(node.replay(step.event, step.now, step.found))
    except Exception:  # what the node raises is part of what it does
        return _digest(None)


def copy_recording(source: Path, target: Path) -> int:
    """What is in `source` now, whole records only, to `target` (made, mode 0600) with an end mark. Returns the number of
    events. Raises RecordingError, OSError."""
    whole, events = hashlib.sha256(), -1
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for packed in _packed(source):
            if events >= 0 and isinstance(msgpack.unpackb(packed, raw=False), dict):
                break  # the end mark of a recording that is full
            file.write(_LENGTH.pack(len(packed)) + packed)
            whole.update(packed)
            events += 1
        mark = msgpack.packb({"end": "copied", "events": events, "sha256": whole.digest()}, use_bin_type=True)
        file.write(_LENGTH.pack(len(mark)) + mark)
    if events < 0:
        target.unlink()
        raise RecordingError(f"{source} is not a recording")
    return events


def redacted(value: Any, key: bytes) -> Any:
    """An event or effect, or a part of one, with its token ids replaced by the first 4 bytes of their keyed BLAKE2b."""
    if isinstance(value, HeldAnchor | AnchorTokens):
        return replace(value, token_ids=_mapped(value.token_ids, key))
    if isinstance(value, Tokens):
        ids = np.frombuffer(value.token_ids, "<u4")
        return msgspec.structs.replace(value, token_ids=_mapped(ids, key).astype("<u4").tobytes())
    if isinstance(value, AnchorsPublished):
        return AnchorsPublished(tuple(redacted(anchor, key) for anchor in value.anchors))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for name in ("message", "result"):
            part = getattr(value, name, None)
            if isinstance(part, Tokens | AnchorTokens):
                changed[name] = redacted(part, key)
        return replace(value, **changed) if changed else value
    return value


def _mapped(ids: Any, key: bytes) -> Any:
    distinct, places = np.unique(np.asarray(ids), return_inverse=True)
    images = [
        int.from_bytes(hashlib.blake2b(int(i).to_bytes(4, "little"), key=key).digest()[:4], "little") for i in distinct
    ]
    mapped = np.array(images, dtype=np.uint32)[places]
    mapped.flags.writeable = False
    return mapped


def event_of(name: str, given: Any) -> Event:
    """The event that `_plain` was given. Raises ValueError."""
    kind = _EVENTS.get(name)
    if kind is None:
        raise ValueError(f"unknown event {name}")
    event: Event = _value(given, kind)
    return event


def _plain(value: Any) -> Any:
    """Lists, dicts, numbers, texts and bytes."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain_array)


def _plain_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be recorded")


def _value(plain: Any, kind: type) -> Any:
    return msgspec.convert(plain, kind, builtin_types=(bytes,), dec_hook=_array)


def _array(kind: type, plain: Any) -> Any:
    dtype, shape, raw = plain
    array = np.frombuffer(raw, dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _digest(effects: Sequence[Effect] | None) -> bytes:
    """Of effects in their order; of None (the node raised), nothing equals it."""
    plain = None if effects is None else [[type(effect).__name__, _plain(effect)] for effect in effects]
    packed = msgpack.packb(plain, use_bin_type=True)
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()


def _records(path: Path) -> Iterator[Any]:
    """Up to and with the end mark. Raises ValueError where that contradicts what stands before it."""
    whole = hashlib.sha256()
    for packed in _packed(path):
        record = msgpack.unpackb(packed, raw=False, strict_map_key=False)
        if isinstance(record, dict) and "end" in record and record["sha256"] != whole.digest():
            raise ValueError("the file was changed")
        whole.update(packed)
        yield record


def _first(records: Iterator[Any]) -> Any:
    try:
        return next(records, None)
    except (ValueError, msgpack.UnpackException):
        return None


def _packed(path: Path) -> Iterator[bytes]:
    """Records that are there as a whole."""
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > RECORD_BYTES_MAX or len(packed := file.read(length)) < length:
                return
            yield packed
