"""`kvcomm bench`: measurements, each a thin call into `kvcomm_p2p.evaluation`."""

from __future__ import annotations

import enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcomm_p2p.cli.destinations import check_can_write
from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stderr, stdout, write_text
from kvcomm_p2p.cli.setup import load_settings

if TYPE_CHECKING:
    from kvcomm_p2p.evaluation.results import Result


class ScenarioName(str, enum.Enum):
    """The flags of `evaluation.cases.Scenario`, which would cost heavy imports here; a test keeps them equal."""

    NEAR = "near"
    ROLE = "role"
    TEXT = "text"
    BARE = "bare"
    OTHER = "other"
    REORDERED = "reordered"
    REORDERED_BARE = "reordered-bare"
    LONG = "long"
    EDITED = "edited"
    SHORT = "short"


SCENARIO_HELP = f"Repeatable [default: all]: {', '.join(name.value for name in ScenarioName)}."

CLUSTER_CASES = "update, join, death, load, freeze, partition, herd, latency, sixtyfour"

bench = typer.Typer(help="Measure, and print the figures as a table or as JSON.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="The results object on stdout.")]
Save = Annotated[Path | None, typer.Option("--save", metavar="PATH", help="Also write the results object to a file.")]
Model = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="[default: smollm2-135m]")]


@bench.command()
@guarded
def ttft(model: Model = None, as_json: AsJson = False, save: Save = None) -> None:
    """Time to first token with KV pulled from a peer, against full prefill in the same run."""
    _measure("ttft", as_json, save, **_given(model))


@bench.command()
@guarded
def pull(as_json: AsJson = False, save: Save = None) -> None:
    """Loopback pull of KV blocks, against a plain TCP socket moving the same bytes."""
    _measure("pull", as_json, save)


@bench.command()
@guarded
def encoding(
    model: Model = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, metavar="COUNT", help="[default: 12]")] = None,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """KV as int8 on the wire: bytes, speed of encoding and decoding, and how far it moves the answers."""
    _measure("encoding", as_json, save, **_given(model, prompts=prompts))


@bench.command()
@guarded
def quality(
    model: Model = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, metavar="COUNT", help="Of each scenario [default: 30].")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, metavar="COUNT", help="Compared tokens of each [default: 24].")
    ] = None,
    scenario: Annotated[
        list[ScenarioName] | None, typer.Option("--scenario", metavar="NAME", help=SCENARIO_HELP)
    ] = None,
    gsm8k: Annotated[
        Path | None, typer.Option(metavar="PATH", help="short: a gsm8k.jsonl [default: short documents].")
    ] = None,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """Divergence from full prefill (KL, top-1) of repaired reuse, of others' rules at equal cost, and of controls."""
    load_settings()
    from kvcomm_p2p.evaluation.cases import Scenario

    given = _given(model, prompts=prompts, tokens=tokens, gsm8k=gsm8k)
    if scenario:
        given["scenarios"] = [each for each in Scenario if each.flag in {name.value for name in scenario}]
    _measure("quality", as_json, save, **given)


@bench.command()
@guarded
def faults(model: Model = None, as_json: AsJson = False, save: Save = None) -> None:
    """A peer killed or frozen in the middle of a pull: what a request loses, and whether its answer is right."""
    _measure("faults", as_json, save, **_given(model))


@bench.command()
@guarded
def overhead(
    model: Model = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="COUNT", help="Prompts of each kind.")] = 5,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """What a request loses where nothing is gained: nothing to reuse, a guard that rejects, short runs, slow links."""
    _measure("overhead", as_json, save, repeats=repeats, **_given(model))


@bench.command()
@guarded
def guard(
    model: Model = None,
    requests: Annotated[int, typer.Option("--requests", min=1, metavar="COUNT", help="Prompts, kinds mixed.")] = 500,
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="COUNT", help="Compared tokens of each.")] = 16,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="balanced or fast")] = "balanced",
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """What the guard predicts against what is measured, and how much slips through."""
    from kvcomm_p2p.modes import parse_mode

    _measure("guard", as_json, save, requests=requests, tokens=tokens, mode=parse_mode(mode), **_given(model))


@bench.command()
@guarded
def cluster(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help=f"[default: all] {CLUSTER_CASES}")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=2, metavar="COUNT", help="Processes [default: 16].")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="Of what is repeated.")] = None,
    minutes: Annotated[float | None, typer.Option(metavar="MINUTES", help="load: how long [default: 10].")] = None,
    seconds: Annotated[float | None, typer.Option(metavar="SECONDS", help="partition: how long [default: 60].")] = None,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """Nodes in processes of their own, without a model: how fast news spread, and what death, silence and load do."""
    given = _given(None, nodes=nodes, repeats=repeats, minutes=minutes, seconds=seconds)
    _measure("cluster", as_json, save, cases=cases or [], **given)


def _given(model: str | None, **options: Any) -> dict[str, Any]:
    """What was given on the command line; the defaults are the measurement's."""
    return {name: value for name, value in {"model": model, **options}.items() if value is not None}


@bench.command()
@guarded
def costs(
    model: Model = None,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="PATH", help="Also write a table of costs for `kvcomm sim`.")
    ] = None,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """What a request costs here, part by part: the constants that the simulator reckons with."""
    load_settings()
    check_can_write([save, table])
    from kvcomm_p2p.cli.cost_tables import write_table
    from kvcomm_p2p.evaluation.costs import measure_costs

    measured, result = measure_costs(stderr(), **_given(model))
    if table is not None:
        write_table(measured, table)
    _show(result, as_json, save)


def _measure(name: str, as_json: bool, save: Path | None, **options: Any) -> None:
    load_settings()
    check_can_write([save])
    result: Result = import_module(f"kvcomm_p2p.evaluation.{name}").run(stderr(), **options)
    _show(result, as_json, save)


def _show(result: Result, as_json: bool, save: Path | None) -> None:
    if save is not None:
        result.write(save)
    if as_json:
        write_text(result.to_json() + "\n")
    else:
        stdout().print(result.table())
