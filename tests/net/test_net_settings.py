"""Settings: where they come from, and that every problem is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.settings import Settings, is_loopback


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No settings file of the user gets in the way."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_defaults_work(nowhere: Path) -> None:
    settings = Settings.from_env({})
    assert settings.pool_bytes_max == 1 << 30
    assert settings.bind_host == "127.0.0.1"
    assert settings.node_config().pool_bytes_max == 1 << 30


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("1GiB", 1 << 30), ("1.5 gib", 3 << 29), ("7", 7), ("2MB", 2_000_000)]
)
def test_sizes_have_units(nowhere: Path, text: str, size: int) -> None:
    assert Settings.from_env({"KVCOMM_POOL_BYTES_MAX": text}).pool_bytes_max == size


def test_environment_beats_file_beats_default(nowhere: Path) -> None:
    file = nowhere / "my.toml"
    file.write_text('cluster = "lab"\ncontrol_port = 7001\npool_bytes_max = "2GiB"\n')
    settings = Settings.from_env({"KVCOMM_CONFIG": str(file), "KVCOMM_CONTROL_PORT": "7002"})
    assert (settings.cluster, settings.control_port, settings.pool_bytes_max) == ("lab", 7002, 2 << 30)


def test_file_in_the_usual_place_is_found(nowhere: Path) -> None:
    (nowhere / "kvcomm").mkdir()
    (nowhere / "kvcomm" / "config.toml").write_text('cluster = "usual"\n')
    assert Settings.from_env({}).cluster == "usual"


def test_every_problem_is_named(nowhere: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env(
            {
                "KVCOMM_BIND_HOST": "0.0.0.0",
                "KVCOMM_CONTROL_PORT": "99999",
                "KVCOMM_POOL_BYTES_MAX": "much",
                "KVCOMM_POOL_BYTE_MAX": "1GiB",
                "KVCOMM_STATE_DIR": "relative",
                "KVCOMM_PROBE_INTERVAL_S": "0.1",
            }
        )
    message = str(caught.value)
    for part in (
        "0.0.0.0",
        "127.0.0.1",
        "99999",
        "512MiB",
        "did you mean KVCOMM_POOL_BYTES_MAX",
        "state_dir",
        "probe_interval_s",
    ):
        assert part in message


@pytest.mark.parametrize("content", ["cluster = ", "cluster = [1]\n", "nonsense = 1\n"])
def test_bad_files_are_named(nowhere: Path, content: str) -> None:
    file = nowhere / "bad.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        Settings.from_env({"KVCOMM_CONFIG": str(file)})


def test_missing_named_file_is_an_error(nowhere: Path) -> None:
    absent = nowhere / "absent.toml"
    with pytest.raises(ConfigError) as raised:
        Settings.from_env({"KVCOMM_CONFIG": str(absent)})
    assert (
        str(raised.value) == f"settings file {absent} cannot be read (No such file or directory): check KVCOMM_CONFIG"
    )


def test_equal_ports_are_refused() -> None:
    with pytest.raises(ConfigError, match="both 7000"):
        Settings(control_port=7000, bulk_port=7000)


def test_cluster_names_make_cluster_ids() -> None:
    one, same, other = Settings(cluster="a"), Settings(cluster="a"), Settings(cluster="b")
    assert one.node_config().cluster_id == same.node_config().cluster_id != other.node_config().cluster_id


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("", False),
        ("example.org", False),
        ("::", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
