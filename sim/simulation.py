"""One scenario on one fabric, from the first join to the last answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.planning.costs import first_costs
from kvcomm_p2p.planning.types import Mode, ReuseRules
from kvcomm_p2p.protocol.events import MembersKnown
from kvcomm_p2p.protocol.ids import NODE_ID_BYTES, ModelId, NodeId
from kvcomm_p2p.protocol.member_table import KnownMembers
from kvcomm_p2p.protocol.messages import Capability, MemberRecord
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.sim.ablations import Ablation
from kvcomm_p2p.sim.agents import Outcome, Rules, SimAgent
from kvcomm_p2p.sim.central import CentralFabric, CentralPool
from kvcomm_p2p.sim.convergence import Convergence
from kvcomm_p2p.sim.cost_table import CostTable
from kvcomm_p2p.sim.encoding import Int8
from kvcomm_p2p.sim.fabrics import Fabric, OwnFabric, PeerFabric
from kvcomm_p2p.sim.faults import Faults
from kvcomm_p2p.sim.herd import Herds
from kvcomm_p2p.sim.links import Links
from kvcomm_p2p.sim.machine import Hardware, SimNode
from kvcomm_p2p.sim.metrics import Observed, Outage, PoolLoad
from kvcomm_p2p.sim.process import Process, Promise, gather, spawn
from kvcomm_p2p.sim.publishing import Publishing
from kvcomm_p2p.sim.scenario import Scenario
from kvcomm_p2p.sim.workloads import Step, Task, answer_of, prompt_of, until
from kvcomm_p2p.sim.world import NodeMaker, World

HOST = b"simulated host.."
FIRST_PORT = 20000
MODEL = ModelId(b"simulated model.")
JOIN_SPREAD_S = 0.5
"""Nodes are switched on within this time."""

SETTLE_S = 3.0
"""Time for joining before the first prompt; the scenario's times count from its end."""

JOINING_MAX = 256
"""More agents than this begin as members of each other: n nodes that learn of n others one by one take n * n steps, and who
simulates thousands does not ask for their first second."""

KNOWN_SETTLE_S = 0.5
"""Then so much time is enough for everybody's timers to be out of step."""

DRAIN_S = 600.0
"""So long after the last arrival what was asked may still be answered."""

AGENT_FAULTS = frozenset({"crash", "restart", "churn", "leave"})
"""What happens to an agent whatever it shares with whom; the other faults are of the network between peers."""

Progress = Callable[[float], None]
"""Told the simulated share of the run, 0 to 1."""


