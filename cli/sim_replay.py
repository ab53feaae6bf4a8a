"""`kvcomm sim replay`: what real nodes were asked, asked again of simulated ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stdout, write_text
from kvcomm_p2p.errors import UsageError

if TYPE_CHECKING:
    from kvcomm_p2p.evaluation.results import Row
    from kvcomm_p2p.sim.replayed import NodeHistory, Replayed


@guarded
def replay_nodes(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Recordings of all nodes of a cluster, by --record.")
    ],
    network: Annotated[
        str, typer.Option("--network", metavar="NAME", help="loopback, lan, wan, dsl or fast")
    ] = "loopback",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The results object on stdout.")] = False,
) -> None:
    """Ask simulated nodes what real ones were asked, at the same times: only the protocol, on a network of your choice."""
    from kvcomm_p2p.evaluation.results import Result
    from kvcomm_p2p.sim.links import PROFILES
    from kvcomm_p2p.sim.replayed import replay

    if network not in PROFILES:
        raise UsageError(f"--network {network!r} is unknown: choose one of {', '.join(PROFILES)}")
    histories = [_history(path) for path in files]
    outcome = replay(histories, link=PROFILES[network], seed=seed)
    result = Result("sim replay", _rows(histories, outcome), seed)
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        stdout().print(result.table())


def _history(path: Path) -> NodeHistory:
    from kvcomm_p2p.net.recorder import read_recording
    from kvcomm_p2p.protocol.events import MessageReceived
    from kvcomm_p2p.sim.replayed import ASKED, NodeHistory

    try:
        recording = read_recording(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    steps = recording.steps
    return NodeHistory(
        record=recording.me,
        config=recording.config,
        began_s=recording.now,
        asked=tuple((step.now, step.event) for step in steps if isinstance(step.event, ASKED)),
        ended_s=steps[-1].now if steps else recording.now,
        received=Counter(type(s.event.message).__name__ for s in steps if isinstance(s.event, MessageReceived)),
    )


def _rows(histories: list[NodeHistory], outcome: Replayed) -> list[Row]:
    from kvcomm_p2p.evaluation.results import Row

    nodes = len(histories)
    real = sum((history.received for history in histories), Counter[str]())
    case = f"{nodes} nodes"
    rows = [Row(case, "replayed", outcome.duration_s, "s", nodes)]
    for name in sorted(real | outcome.received):
        rows.append(
            Row(case, f"{name} received", float(outcome.received[name]), "frames", nodes, baseline=float(real[name]))
        )
    total = sum(outcome.frame_bytes.values())
    rows.append(Row(case, "metadata per node", total / nodes / max(outcome.duration_s, 1e-9) / 1000, "kB/s", nodes))
    if outcome.fetches:
        rows.append(Row(case, "blocks found", float(outcome.found), "blocks", outcome.fetches))
        rows += [
            Row(case, f"blocks missed: {reason}", float(count), "blocks", outcome.fetches)
            for reason, count in sorted(outcome.missed.items())
        ]
    if outcome.fetch_s:
        rows.append(Row(case, "a fetch, longest", max(outcome.fetch_s), "s", len(outcome.fetch_s)))
    return rows
