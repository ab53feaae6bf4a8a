"""What is simulated: one TOML file, checked before anything starts."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.protocol.config import PEERS_MAX_MAX, NodeConfig
from kvcomm_p2p.protocol.errors import SettingsError
from kvcomm_p2p.sim import workloads
from kvcomm_p2p.sim.ablations import Ablation, runs_of
from kvcomm_p2p.sim.cost_table import DEFAULT_TABLE
from kvcomm_p2p.sim.graphs import make_graph
from kvcomm_p2p.sim.links import PROFILES, LinkProfile
from kvcomm_p2p.sim.recorded import recorded_workload
from kvcomm_p2p.sim.scenario_errors import sentence

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib

PRESETS = Path(__file__).parent / "presets"
AGENTS_MAX = PEERS_MAX_MAX
"""As many as one node may know."""

NODE_BYTES = 60_000
PEER_BYTES = 120
"""Memory of a simulated node, and of each peer that it knows (measured, rounded up)."""

EXPONENT_MAX = 8.0
"""Of a Zipf distribution: with more, only the first is ever asked for."""

HEARD_BYTES = 120
"""Of each node for each update that is followed."""

TASK_BYTES = 50_000
"""Of a task, what came of it, and what agents and a central pool remember of it (measured, rounded up)."""

Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Fabrics = Literal["none", "own", "central", "peers"]


class NetworkSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """`inside`: links within a site; `between`: from site to site. Agents are dealt out to `sites` sites in turn."""

    inside: str = "lan"
    between: str = "wan"
    sites: Annotated[int, Meta(ge=1)] = 1
    loss: Share = 0.0
    duplication: Share = 0.0
    reordering: Share = 0.0
    same_host: bool = False
    """All agents are processes of one machine and user: blocks are shared in memory instead of being sent."""
    latency_s: Seconds | None = None
    bytes_per_s: Annotated[float, Meta(gt=0)] | None = None

    def profiles(self) -> tuple[LinkProfile, LinkProfile]:
        """Links inside a site and between sites. Raises ConfigError."""
        return self._profile(self.inside), self._profile(self.between)

    def _profile(self, name: str) -> LinkProfile:
        if name not in PROFILES:
            raise ConfigError(f"network profile {name!r} is unknown: choose one of {', '.join(PROFILES)}")
        changes: dict[str, float] = {
            "loss": self.loss,
            "duplication": self.duplication,
            "reordering": self.reordering,
        }
        if self.latency_s is not None:
            changes["latency_s"] = self.latency_s
        if self.bytes_per_s is not None:
            changes["bytes_per_s"] = self.bytes_per_s
        return dataclasses.replace(PROFILES[name], **changes)


class CentralSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The one server of the central pool: its network interface (by default an agent's, `interfaces` times), for how long an
    operation holds the lock that all take in turn, and how many bytes it keeps."""

    bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    interfaces: Annotated[float, Meta(gt=0)] = 1.0
    lock_s: Seconds = 0.0002
    pool_bytes: Annotated[int, Meta(gt=0)] = 64 << 30


class FaultSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that goes wrong `at_s`, for `for_s` seconds, to `nodes` of the agents (numbers), or to a `share` of them.

    Who belongs to a share is drawn at random. partition: they are cut off from the others, both ways, or `one_way`: what they
    send is lost, what they are sent arrives. churn: all through `for_s`, one of them after the other crashes and returns,
    `every_s`. Who returns with its state is in its next epoch, or, `rolled_back`, in the same again: its disk is older.
    """

    kind: Literal["crash", "restart", "freeze", "partition", "slow", "leave", "churn", "loss"]
    at_s: Seconds
    for_s: Seconds = 0.0
    nodes: tuple[int, ...] = ()
    share: Share = 0.0
    every_s: Annotated[float, Meta(ge=0.01)] = 1.0
    factor: Annotated[float, Meta(ge=1)] = 10.0
    keeps_state: bool = True
    rolled_back: bool = False
    one_way: bool = False
    loss: Share = 0.1


class HerdSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """`times` times, evenly spread, all agents but one want the same anchor of `blocks` blocks of `block_bytes` bytes within
    `spread_s` seconds (fabric peers)."""

    times: Annotated[int, Meta(ge=0)] = 0
    blocks: Annotated[int, Meta(ge=1, le=16)] = 16
    block_bytes: Annotated[int, Meta(ge=1024, le=1 << 28)] = 1 << 20
    spread_s: Seconds = 0.002


class Scenario(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See docs/simulator.md for every key."""

    name: Annotated[str, Meta(min_length=1)]
    about: str = ""
    agents: Annotated[int, Meta(ge=1, le=AGENTS_MAX)]
    duration_s: Annotated[float, Meta(gt=0)]
    warmup_s: Seconds = 0.0
    """Prompts asked before this time are answered but not counted."""
    up_s: tuple[Seconds, ...] = ()
    """For how long each agent is up when the scenario begins; none given: a few seconds."""
    beliefs: Literal["link", "first"] = "link"
    """What agents believe of transfers before they have seen one: half of what the link can do, or what the product begins
    with everywhere (`planning.costs.first_costs`)."""
    seed: int = 0
    costs: str = DEFAULT_TABLE
    mode: Literal["exact", "balanced", "fast", "dense"] = "balanced"
    profile: str = "smollm2-135m"
    wire_encoding: Literal["auto", "raw", "int8"] = "auto"
    """How KV travels, as the setting of that name of an agent says."""
    fabrics: tuple[Fabrics, ...] = ("none", "own", "central", "peers")
    ablations: tuple[str, ...] = ()
    """Names in `ablations.ABLATIONS`: the fabric peers is run once more without each of these."""
    updates: Annotated[int, Meta(ge=0)] = 20
    """Updates whose way to everybody is followed (fabric peers)."""
    publish_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Small anchors that each agent publishes per second without being asked anything (fabric peers)."""
    publish_kept: Annotated[int, Meta(ge=1)] = 5
    """How many of those it holds; older ones are evicted."""
    pool_bytes: Annotated[int, Meta(gt=0)] = 1 << 30
    models: Annotated[int, Meta(ge=1)] = 1
    """How many models there are: agent i has model i modulo so many, and what it computes is of no use to the others."""
    only_tasks: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """Numbers of the workload's tasks that are asked, in their order; none given: all."""
    workload: Mapping[str, Any] = msgspec.field(default_factory=dict)
    network: NetworkSpec = NetworkSpec()
    central: CentralSpec = CentralSpec()
    protocol: Mapping[str, Any] = msgspec.field(default_factory=dict)
    faults: tuple[FaultSpec, ...] = ()
    herd: HerdSpec = HerdSpec()

    def make_workload(self) -> workloads.Workload | None:
        """None: nobody is asked anything, only the protocol runs. Raises ConfigError."""
        chosen = dict(self.workload)
        kind = chosen.pop("kind", "none")
        if kind == "none":
            return None
        if "tasks_per_agent_s" in chosen:
            if "tasks_per_s" in chosen:
                raise ConfigError("workload: set tasks_per_s or tasks_per_agent_s, not both")
            each = chosen.pop("tasks_per_agent_s")
            if isinstance(each, bool) or not isinstance(each, int | float):
                raise ConfigError(f"workload.tasks_per_agent_s must be a number, not {each!r}")
            chosen["tasks_per_s"] = self.agents * each
        if kind == "graph":
            graph = make_graph(str(chosen.pop("graph", "full")), self.agents, self.seed)
            walked: workloads.Workload = _build(workloads.Graph, {"graph": graph, **chosen}, "workload")
            return walked
        if kind == "recorded":
            path = chosen.pop("path", None)
            if not isinstance(path, str) or chosen:
                raise ConfigError("workload recorded takes one key, path: what kvcomm sim validate --record wrote")
            return recorded_workload(Path(path), self.agents)
        if kind not in workloads.KINDS:
            known = ", ".join(["none", "graph", "recorded", *workloads.KINDS])
            raise ConfigError(f"workload kind {kind!r} is unknown: choose one of {known}")
        if "agents" in chosen:
            raise ConfigError("workload.agents is the scenario's agents: set that")
        made: workloads.Workload = _build(workloads.KINDS[kind], {"agents": self.agents, **chosen}, "workload")
        return made

    def runs(self) -> list[tuple[str, str, Ablation | None]]:
        """What is simulated: see `ablations.runs_of`. Raises ConfigError."""
        return runs_of(self.fabrics, self.ablations)

    def node_config(self, ablation: Ablation | None = None) -> NodeConfig:
        """Settings of all nodes, without what the ablation takes away. Raises ConfigError."""
        peers_max = max(16, min(2 * self.agents, PEERS_MAX_MAX))
        instead = {} if ablation is None else ablation.protocol
        chosen = {"pool_bytes_max": self.pool_bytes, "peers_max": peers_max, **self.protocol, **instead}
        config: NodeConfig = _build(NodeConfig, chosen, "protocol")
        return config

    def memory_bytes(self) -> int:
        """About what the simulation needs, before it starts."""
        workload = self.make_workload()
        tasks = getattr(workload, "tasks_per_s", 0.0) * self.duration_s
        heard = HEARD_BYTES * self.updates * self.agents
        return round(self.agents * (NODE_BYTES + PEER_BYTES * self.agents) + TASK_BYTES * tasks + heard)


