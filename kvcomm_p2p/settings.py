"""What a user can set, from where, and what is wrong with it. The only reader of KVCOMM_* variables and of the
settings file.

Precedence: environment, then the TOML file (KVCOMM_CONFIG, or config.toml in the user's configuration folder), then
defaults.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import platformdirs

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.errors import SettingsError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib

PREFIX = "KVCOMM_"
OPENMP_SPINS = 3000
"""Turns of libgomp's waiting loop (microseconds in all) before a thread sleeps; `share_cores` says why."""

METRICS_ANY_PORT = -1
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

_WORDS = {"metrics_port": {"off": "0", "any": str(METRICS_ANY_PORT)}}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
ENCRYPT = ("auto", "always")
WIRE_ENCODINGS = ("auto", "raw", "int8")
ANY_HOST = "0.0.0.0"

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 1000, "MB": 1000**2, "GB": 1000**3}


def _default_runtime_dir() -> Path:
    """A folder that goes with the session; without a session (containers, ssh commands) one of the user's own in /tmp.

    platformdirs would warn and share a parent there, which another user could have made first.
    """
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(session) / "kvcomm" if Path(session).is_dir() and session else Path(f"/tmp/kvcomm-{os.getuid()}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one process; each field is also KVCOMM_<FIELD> and a key of the file. Raises ConfigError listing
    all problems."""

    state_dir: Path = field(default_factory=lambda: Path(platformdirs.user_state_dir("kvcomm")))
    """Cluster key and what must survive a restart."""

    cache_dir: Path = field(default_factory=lambda: Path(platformdirs.user_cache_dir("kvcomm")))
    """Models and whatever can be made again."""

    runtime_dir: Path = field(default_factory=_default_runtime_dir)
    """Unix sockets of running nodes."""

    cluster: str = "default"
    """Nodes of clusters with different names refuse each other."""

    bind_host: str = "127.0.0.1"
    """IPv4 address to listen on. Any but loopback needs keys and an allow-list (`kvcomm keys`)."""

    advertise_host: str = ""
    """IPv4 address under which peers reach this node; empty: `bind_host`."""

    encrypt: str = "auto"
    """"auto": connections are encrypted unless the node listens on loopback; "always": there too."""

    secret_grace_s: float = 3600.0
    """Seconds for which the cluster's secret still opens frames after `kvcomm keys rotate`."""

    control_port: int = 0
    """0: any free port."""

    bulk_port: int = 0
    """0: any free port."""

    pool_bytes_max: int = 1 << 30
    """Bytes of KV that a node holds ("512MiB" works)."""

    pool_anchors_max: int = 5000
    """Anchors that a node holds."""

    deviation_bytes: int = 64 << 20
    """Bytes of remembered deviations, by which short runs are corrected; 0: short runs are recomputed."""

    gossip_interval_s: float = 0.2
    """Seconds between gossip rounds."""

    probe_interval_s: float = 1.0
    """Seconds between probes, each of one peer."""

    probe_timeout_s: float = 0.5
    """Seconds until a peer that does not answer a probe is probed through others."""

    tokens_timeout_s: float = 0.1
    """Seconds that a request waits for a peer's token ids."""

    directory: str = "auto"
    """Who knows which anchors are where: "full" (every node all), "sharded" (owners of shards), or "auto"."""

    pull_stall_timeout_s: float = 0.2
    """Seconds without progress until a pull is given up."""

    upload_bytes_per_s_max: int = 0
    """Bytes of blocks sent to peers per second in all; 0: no limit."""

    anchor_ttl_s: float = 0.0
    """Seconds after which a node forgets an anchor that nobody published again; 0: never."""

    metrics_port: int = 0
    """Port of the Prometheus metrics on 127.0.0.1; 0 or "off": none, "any": any free port (`kvcomm status --json` tells
    which)."""

    shared_memory: bool = True
    """Whether blocks are shared with agents of the same user on this machine instead of being sent."""

    wire_encoding: str = "auto"
    """How KV travels: "auto" (as int8 where that is faster, the copy is exact and the request's divergence budget has room),
    "int8" (wherever it may be approximate), or "raw" (never as int8, nor sent so to others)."""

    record_dir: str = ""
    """Folder for a recording of everything that reaches the node, made if it is missing; empty: none. See docs/recording.md:
    it holds token ids."""

    record_redact: bool = False
    """Whether token ids in recordings are replaced by digests."""

    record_bytes_max: int = 256 << 20
    """Bytes after which a recording ends ("512MiB" works)."""

    log: str = "text"
    """How `kvcomm` writes its log on stderr: "text", or "json" with one object a line."""

    log_level: str = "warning"
    """The least that `kvcomm` logs: debug, info, warning or error."""

    def __post_init__(self) -> None:
        problems = [*self._bad_addresses(), *self._bad_folders(), *self._bad_node_values(), *self._bad_watching()]
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read file and environment (`os.environ` unless given). Raises ConfigError listing every problem with its
        fix."""
        environ = os.environ if environ is None else environ
        problems: list[str] = []
        given = _from_file(environ, problems)
        for name, text in environ.items():
            if name.startswith(PREFIX) and name != f"{PREFIX}CONFIG":
                given[name[len(PREFIX) :].lower()] = (name, text)
        values: dict[str, Any] = {}
        kinds = {item.name: item.type for item in fields(cls)}
        for key, (source, text) in given.items():
            if key not in kinds:
                near = difflib.get_close_matches(key, kinds, n=1)
                spelled = [f"{PREFIX}{kind.upper()}" if source.startswith(PREFIX) else kind for kind in (near or kinds)]
                hint = f"did you mean {spelled[0]}?" if near else f"remove it; known are {', '.join(spelled)}"
                problems.append(f"{source} is not a setting: {hint}")
                continue
            try:
                values[key] = _parse(str(kinds[key]), key, text)
            except ValueError as error:
                problems.append(f"{source}: {error}")
        try:
            settings = cls(**values)
        except ConfigError as error:
            raise ConfigError("; ".join([*problems, str(error)])) from None
        if problems:
            raise ConfigError("; ".join(problems))
        return settings

    def node_config(self) -> NodeConfig:
        """The protocol's settings; the cluster's id is a digest of its name (its key is checked by every seal)."""
        return NodeConfig(
            cluster_id=hashlib.sha256(b"kvcomm cluster\0" + self.cluster.encode()).digest()[:16],
            gossip_interval_s=self.gossip_interval_s,
            probe_interval_s=self.probe_interval_s,
            probe_timeout_s=self.probe_timeout_s,
            tokens_timeout_s=self.tokens_timeout_s,
            directory=self.directory,
            pull_stall_timeout_s=self.pull_stall_timeout_s,
            pool_bytes_max=self.pool_bytes_max,
            pool_anchors_max=self.pool_anchors_max,
            anchor_ttl_s=self.anchor_ttl_s,
            upload_bytes_per_s_max=self.upload_bytes_per_s_max,
        )

    @property
    def encrypted(self) -> bool:
        """Whether connections are encrypted."""
        return self.encrypt == "always" or not is_loopback(self.bind_host)

    def _bad_addresses(self) -> list[str]:
        problems = []
        if not is_ipv4(self.bind_host):
            problems.append(f"bind_host {self.bind_host!r} is not an IPv4 address; use for example 127.0.0.1")
        elif self.bind_host == ANY_HOST and not self.advertise_host:
            problems.append(
                f"bind_host {ANY_HOST} is no address that peers can reach: also set advertise_host, or use 127.0.0.1"
            )
        if self.advertise_host and (not is_ipv4(self.advertise_host) or self.advertise_host == ANY_HOST):
            problems.append(f"advertise_host {self.advertise_host!r} is not an IPv4 address that peers can reach")
        if self.encrypt not in ENCRYPT:
            problems.append(f"encrypt {self.encrypt!r} is not one of {', '.join(ENCRYPT)}")
        if self.wire_encoding not in WIRE_ENCODINGS:
            problems.append(f"wire_encoding {self.wire_encoding!r} is not one of {', '.join(WIRE_ENCODINGS)}")
        for name in ("control_port", "bulk_port"):
            port = getattr(self, name)
            if not 0 <= port <= 65535:
                problems.append(f"{name} {port} is not between 0 and 65535; use 0 for any free port")
        if self.control_port and self.control_port == self.bulk_port:
            problems.append(f"control_port and bulk_port are both {self.control_port}; use 0 for one of them")
        if not self.cluster:
            problems.append('cluster is empty; use a name such as "default"')
        return problems

    def _bad_watching(self) -> list[str]:
        problems = []
        if self.metrics_port != METRICS_ANY_PORT and not 0 <= self.metrics_port <= 65535:
            problems.append(f'metrics_port {self.metrics_port} is not between 0 and 65535; use "any" for any free port')
        if self.record_dir and not Path(self.record_dir).is_absolute():
            problems.append(f"record_dir {self.record_dir!r} is not an absolute path")
        if self.record_bytes_max < 1 << 20:
            problems.append(f"record_bytes_max {self.record_bytes_max} is below 1MiB")
        if self.log not in LOG_FORMATS:
            problems.append(f"log {self.log!r} is not one of {', '.join(LOG_FORMATS)}")
        if self.log_level not in LOG_LEVELS:
            problems.append(f"log_level {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        return problems

    def _bad_folders(self) -> list[str]:
        problems = []
        for name in ("state_dir", "cache_dir", "runtime_dir"):
            path = getattr(self, name)
            if not path.is_absolute():
                problems.append(f"{name} {str(path)!r} is not an absolute path")
            elif path.exists() and not path.is_dir():
                problems.append(f"{name} {str(path)!r} is a file; name a folder")
        return problems

    def _bad_node_values(self) -> list[str]:
        problems = []
        for name in ("anchor_ttl_s", "secret_grace_s"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} {getattr(self, name)} is not a number of seconds from 0")
        if self.upload_bytes_per_s_max < 0:
            problems.append(f"upload_bytes_per_s_max {self.upload_bytes_per_s_max} is negative; use 0 for no limit")
        if self.deviation_bytes < 0:
            problems.append(f"deviation_bytes {self.deviation_bytes} is negative; use 0 to remember nothing")
        try:
            self.node_config()
        except SettingsError as error:
            problems += error.problems
        return problems


def is_ipv4(host: str) -> bool:
    """Whether it is an IPv4 address or "localhost": no name is looked up anywhere."""
    if host == "localhost":
        return True
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host` ("localhost" or an IPv4 address in 127.0.0.0/8)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _from_file(environ: Mapping[str, str], problems: list[str]) -> dict[str, tuple[str, Any]]:
    named = environ.get(f"{PREFIX}CONFIG", "")
    path = Path(named) if named else Path(platformdirs.user_config_dir("kvcomm")) / "config.toml"
    if not named and not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fix = "check KVCOMM_CONFIG" if named else "check its permissions"
        problems.append(f"settings file {path} cannot be read ({error.strerror or error}): {fix}")
        return {}
    except ValueError as error:
        problems.append(f"settings file {path} is not TOML: {error}")
        return {}
    return {key: (f"{key} in {path}", value) for key, value in table.items()}


def _parse(kind: str, key: str, value: Any) -> Any:
    """Raises ValueError saying what would be right."""
    if kind == "bool":
        if isinstance(value, bool):
            return value
        if str(value).strip().lower() not in _TRUTH:
            raise ValueError(f"{value!r} is neither true nor false")
        return _TRUTH[str(value).strip().lower()]
    if isinstance(value, bool | list | dict):
        raise ValueError(f"{value!r} must be a text or a number")
    value = _WORDS.get(key, {}).get(str(value).strip().lower(), value)
    if kind == "Path":
        return Path(str(value)).expanduser()
    if kind == "str":
        return str(value)
    if kind == "float":
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a number") from None
    if key.endswith(("_bytes", "_bytes_max", "_bytes_per_s_max")):
        return _parse_bytes(str(value))
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


def _parse_bytes(text: str) -> int:
    digits = text.strip().rstrip("BbKkMmGgIi ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 1GiB") from None


def share_cores() -> None:
    """Let OpenMP threads sleep soon while they wait, unless the user has chosen otherwise. Call before torch is imported.

    Several agents on one machine want its cores at the same time. By default libgomp's threads spin for milliseconds at every
    barrier, which burns the time that another agent's threads need to reach theirs: three processes on two cores got a third
    of the work done that they get done with a short spin. Alone, a short spin costs nothing measurable, no spin about 15 %.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(OPENMP_SPINS)
