"""The cluster key on disk, and seals."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.identity import IDENTITY_FILE, allow, load_allowed, load_identity, make_identity, revoke
from kvcomm_p2p.net.key_watch import KeyWatch
from kvcomm_p2p.net.keys import ClusterKeys, load_cluster_keys, load_old_seal, rotate_cluster_key
from kvcomm_p2p.net.private_files import write_private
from kvcomm_p2p.net.seal import SEAL_BYTES, Sealer

SEALER = Sealer(b"s" * 32)


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    first, second = load_cluster_keys(state), load_cluster_keys(state)
    assert first == second
    assert stat.S_IMODE((state / "cluster.key").stat().st_mode) == 0o600
    assert [path.name for path in state.iterdir()] == ["cluster.key"]


def test_different_folders_have_different_keys(tmp_path: Path) -> None:
    assert load_cluster_keys(tmp_path / "a") != load_cluster_keys(tmp_path / "b")


def test_purposes_have_different_keys_and_none_is_printed() -> None:
    keys = ClusterKeys.derive(b"x" * 32)
    assert len({keys.seal, keys.content, b"x" * 32}) == 3
    assert len(keys.seal) == len(keys.content) == 32
    assert repr(keys) == "ClusterKeys()"


def _load(state: str) -> bytes:
    return load_cluster_keys(Path(state)).seal


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(_load, [str(tmp_path / "state")] * 8, chunksize=1))) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_readable_key_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    load_cluster_keys(tmp_path)
    (tmp_path / "cluster.key").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_cluster_keys(tmp_path)


def test_damaged_key_is_refused(tmp_path: Path) -> None:
    load_cluster_keys(tmp_path)
    (tmp_path / "cluster.key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        load_cluster_keys(tmp_path)


def test_linked_key_is_refused(tmp_path: Path) -> None:
    load_cluster_keys(tmp_path / "real")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "cluster.key").symlink_to(tmp_path / "real" / "cluster.key")
    with pytest.raises(ConfigError, match="KVCOMM_STATE_DIR"):
        load_cluster_keys(tmp_path / "state")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")
def test_key_of_another_user_is_refused(tmp_path: Path) -> None:
    load_cluster_keys(tmp_path)
    os.chown(tmp_path / "cluster.key", 12345, -1)
    with pytest.raises(ConfigError, match="another user"):
        load_cluster_keys(tmp_path)


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KVCOMM_STATE_DIR"):
        load_cluster_keys(tmp_path / "file" / "state")


@given(st.binary(max_size=300))
def test_sealed_frames_open(frame: bytes) -> None:
    sealed = SEALER.seal(frame)
    assert len(sealed) == len(frame) + SEAL_BYTES
    assert SEALER.open(sealed) == SEALER.open(memoryview(sealed)) == frame


@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_changed_bit_breaks_the_seal(frame: bytes, data: st.DataObject) -> None:
    sealed = bytearray(SEALER.seal(frame))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert SEALER.open(bytes(sealed)) is None


@given(st.binary(max_size=100))
def test_strangers_bytes_and_keys_do_not_open(junk: bytes) -> None:
    assert SEALER.open(junk) is None
    assert SEALER.open(Sealer(b"t" * 32).seal(junk)) is None


def test_short_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Sealer(b"short")


# ------------------------------------------------------------------------------------------------------------- rotation


def test_the_old_secret_opens_for_the_grace_period_and_never_seals(tmp_path: Path) -> None:
    old = load_cluster_keys(tmp_path)
    until = rotate_cluster_key(tmp_path, 100.0)
    new = load_cluster_keys(tmp_path)
    assert new != old and new.content != old.content  # names of contents change with it
    accepted = load_old_seal(tmp_path, time.time())
    assert accepted is not None and accepted.key == old.seal and abs(accepted.until - until) <= 1
    assert load_old_seal(tmp_path, until + 1) is None
    sealer = Sealer(new.seal)
    sealer.accept([(accepted.key, time.monotonic() + 100)])
    assert sealer.open(Sealer(old.seal).seal(b"frame")) == b"frame"
    assert Sealer(old.seal).open(sealer.seal(b"frame")) is None
    sealer.accept([(accepted.key, time.monotonic() - 1)])
    assert sealer.open(Sealer(old.seal).seal(b"frame")) is None


def test_running_and_restarted_nodes_understand_each_other_during_a_rotation(tmp_path: Path) -> None:
    async def rotate() -> None:
        keys = load_cluster_keys(tmp_path)
        running = Sealer(keys.seal)
        watch = KeyWatch(tmp_path, keys, running, lambda allowed: None)
        watch.start()
        rotate_cluster_key(tmp_path, 100.0)
        watch.look()
        watch.stop()
        fresh = load_cluster_keys(tmp_path)
        restarted = Sealer(fresh.seal)
        watch = KeyWatch(tmp_path, fresh, restarted, lambda allowed: None)
        watch.start()
        watch.stop()
        assert running.open(restarted.seal(b"new to old")) == b"new to old"
        assert restarted.open(running.seal(b"old to new")) == b"old to new"

    asyncio.run(rotate())


def test_a_damaged_allow_list_changes_nothing_while_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def look() -> None:
        keys = load_cluster_keys(tmp_path)
        lists: list[object] = []
        watch = KeyWatch(tmp_path, keys, Sealer(keys.seal), lists.append)
        watch.start()
        write_private(tmp_path / "allowed.peers", b"nonsense\n", replace=True)
        watch.look()
        assert lists == []
        (tmp_path / "allowed.peers").unlink()
        watch.look()
        assert lists == [()]
        watch.stop()

    asyncio.run(look())
    assert "line 1" in caplog.text


# ----------------------------------------------------------------------------------------------------------- identities


def test_an_identity_is_made_once_and_private(tmp_path: Path) -> None:
    made = make_identity(tmp_path)
    assert load_identity(tmp_path) == made
    assert stat.S_IMODE((tmp_path / IDENTITY_FILE).stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="has an identity"):
        make_identity(tmp_path)
    assert load_identity(tmp_path / "elsewhere") is None


def _allow(numbered: tuple[str, int]) -> None:
    folder, number = numbered
    allow(Path(folder), make_identity(Path(folder) / str(number)).public.line(f"peer{number}"))


def test_processes_that_change_the_allow_list_at_once_lose_nothing(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_allow, [(str(tmp_path), number) for number in range(12)], chunksize=1)
    assert sorted(peer.label for peer in load_allowed(tmp_path)) == sorted(f"peer{number}" for number in range(12))
    for number in range(12):
        revoke(tmp_path, f"peer{number}")
    assert load_allowed(tmp_path) == ()


@pytest.mark.parametrize(
    ("name", "content"), [("identity.key", b"short"), ("allowed.peers", b"\xff\xfe"), ("allowed.peers", b"x\n")]
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_private(tmp_path / name, content, replace=True)
    with pytest.raises(ConfigError, match=name):
        load_identity(tmp_path)
        load_allowed(tmp_path)


@pytest.mark.parametrize("name", ["identity.key", "allowed.peers"])
def test_files_that_others_can_read_are_refused_with_the_fix(tmp_path: Path, name: str) -> None:
    other = make_identity(tmp_path / "other")
    make_identity(tmp_path)
    allow(tmp_path, other.public.line("other"))
    (tmp_path / name).chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_identity(tmp_path)
        load_allowed(tmp_path)