class Simulation:
    """Build with everything checked; `run` once."""

    def __init__(
        self,
        scenario: Scenario,
        fabric: str,
        table: CostTable,
        rules: ReuseRules,
        *,
        seed: int | None = None,
        ablation: Ablation | None = None,
        make_node: NodeMaker = Node,
    ) -> None:
        """`rules`: what the model's profile allows in the scenario's mode. `ablation`: what of the fabric is taken away.
        `make_node`: what stands in for `Node`, to record or to hurt it."""
        self.scenario = scenario
        self.fabric = fabric
        self._table = table
        self._seed = scenario.seed if seed is None else seed
        self._rules = _rules_of(scenario, fabric, rules, ablation)
        rng = random.Random(f"{scenario.name} {self._seed}")
        self._links = inside, between = scenario.network.profiles()
        self.world = World(
            rng.getrandbits(64),
            Links(random.Random(rng.getrandbits(64)), inside, between),
            Hardware(table.digest_bytes_per_s, table.int8_encode_bytes_per_s, table.frame_s),
            make_node,
        )
        self._rng = rng
        encodes = scenario.wire_encoding != "raw" and table.layout.int8_smaller
        always = scenario.wire_encoding == "int8"
        self._int8 = Int8(table.layout, table.int8_decode_bytes_per_s, always) if encodes else None
        self._config = scenario.node_config(ablation)
        first = first_costs(table.forward_s, table.token_s, table.layout.token_bytes)
        self._believes = replace(first, int8_share=table.layout.int8_share)
        if scenario.beliefs == "link":
            self._believes = table.costs(
                pull_latency_s=max(2 * inside.latency_s, 1e-4), pull_bytes_per_s=inside.bulk_bytes_per_s / 2
            )
        self._pool = CentralPool(self.world, scenario.central, inside) if fabric == "central" else None
        self.agents: list[SimAgent] = []
        self.observed = Observed(fabric if ablation is None else ablation.title, scenario.duration_s)
        self._convergence = Convergence(self.world)
        self._publishing: Publishing | None = None
        self.origin_s = 0.0
        self._begun = 0
        self._answering: dict[int, tuple[SimNode, int]] = {}

    def run(self, progress: Progress = lambda share: None) -> Observed:
        """Simulate. Times of outcomes count from the end of joining."""
        self._populate()
        settle_s = KNOWN_SETTLE_S if self._all_known else SETTLE_S
        self._advance(max(self.scenario.up_s, default=settle_s), progress)
        self.world.frames.clear()
        self.world.frame_bytes.clear()
        control_before = list(self.world.frame_bytes_of)
        origin_s = self.origin_s = self.world.now
        self._schedule_faults(origin_s)
        self._follow_updates(origin_s)
        self._publish()
        self._gather_herds(origin_s)
        self._ask_all(origin_s)
        self._advance(self.scenario.duration_s, progress)
        observed = self.observed
        observed.control_bytes = [b - a for a, b in zip(control_before, self.world.frame_bytes_of, strict=True)]
        observed.traffic, observed.frames = self.world.frame_bytes.copy(), self.world.frames.copy()
        if self._pool is not None:
            observed.pool = _load_of(self._pool, self.scenario.duration_s)
        self.world.run(DRAIN_S, until=self._all_answered)
        observed.outcomes = [replace(each, started_at=each.started_at - origin_s) for each in observed.outcomes]
        observed.outcomes.sort(key=lambda each: (each.started_at, each.agent))
        observed.outages = _outages(self.world, origin_s)
        self._finish(observed)
        return observed

    # ---------------------------------------------------------------------------------------------------------- inside

    def _populate(self) -> None:
        alone = self.fabric != "peers"
        for number in range(self.scenario.agents):
            record = self._record(number)
            machine = self.world.add(record, self._config, site=number % self.scenario.network.sites)
            if not alone and number and not self._all_known:
                up_s = self.scenario.up_s
                at_s = max(up_s) - up_s[number] if up_s else self._rng.random() * JOIN_SPREAD_S
                self.world.at(at_s, lambda machine=machine: self.world.join(machine, *self._seeds(machine)))  # type: ignore[misc]
            self.agents.append(self._agent(machine, self._rng.getrandbits(64)))
        if alone:
            for machine in self.world.nodes:
                machine.alone = True
        elif self._all_known:
            known = KnownMembers((machine.node.me, 0) for machine in self.world.nodes)
            for machine in self.world.nodes:
                self.world.handle(machine, MembersKnown(known, introduced=True))

    def _agent(self, machine: SimNode, seed: int) -> SimAgent:
        rules = replace(self._rules, model_id=machine.node.me.model_id)
        return SimAgent(machine.number, self._fabric_of(machine), self._table, rules, self._believes, seed)

    def _begin_anew(self, machine: SimNode) -> None:
        """A process that comes back has learned nothing yet, and computes nothing of what it was asked before."""
        seed = random.Random(f"agent {machine.number} {machine.generation} {self._seed}").getrandbits(64)
        self.agents[machine.number] = self._agent(machine, seed)

    @property
    def _all_known(self) -> bool:
        return self.fabric == "peers" and self.scenario.agents > JOINING_MAX and not self.scenario.up_s

    def _record(self, number: int) -> MemberRecord:
        same_host = self.scenario.network.same_host
        host = "127.0.0.1" if same_host else _host(number)
        port = FIRST_PORT + 2 * number if same_host else 7000
        return MemberRecord(
            node_id=NodeId(self._rng.randbytes(NODE_ID_BYTES)),
            epoch=1,
            name=f"agent-{number}",
            model_id=_model(number % self.scenario.models),
            control=f"{host}:{port}",
            bulk=f"{host}:{port + 1}",
            host=HOST if same_host else b"",
            capabilities=(Capability.SHARED_MEMORY if same_host else 0) | (Capability.INT8 if self._int8 else 0),
        )

    def _seeds(self, machine: SimNode) -> list[str]:
        first = self.world.nodes[: min(3, len(self.world.nodes))]
        return [node.node.me.control for node in first if node is not machine]

    def _fabric_of(self, machine: SimNode) -> Fabric:
        if self._pool is not None:
            site = machine.number % self.scenario.network.sites
            return CentralFabric(self.world, machine, self._pool, self._links[min(site, 1)], self._int8)
        if self.fabric == "peers":
            return PeerFabric(self.world, machine, self._int8)
        return OwnFabric(self.world, machine, keeps=self.fabric == "own")

    def _advance(self, seconds: float, progress: Progress) -> None:
        steps = 50
        for step in range(steps):
            self.world.run(seconds / steps)
            progress((step + 1) / steps)

    def _schedule_faults(self, origin_s: float) -> None:
        rng = random.Random(f"faults {self._seed}")  # the same agents are hit on every fabric
        faults = Faults(self.world, rng, lambda machine: self._seeds(machine)[:1], self._begin_anew)
        for fault in self.scenario.faults:
            if self.fabric == "peers" or fault.kind in AGENT_FAULTS:
                self.world.at(origin_s + fault.at_s, lambda fault=fault: faults.begin(fault))  # type: ignore[misc]

    def _follow_updates(self, origin_s: float) -> None:
        if self.fabric != "peers" or not self.scenario.updates or self.scenario.agents < 2:
            return
        step_s = self.scenario.duration_s / (self.scenario.updates + 1)
        for number in range(self.scenario.updates):
            machine = self._rng.choice(self.world.nodes)
            self.world.at(
                origin_s + step_s * (number + 1),
                lambda machine=machine, number=number: self._convergence.publish(machine, number),  # type: ignore[misc]
            )

    def _gather_herds(self, origin_s: float) -> None:
        spec = self.scenario.herd
        if self.fabric != "peers" or not spec.times:
            return
        rng = random.Random(f"herds {self._seed}")
        herds = Herds(self.world, rng, spec.blocks, spec.block_bytes, spec.spread_s)
        self.observed.herds = herds.over
        for number in range(spec.times):
            self.world.at(origin_s + self.scenario.duration_s * number / spec.times, partial(herds.begin, number))

    def _publish(self) -> None:
        scenario = self.scenario
        if self.fabric == "peers" and scenario.publish_per_s:
            rng = random.Random(f"publishing {self._seed}")
            self._publishing = Publishing(self.world, rng, scenario.publish_per_s, scenario.publish_kept)
            self._publishing.begin()

    def quiet(self) -> None:
        """From now on nobody publishes unasked."""
        if self._publishing is not None:
            self._publishing.ends_at = self.world.now

    def _ask_all(self, origin_s: float) -> None:
        workload = self.scenario.make_workload()
        if workload is None:
            return
        tasks = until(workload, random.Random(f"tasks {self._seed}"), self.scenario.duration_s)
        chosen = self.scenario.only_tasks
        tasks = [tasks[number] for number in chosen if number < len(tasks)] if chosen else tasks
        if not tasks:
            raise ConfigError("only_tasks names none of the tasks that there are")
        _check_length(tasks, self._table)
        for task in tasks:
            self.world.at(origin_s + task.at_s, lambda task=task: self._begin(task))  # type: ignore[misc]
        self.observed.unanswered = sum(len(task.steps) for task in tasks)

    def _begin(self, task: Task) -> None:
        outputs: dict[int, str] = {number: f"{task.name}: answer {number}" for number in range(len(task.steps))}
        answered = [Promise[None]() for _ in task.steps]
        for number, step in enumerate(task.steps):
            before = gather([answered[earlier] for earlier in step.after])
            before.then(partial(self._begin_step, number, step, outputs, answered[number]))

    def _begin_step(
        self, number: int, step: Step, outputs: dict[int, str], answered: Promise[None], before: list[None]
    ) -> None:
        machine = self.world.nodes[step.agent]
        if machine.up:  # who is down is not asked: the prompt stays unanswered, and so does what builds on its answer
            self._begun += 1
            self._answering[self._begun] = machine, machine.generation
            spawn(self._step(self._begun, number, step, outputs, answered))

    def _step(
        self, begun: int, number: int, step: Step, outputs: dict[int, str], answered: Promise[None]
    ) -> Process[None]:
        prompt = prompt_of(step, outputs)
        answer = answer_of(step, outputs[number])
        agent = self.agents[step.agent]
        outcome: Outcome = yield from agent.answer(prompt, answer, step.contents, step.verdict)
        self.observed.outcomes.append(outcome)
        self.observed.unanswered -= 1
        answered.resolve(None)
        del self._answering[begun]

    def _all_answered(self) -> bool:
        """Nobody who is still up is at work on an answer."""
        return not any(machine.generation == generation for machine, generation in self._answering.values())

    def _finish(self, observed: Observed) -> None:
        world = self.world
        observed.steps = world.steps
        observed.convergence_s = self._convergence.times_s()
        observed.heard_s = self._convergence.each_s()
        observed.updates_unfinished = self._convergence.unfinished()
        observed.index_rows = [machine.node.stats().peer_anchors for machine in world.nodes if machine.up]
        observed.served_bytes = list(world.payload_bytes_of)
        if self._pool is not None:
            observed.served_bytes = [self._pool.served_bytes]
        stats = [machine.node.stats() for machine in world.nodes if machine.up]
        observed.busy_told = sum(each.busy for each in stats)
        observed.violations = sum(each.violations for each in stats)
        observed.false_deaths = _false_deaths(world)


