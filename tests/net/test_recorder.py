"""What was recorded of a node can be replayed exactly, and nothing else can."""

from __future__ import annotations

import random
import stat
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from net_nodes import CONFIG, KEYS, MODEL, make_anchor, wait_until, wants_of

from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.memory_transport import MemoryHub, MemoryTransport
from kvcomm_p2p.net.recorded_nodes import RecordedNode
from kvcomm_p2p.net.recorder import (
    Recorder,
    Recording,
    RecordingError,
    copy_recording,
    effects_digest,
    read_recording,
    redacted,
    replay,
)
from kvcomm_p2p.net.transport import Addresses
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import HeldAnchor
from kvcomm_p2p.protocol.erasure_names import stretches
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.store import BlockStore

sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))
from protocol_harness import Network, held, meta, record

ERASING = replace(CONFIG, erasing_key=KEYS.erasing)
SECRET_IDS = np.arange(4242, 4306, dtype=np.uint32)


class RecordedNetwork(Network):
    """All nodes of a virtual network are recorded in `folder`."""

    def __init__(self, folder: Path, seed: int, *, redact: bool) -> None:
        super().__init__(seed)
        self.folder = folder
        self.redact = redact
        self.recorders: list[Recorder] = []

    def add(self, index: int, config: Any = None, **changes: Any) -> NodeId:
        node_id = super().add(index, config, **changes)
        recorder = Recorder(self.folder / f"{index}.kvrec", redact=self.redact)
        self.recorders.append(recorder)
        me = record(index, **changes)
        made = RecordedNode(
            config or ERASING,
            me=me,
            rng=random.Random(f"{index}"),
            now=self.now,
            recorder=recorder,
            incarnation=index,
            addresses=("10.0.0.1:1000",),
        )
        self.nodes[node_id] = made
        return node_id


def history(folder: Path, seed: int, *, redact: bool = False, steps: int = 25) -> list[Path]:
    """Three nodes that publish, fetch, ask, forget, erase, lose frames, freeze and leave, as `seed` says."""
    folder.mkdir()
    network = RecordedNetwork(folder, seed, redact=redact)
    rng = random.Random(seed)
    ids = [network.add(index) for index in range(3)]
    network.fault = lambda source, target, message: [] if rng.random() < 0.05 else [rng.uniform(0.001, 0.02)]
    for node_id in ids[1:]:
        network.join(node_id, ids[0])
    network.run(0.5)
    for step in range(steps):
        who, other = rng.sample(ids, 2)
        anchor = meta(("anchor", rng.randrange(6)))
        choice = rng.randrange(8)
        if choice < 2:
            network.publish(who, anchor)
        elif choice == 2:
            network.fetch(who, step, other, anchor)
        elif choice == 3:
            network.handle(who, ev.TokensRequested(step, other, anchor, network.now + 1.0))
        elif choice == 4:
            network.handle(who, ev.AnchorsForgotten((anchor.anchor_id,)))
        elif choice == 5:
            network.frozen ^= {ids[2]}
        elif choice == 6:
            network.handle(who, ev.EraseRequested(some_erasures(anchor, step), everywhere=rng.random() < 0.7))
        else:
            network.handle(who, ev.MessageReceived(other, m.Chunk(1, 0, 0, 1)))  # a violation
        network.run(rng.uniform(0.01, 0.4))
    network.handle(ids[1], ev.LeaveRequested())
    network.run(0.2)
    for recorder in network.recorders:
        recorder.close()
    return sorted(folder.glob("*.kvrec"))


def some_erasures(anchor: Any, number: int) -> tuple[m.Erasure, ...]:
    """Of some of an anchor's tokens, named with the cluster's key."""
    tokens, hashes = stretches([held(anchor).token_ids[8 : 8 + 4 * (number % 8 + 1)]], ERASING.erasing_key)
    return tuple(m.Erasure(bytes([number]) * 16, NodeId(b"a" * 16), 0.0, tokens, each) for each in hashes)


@pytest.mark.parametrize("redact", [False, True])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_replays_exactly(tmp_path: Path, redact: bool, seed: int) -> None:
    for path in history(tmp_path / f"{seed}-{redact}-{random.random()}", seed, redact=redact):
        recording = read_recording(path)
        outcome = replay(recording)
        assert (outcome.differs_at, outcome.end) == (None, "closed")
        assert outcome.events == len(recording.steps) > 10
        assert recording.redacted == redact


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return read_recording(history(tmp_path_factory.mktemp("r") / "h", 7)[0])


def test_a_changed_event_is_noticed(recording: Recording) -> None:
    steps = recording.steps
    index = next(i for i, step in enumerate(steps) if isinstance(step.event, ev.AnchorsPublished))
    for changed in (
        replace(steps[index], event=ev.AnchorsPublished((held(meta("another")),))),
        replace(steps[index], event=ev.LeaveRequested()),
        replace(steps[index], digest=bytes(16)),
    ):
        outcome = replay(replace(recording, steps=(*steps[:index], changed, *steps[index + 1 :])))
        assert outcome.differs_at is not None and outcome.differs_at >= index
    left_out = replay(replace(recording, steps=(*steps[:index], *steps[index + 1 :])))
    assert left_out.differs_at is not None


