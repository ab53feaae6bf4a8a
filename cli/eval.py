"""`kvcomm eval`: four workloads through real agents, a thin call into `kvcomm_p2p.evaluation.eval`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm_p2p.cli.destinations import check_can_write
from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stderr, stdout, write_text
from kvcomm_p2p.cli.setup import load_settings

if TYPE_CHECKING:
    from kvcomm_p2p.evaluation.eval import Evaluation


class Workload(str, enum.Enum):
    """`workloads.catalogue.NAMES` and all of them, which would cost heavy imports here; a test keeps them equal."""

    RAG = "rag"
    MATHEMATICS = "mathematics"
    CODE = "code"
    CREATIVE = "creative"
    ALL = "all"


@guarded
def evaluate(
    workload: Annotated[Workload, typer.Argument(help="What the agents do.")] = Workload.ALL,
    mode: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="MODE", help="A mode to measure; repeatable [default: balanced]."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", min=1, metavar="COUNT", help="Per workload, in whole tasks.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="Longest answer, in tokens.")] = None,
    readers: Annotated[int, typer.Option(min=1, max=5, metavar="COUNT", help="rag: roles that get a question.")] = 5,
    gsm8k: Annotated[Path | None, typer.Option(metavar="PATH", help="mathematics: a gsm8k.jsonl.")] = None,
    humaneval: Annotated[Path | None, typer.Option(metavar="PATH", help="code: a humaneval.jsonl.")] = None,
    execute: Annotated[
        bool,
        typer.Option(
            "--execute", help="code: run what the model writes (limited, but not a sandbox) against the test."
        ),
    ] = False,
    controls: Annotated[
        bool, typer.Option("--controls", help="Also fill the prompts in other ways, at equal cost; much slower.")
    ] = False,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="[default: smollm2-135m]")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Of what is asked, and of intervals.")] = 0,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Also draw pictures into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results object on stdout.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="PATH", help="Also write the results object to a file.")
    ] = None,
) -> None:
    """Hit rates, divergence, answers and times of agents that work together, against full prefill."""
    settings = load_settings()
    check_can_write([save], [plots])
    from kvcomm_p2p.evaluation.controls import control_rows
    from kvcomm_p2p.evaluation.eval import DEFAULT_MODEL, MODES, run
    from kvcomm_p2p.evaluation.workloads.catalogue import Data

    evaluation = run(
        stderr(),
        workload=workload.value,
        modes=mode or MODES,
        model=model or DEFAULT_MODEL,
        requests=requests,
        tokens=tokens,
        seed=seed,
        data=Data(gsm8k=gsm8k, humaneval=humaneval, readers=readers, execute=execute),
        plots=plots,
        controls=control_rows if controls else None,
        settings=settings,
    )
    _show(evaluation, as_json=as_json, save=save)
    if evaluation.interrupted:
        raise KeyboardInterrupt


def _show(evaluation: Evaluation, *, as_json: bool, save: Path | None) -> None:
    if save is not None:
        evaluation.result.write(save)
    if as_json:
        write_text(evaluation.result.to_json() + "\n")
    else:
        for table in evaluation.tables():
            stdout().print(table)
    for name, why in evaluation.skipped.items():
        stderr().print(f"{name} was skipped: {why}", markup=False, highlight=False, soft_wrap=True)