def _build(kind: type[Any], chosen: Mapping[str, Any], where: str) -> Any:
    known = [field.name for field in fields(kind)]
    for key in chosen:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}.{key} is unknown: {hint}")
    try:
        built = kind(**chosen)
    except (SettingsError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if where == "workload":
        _check_numbers(built, where)
    return built


def _check_numbers(built: Any, where: str) -> None:
    """Counts, tokens and rates of a workload are above 0 and of the declared type."""
    for field in fields(built):
        value = getattr(built, field.name)
        if field.type in ("int", "float") and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{where}.{field.name} must be a number, not {value!r}")
        if field.type == "int" and not isinstance(value, int):
            raise ConfigError(f"{where}.{field.name} must be a whole number, not {value!r}")
        if field.name.endswith("exponent"):
            if not 0 <= value <= EXPONENT_MAX:
                raise ConfigError(f"{where}.{field.name} must be 0 to {EXPONENT_MAX:g}, not {value!r}")
        elif field.type in ("int", "float") and not 1e-9 <= value < math.inf:
            raise ConfigError(f"{where}.{field.name} must be above 0 and finite, not {value!r}")


def presets() -> list[str]:
    """Names of the scenarios that come with the simulator."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_scenario(name: str, changes: Mapping[str, Any] | None = None) -> Scenario:
    """A preset by name or a TOML file by path, with `changes` ("agents", "network.loss", …) put in its place.

    Raises ConfigError with one message that names the key and the fix.
    """
    path = PRESETS / f"{name}.toml" if name in presets() else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, presets(), 1)
        hint = f"did you mean {near[0]}?" if near else f"presets: {', '.join(presets())}"
        raise ConfigError(f"{name!r} is neither a preset nor a scenario file that exists; {hint}")
    try:
        written: dict[str, Any] = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    written.setdefault("name", path.stem)
    for key, value in (changes or {}).items():
        put_key(written, key, value)
    return check_scenario(written)


def put_key(written: dict[str, Any], key: str, value: Any) -> None:
    """Put a value in the place that a key names ("network.loss"). Raises ConfigError where a table is none."""
    *tables, last = key.split(".")
    for table in tables:
        written = written.setdefault(table, {})
        if not isinstance(written, dict):
            raise ConfigError(f"{key}: {table} is no table")
    written[last] = value


def check_scenario(written: Mapping[str, Any]) -> Scenario:
    """A scenario from parsed TOML; everything that can be checked without running it is. Raises ConfigError."""
    try:
        scenario = msgspec.convert(written, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"scenario: {sentence(error, written, Scenario)}") from error
    _check_finite(written, "")
    scenario.make_workload()
    scenario.node_config()
    scenario.network.profiles()
    for fault in scenario.faults:
        if any(not 0 <= number < scenario.agents for number in fault.nodes):
            raise ConfigError(f"faults: {fault.kind} names an agent that does not exist (agents = {scenario.agents})")
        if fault.at_s >= scenario.duration_s:
            raise ConfigError(
                f"faults: {fault.kind} at_s = {fault.at_s:g} is never: duration_s is {scenario.duration_s:g}"
            )
        if fault.kind != "loss" and not fault.nodes and not fault.share:
            raise ConfigError(f"faults: {fault.kind} hits nobody: set nodes or share")
    if scenario.up_s and len(scenario.up_s) != scenario.agents:
        raise ConfigError(f"up_s names {len(scenario.up_s)} agents, there are {scenario.agents}")
    if not scenario.fabrics:
        raise ConfigError("fabrics is empty: nothing would be simulated")
    for _, _, ablation in scenario.runs():
        scenario.node_config(ablation)
    if scenario.warmup_s >= scenario.duration_s:
        told = f"warmup_s = {scenario.warmup_s:g} must be below duration_s = {scenario.duration_s:g}"
        raise ConfigError(f"{told}, or nothing would be counted")
    if scenario.herd.times and "peers" not in scenario.fabrics:
        raise ConfigError("herd is of the fabric peers: add peers to fabrics, or set herd.times = 0")
    return scenario


def _check_finite(value: Any, where: str) -> None:
    """Neither inf nor nan, which TOML can write."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"scenario: {where} must be a finite number, not {value}")
    if isinstance(value, Mapping):
        for key, each in value.items():
            _check_finite(each, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            _check_finite(each, where)