def test_other_random_numbers_or_settings_are_noticed(recording: Recording) -> None:
    for changed in (
        replace(recording, rng_state=random.Random(1).getstate()),
        replace(recording, config=replace(recording.config, gossip_interval_s=0.07)),
        replace(recording, me=msgspec.structs.replace(recording.me, name="somebody")),
        replace(recording, now=recording.now + 0.01),
        replace(recording, more={"incarnation": 3}),
    ):
        assert replay(changed).differs_at is not None


@given(share=st.floats(0.0, 1.0))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_was_cut_is_readable_up_to_the_cut(
    tmp_path_factory: pytest.TempPathFactory, recording_file: Path, share: float
) -> None:
    whole = recording_file.read_bytes()
    cut = tmp_path_factory.mktemp("cut") / "cut.kvrec"
    cut.write_bytes(whole[: int(share * (len(whole) - 1))])
    all_steps = read_recording(recording_file).steps
    try:
        read = read_recording(cut)
    except RecordingError as error:  # not even the head is there
        assert "is not a recording" in str(error)
        return
    assert read.end == ""
    assert read.steps == () or len(read.steps) <= len(all_steps)
    assert [step.digest for step in read.steps] == [step.digest for step in all_steps[: len(read.steps)]]
    assert replay(read).differs_at is None


@pytest.fixture(scope="module")
def recording_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return history(tmp_path_factory.mktemp("f") / "h", 3, steps=8)[0]


def test_a_file_that_was_changed_is_refused(tmp_path: Path, recording_file: Path) -> None:
    whole = bytearray(recording_file.read_bytes())
    found = 0
    for place in range(8, len(whole), 997):
        changed = tmp_path / "changed.kvrec"
        changed.write_bytes(bytes([*whole[:place], whole[place] ^ 0x41, *whole[place + 1 :]]))
        try:
            outcome = read_recording(changed)
        except RecordingError:
            found += 1
            continue
        found += outcome.end == ""  # a length was hit: the rest is a cut
    assert found == len(range(8, len(whole), 997))


