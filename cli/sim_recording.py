"""Recordings of simulated nodes: files as real nodes write them, for `kvcomm replay` and `kvcomm sim replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from kvcomm_p2p.net.recorder import Recorder
    from kvcomm_p2p.protocol.node import Node
    from kvcomm_p2p.sim.scenario import Scenario
    from kvcomm_p2p.sim.world import NodeMaker


@contextmanager
def node_maker(scenario: Scenario, folder: Path | None) -> Iterator[NodeMaker]:
    """What makes the simulated nodes: without a folder plain ones, with one such that write a recording each, agent-3.kvrec, and
    agent-3-2.kvrec for its second start. Files are whole when this ends. Raises ConfigError for a scenario whose nodes begin
    with a list of members, which no recording holds, UsageError for a folder that cannot be used."""
    from kvcomm_p2p.protocol.node import Node

    if folder is None:
        yield Node
        return
    from kvcomm_p2p.sim.simulation import JOINING_MAX

    if scenario.agents > JOINING_MAX:
        raise ConfigError(f"--record: more than {JOINING_MAX} agents begin as members of each other: lower agents")
    maker = _Recording(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield maker.make
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be made: {error.strerror or error}") from error
    finally:
        maker.close()


class _Recording:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, int] = {}
        self._recorders: list[Recorder] = []

    def make(self, config: Any, **given: Any) -> Node:
        """A node that records itself, of the arguments that `Node` takes."""
        from kvcomm_p2p.net.recorded_nodes import RecordedNode
        from kvcomm_p2p.net.recorder import SUFFIX, Recorder

        name = given["me"].name
        start = self._started[name] = self._started.get(name, 0) + 1
        path = self._folder / (f"{name}{SUFFIX}" if start == 1 else f"{name}-{start}{SUFFIX}")
        recorder = Recorder(path)
        self._recorders.append(recorder)
        return RecordedNode(config, recorder=recorder, **given)

    def close(self) -> None:
        """End marks for all."""
        for recorder in self._recorders:
            recorder.close()
