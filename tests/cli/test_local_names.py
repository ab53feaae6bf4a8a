from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcomm_p2p.errors import ConfigError, NameTakenError
from kvcomm_p2p.local_names import SOCKET_PATH_BYTES_MAX, claim_name, running_nodes, socket_path


def test_a_claimed_name_is_listed_until_released(runtime_dir: Path) -> None:
    claim = claim_name(runtime_dir, "planner")
    assert [(node.name, node.pid) for node in running_nodes(runtime_dir)] == [("planner", os.getpid())]
    claim.release()
    claim.release()
    assert running_nodes(runtime_dir) == []
    assert list(runtime_dir.iterdir()) == []


def test_a_live_name_is_refused_with_its_pid_and_the_fix(runtime_dir: Path) -> None:
    claim = claim_name(runtime_dir, "planner")
    with pytest.raises(NameTakenError, match=rf"'planner'.*process {os.getpid()}.*--name.*kill {os.getpid()}"):
        claim_name(runtime_dir, "planner")
    claim_name(runtime_dir, "coder").release()
    claim.release()


def test_files_of_a_killed_process_are_taken_over(runtime_dir: Path) -> None:
    source = (
        "import sys, pathlib, signal; from kvcomm_p2p.local_names import claim_name; "
        "claim = claim_name(pathlib.Path(sys.argv[1]), 'planner'); claim.socket.touch(); print('held', flush=True); "
        "signal.pause()"
    )
    holder = subprocess.Popen([sys.executable, "-c", source, runtime_dir], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert [node.pid for node in running_nodes(runtime_dir)] == [holder.pid]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert socket_path(runtime_dir, "planner").exists()
    assert running_nodes(runtime_dir) == []
    claim = claim_name(runtime_dir, "planner")
    assert not claim.socket.exists()
    assert [node.pid for node in running_nodes(runtime_dir)] == [os.getpid()]
    claim.release()


@pytest.mark.parametrize("name", ["规划者", "two words", "-flag", "x" * 64])
def test_names_that_make_no_good_file_name_are_listed_as_written(runtime_dir: Path, name: str) -> None:
    claim = claim_name(runtime_dir, name)
    assert [node.name for node in running_nodes(runtime_dir)] == [name]
    claim.release()


def test_a_long_path_gets_a_short_file_name() -> None:
    directory = Path("/" + "d" * 80)
    plain, hashed = socket_path(directory, "abc"), socket_path(directory, "a" * 40)
    assert plain.name == "abc.sock"
    assert len(os.fsencode(hashed)) <= SOCKET_PATH_BYTES_MAX
    assert hashed != socket_path(directory, "a" * 41)


def test_a_directory_in_which_nothing_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVCOMM_RUNTIME_DIR"):
        socket_path(Path("/" + "d" * 120), "abc")


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a/b", "x" * 65, "é" * 33])
def test_bad_names_are_refused(runtime_dir: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="agent name"):
        claim_name(runtime_dir, name)


def test_a_directory_that_others_may_enter_is_refused_and_left_as_it_is(runtime_dir: Path) -> None:
    runtime_dir.mkdir(mode=0o755)
    runtime_dir.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        claim_name(runtime_dir, "planner")
    assert runtime_dir.stat().st_mode & 0o777 == 0o755


def test_a_new_directory_is_private(runtime_dir: Path) -> None:
    claim = claim_name(runtime_dir, "planner")
    assert runtime_dir.stat().st_mode & 0o777 == 0o700
    claim.release()


def test_a_lock_file_with_rubbish_does_not_hide_the_node(runtime_dir: Path) -> None:
    claim = claim_name(runtime_dir, "planner")
    for rubbish in ("", "{", json.dumps([1]), json.dumps({"name": "planner"})):
        claim.socket.with_suffix(".lock").write_text(rubbish)
        assert [(node.name, node.pid) for node in running_nodes(runtime_dir)] == [("planner", 0)]
    claim.release()
