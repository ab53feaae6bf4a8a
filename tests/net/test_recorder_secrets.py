"""A recording holds no secret, and replays all the same."""

from __future__ import annotations

import base64
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from net_nodes import KEYS
from test_recorder import ERASING, history, some_erasures

from kvcomm_p2p.net.recorded_nodes import RecordedNode
from kvcomm_p2p.net.recorder import Recorder, read_recording, replay
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.erasure_memory import ErasureMemory

sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))
from protocol_harness import held, meta, record


def spellings(secret: bytes) -> list[bytes]:
    """How a secret, or a third of it, could stand in a file: as it is, in hex, in base64 at any offset."""
    found = []
    for at in range(0, len(secret) - 7, max(1, len(secret) // 3)):
        part = secret[at : at + max(8, len(secret) // 3)]
        found += [part, part.hex().encode(), part.hex().upper().encode()]
        for shift in range(3):
            encoded = base64.b64encode(bytes(shift) + part)
            found.append(encoded[4 if shift else 0 : (len(part) + shift) // 3 * 4])
            found.append(found[-1].translate(bytes.maketrans(b"+/", b"-_")))
    return found


@pytest.mark.parametrize("redact", [False, True])
def test_no_secret_of_the_cluster_is_in_a_recording(tmp_path: Path, redact: bool) -> None:
    secrets = (b"k" * 32, KEYS.seal, KEYS.content, KEYS.erasing)
    assert base64.b64encode(b"x" + KEYS.erasing)[4:12] in spellings(KEYS.erasing)
    for path in history(tmp_path / "h", 11, redact=redact, steps=60):
        raw = path.read_bytes()
        assert not [each for secret in secrets for each in spellings(secret) if each in raw]
        recording = read_recording(path)
        assert recording.config.erasing_key == bytes(16)
        assert replay(recording).differs_at is None
        looks = [places for step in recording.steps for places in step.found]
        assert any(looks), "something was erased"


def test_what_was_erased_before_and_what_was_found_are_part_of_a_recording(tmp_path: Path) -> None:
    memory = ErasureMemory()
    anchor = meta("erased")
    for erasure in some_erasures(anchor, 9):
        memory.add(erasure, 0.0, told=True)
    recorder = Recorder(tmp_path / "r.kvrec")
    more = {"incarnation": 1, "addresses": ("10.0.0.1:1",), "erasures": memory.pack(0.0)}
    node = RecordedNode(ERASING, me=record(0), rng=random.Random(1), now=0.0, recorder=recorder, **more)
    effects = node.handle(ev.AnchorsPublished((held(anchor),)), 1.0)
    assert [effect for effect in effects if isinstance(effect, ev.DropBlock)], "it was refused"
    recorder.close()
    recording = read_recording(tmp_path / "r.kvrec")
    assert replay(recording).differs_at is None
    forgetful = replace(recording, more={**recording.more, "erasures": b""})
    blind = replace(recording, steps=tuple(replace(step, found=()) for step in recording.steps))
    assert replay(forgetful).differs_at == replay(blind).differs_at == 0