def test_not_a_recording_and_another_version(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello, this is a text of some length")
    with pytest.raises(RecordingError, match="not a recording"):
        read_recording(tmp_path / "a")
    with pytest.raises(RecordingError, match="not a recording"):
        copy_recording(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_size_is_bounded_and_the_end_says_so(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.kvrec", bytes_max=100_000)
    rng = random.Random(1)
    node = RecordedNode(CONFIG, me=record(0), rng=rng, now=0.0, recorder=recorder)
    for step in range(5_000):
        node.handle(ev.AnchorsPublished((held(meta(step % 50)),)), step / 10)
    assert (tmp_path / "r.kvrec").stat().st_size < 110_000
    recording = read_recording(tmp_path / "r.kvrec")
    assert recording.end == "full"
    assert replay(recording).differs_at is None


def test_what_the_node_raises_is_replayed_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.kvrec")
    node = RecordedNode(CONFIG, me=record(0), rng=random.Random(1), now=0.0, recorder=recorder)
    wrong = replace(held(meta("x")), digests=())
    with pytest.raises(ValueError):
        node.handle(ev.AnchorsPublished((wrong,)), 1.0)
    node.handle(ev.AnchorsPublished((held(meta("x")),)), 1.1)
    recorder.close()
    assert replay(read_recording(tmp_path / "r.kvrec")).differs_at is None


def test_only_the_owner_can_read_it_and_nothing_is_overwritten(tmp_path: Path) -> None:
    Recorder(tmp_path / "r.kvrec").close()
    assert stat.S_IMODE((tmp_path / "r.kvrec").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Recorder(tmp_path / "r.kvrec")


def tokens_in(path: Path) -> bool:
    """Whether the secret's token ids stand in the file, in either byte order or as a list."""
    raw = path.read_bytes()
    return (
        any(SECRET_IDS[:8].astype(order).tobytes() in raw for order in ("<u4", ">u4"))
        or b"\xcd\x10\x92\xcd\x10\x93" in raw
    )


@pytest.mark.parametrize("redact", [False, True])
def test_redacted_recordings_hold_no_token_ids(tmp_path: Path, redact: bool) -> None:
    holder, asker = Recorder(tmp_path / "h.kvrec", redact=redact), Recorder(tmp_path / "a.kvrec", redact=redact)
    network = Network(1)
    for index, recorder in enumerate((holder, asker)):
        network.add(index)
        network.nodes[record(index).node_id] = RecordedNode(
            CONFIG, me=record(index), rng=random.Random(index), now=0.0, recorder=recorder
        )
    network.join(record(1).node_id, record(0).node_id)
    network.run(1.0)
    anchor = replace(held(meta("secret")), token_ids=SECRET_IDS)
    network.handle(record(0).node_id, ev.AnchorsPublished((anchor,)))
    network.handle(record(1).node_id, ev.TokensRequested(1, record(0).node_id, anchor.meta, network.now + 1))
    network.run(1.0)
    [answer] = network.take(record(1).node_id, ev.FinishTokens)
    assert np.array_equal(answer.result.token_ids, SECRET_IDS)
    holder.close()
    asker.close()
    for path in (tmp_path / "h.kvrec", tmp_path / "a.kvrec"):
        assert tokens_in(path) is not redact
        assert replay(read_recording(path)).differs_at is None


def fields_with_tokens() -> set[type]:
    """Everything in events, effects and messages that has token ids."""
    found: set[type] = set()
    seen: set[Any] = set()

    def walk(kind: Any) -> None:
        if kind in seen:
            return
        seen.add(kind)
        for argument in get_args(kind):
            walk(argument)
        if not isinstance(kind, type):
            return
        if is_dataclass(kind):
            names = {field.name for field in fields(kind)}
        elif issubclass(kind, msgspec.Struct):
            names = set(kind.__struct_fields__)
        else:
            return
        if "token_ids" in names:
            found.add(kind)
        for hint in get_type_hints(kind, include_extras=True).values():
            walk(hint)

    for kind in (*get_args(ev.Event), *get_args(ev.Effect), *get_args(m.Message)):
        walk(kind)
    return found


def test_everything_with_token_ids_is_redacted() -> None:
    assert fields_with_tokens() == {HeldAnchor, ev.AnchorTokens, m.Tokens}
    key = b"k" * 32
    anchor = replace(held(meta("x")), token_ids=SECRET_IDS)
    answer = ev.AnchorTokens(anchor.meta, record(0).node_id, SECRET_IDS, anchor.digests)
    message = m.Tokens(1, SECRET_IDS.tobytes(), anchor.digests)
    for value in (
        ev.AnchorsPublished((anchor,)),
        ev.FinishTokens(1, answer, 0.0),
        ev.MessageReceived(record(0).node_id, message),
        ev.SendMessage(record(0).node_id, "a:1", message),
    ):
        changed = redacted(value, key)
        assert type(changed) is type(value)
        assert "4242" not in repr(changed)
        assert SECRET_IDS[:2].tobytes() not in _raw(changed)
        assert SECRET_IDS[:2].tobytes() in _raw(value)


def _raw(value: Any) -> bytes:
    if isinstance(value, ev.AnchorsPublished):
        return value.anchors[0].token_ids.tobytes()
    part = getattr(value, "message", None) or value.result
    return part.token_ids if isinstance(part, m.Tokens) else part.token_ids.tobytes()


def test_a_copy_of_a_running_recording_replays(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.kvrec")
    node = RecordedNode(CONFIG, me=record(0), rng=random.Random(1), now=0.0, recorder=recorder)
    for step in range(100):
        node.handle(ev.TimerExpired(), step / 10)
    recorder.flush()
    events = copy_recording(tmp_path / "r.kvrec", tmp_path / "copy.kvrec")
    copied = read_recording(tmp_path / "copy.kvrec")
    assert (events, len(copied.steps), copied.end) == (100, 100, "copied")
    assert replay(copied).differs_at is None
    recorder.close()
    assert copy_recording(tmp_path / "r.kvrec", tmp_path / "closed.kvrec") == 100


def test_real_drivers_record(tmp_path: Path) -> None:
    hub = MemoryHub()
    drivers, stores, recorders = [], [], []
    for index in range(2):
        recorder = Recorder(tmp_path / f"{index}.kvrec")

        def make(addresses: Addresses, now: float, index: int = index, recorder: Recorder = recorder) -> RecordedNode:
            me = MemberRecord(NodeId(bytes([index]) * 16), 1, f"n{index}", MODEL, addresses.control, addresses.bulk)
            return RecordedNode(CONFIG, me=me, rng=random.Random(index), now=now, recorder=recorder)

        store = BlockStore()
        drivers.append(Driver(make, MemoryTransport(hub), store, KEYS))
        stores.append(store)
        recorders.append(recorder)
    try:
        addresses = [driver.start() for driver in drivers]
        drivers[1].run(drivers[1].join([addresses[0].control], 5.0)).result(10)
        anchor = make_anchor(stores[0], 1)
        drivers[0].run(drivers[0].publish([anchor])).result(5)
        assert wait_until(lambda: drivers[1].peers()[0].anchors == 1)
        fetched = drivers[1].run(drivers[1].fetch(drivers[0].node_id, wants_of(anchor), 5.0)).result(10)
        assert len(fetched.found) == anchor.meta.blocks
    finally:
        for driver in drivers:
            driver.stop()
    for index, recorder in enumerate(recorders):
        recorder.close()
        recording = read_recording(tmp_path / f"{index}.kvrec")
        assert replay(recording).differs_at is None
        assert any(isinstance(step.event, ev.LeaveRequested) for step in recording.steps)
        assert (tmp_path / f"{index}.kvrec").stat().st_size < anchor.meta.kv_bytes  # no KV in it
        node = recording.node()
        assert effects_digest(node, recording.steps[0]) == recording.steps[0].digest
