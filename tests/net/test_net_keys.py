"""The cluster key on disk, and seals."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.keys import ClusterKeys, load_cluster_keys
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