def _model(number: int) -> ModelId:
    return MODEL if number == 0 else ModelId(f"simulated {number:05d}.".encode())


def _check_length(tasks: Sequence[Task], table: CostTable) -> None:
    longest = max(step.prompt_tokens + step.answer_tokens for task in tasks for step in task.steps)
    if longest > table.context_tokens_max:
        raise ConfigError(
            f"workload: a prompt and its answer have {longest} tokens, the model of {table.name} reads "
            f"{table.context_tokens_max}: lower its tokens, or choose other costs"
        )


def _load_of(pool: CentralPool, seconds: float) -> PoolLoad:
    return PoolLoad(
        lock=pool.lock.busy_s / seconds,
        sends=pool.sends.busy_s / seconds,
        receives=pool.receives.busy_s / seconds,
        evicted=pool.evicted,
    )


def _outages(world: World, origin_s: float) -> list[Outage]:
    """Who was down when, in the order in which they went."""
    began: dict[int, float] = {}
    outages: list[Outage] = []
    for when, number, on in world.switched:
        if not on:
            began[number] = when - origin_s
        elif number in began:
            outages.append(Outage(number, began.pop(number), when - origin_s))
    outages += [Outage(number, since, math.inf) for number, since in began.items()]
    return sorted(outages, key=lambda each: (each.from_s, each.agent))


def _rules_of(scenario: Scenario, fabric: str, rules: ReuseRules, ablation: Ablation | None) -> Rules:
    if fabric == "none":
        return Rules(Mode.DENSE, rules, MODEL)
    if fabric == "own":
        return Rules(Mode.EXACT, ReuseRules(approximate=False, reason="prefix cache"), MODEL)
    whole = Rules(Mode(scenario.mode), rules, MODEL)
    if ablation is None:
        return whole
    return replace(whole, replicates=ablation.replicates, by_context=ablation.by_context)


def _host(number: int) -> str:
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def _false_deaths(world: World) -> int:
    """Reports that a node is dead which was up and not frozen all the time, and within reach."""
    return sum(report.change == "dead" and report.peer not in world.disturbed for _, _, report in world.reports)


def check_fits(scenario: Scenario, memory_bytes: int) -> None:
    """Raises ConfigError if the scenario needs more memory than there is."""
    needed = scenario.memory_bytes()
    if needed > memory_bytes:
        raise ConfigError(
            f"{scenario.agents} agents for {scenario.duration_s:g} s need about {needed / 1e9:.1f} GB, "
            f"{memory_bytes / 1e9:.1f} GB are free: lower agents, duration_s, tasks_per_s or updates"
        )
