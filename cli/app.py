"""The command tree. Every command parses here, imports what it needs when it runs, and is guarded."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvcomm_p2p import __version__
from kvcomm_p2p.cli.bench import bench
from kvcomm_p2p.cli.calibrate import calibrate
from kvcomm_p2p.cli.doctor import doctor
from kvcomm_p2p.cli.eval import evaluate
from kvcomm_p2p.cli.forget import forget
from kvcomm_p2p.cli.keys import keys
from kvcomm_p2p.cli.models import models
from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import stderr, stdout, write_text
from kvcomm_p2p.cli.peers import metrics, peers
from kvcomm_p2p.cli.record import record as record_command
from kvcomm_p2p.cli.record import recorded, replay
from kvcomm_p2p.cli.setup import load_settings
from kvcomm_p2p.cli.sim import sim

HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
NODES_MAX = 64

app = typer.Typer(
    help="Peer-to-peer KV-cache exchange between LLM agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_SETTINGS,
    rich_markup_mode=None,
)
app.add_typer(models, name="model")
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.add_typer(sim, name="sim")
app.command()(calibrate)
app.command()(forget)
app.command()(peers)
app.command()(doctor)
app.command()(metrics)
app.command()(record_command)
app.command()(replay)
app.command(name="eval")(evaluate)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="Name, hub id or folder of a model [default: smollm2-135m]."),
]

RecordOption = Annotated[
    Path | None,
    typer.Option("--record", metavar="DIR", help="Record everything that reaches the node; holds token ids."),
]
RedactOption = Annotated[bool, typer.Option("--redact", help="Replace token ids in the recording by digests.")]


class Mode(str, enum.Enum):
    """The modes of `planning.types.Mode`, which would cost the import of NumPy here; a test keeps them equal."""

    EXACT = "exact"
    BALANCED = "balanced"
    FAST = "fast"
    DENSE = "dense"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcomm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Peer-to-peer KV-cache exchange between LLM agents."""


@app.command()
@guarded
def node(
    name: Annotated[
        str, typer.Option("--name", "-n", metavar="NAME", help="Name of the agent, unique among your nodes here.")
    ],
    join: Annotated[
        list[str] | None,
        typer.Option(
            "--join",
            "-j",
            metavar="HOST:PORT[#NAME]",
            help="Any node of the cluster, and whose it is in `kvcomm keys list`; repeatable.",
        ),
    ] = None,
    model: ModelOption = None,
    role: Annotated[
        str,
        typer.Option(
            metavar="ROLE",
            help="What the agent is for; `judge`, `selector`, `voter` and `ranker` reuse exact prefixes only.",
        ),
    ] = "",
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="System prompt of questions asked with `kvcomm ask`.")
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Control port; 0 takes a free one.")] = 0,
    record: RecordOption = None,
    redact: RedactOption = False,
    as_json: AsJson = False,
    watch_parent: Annotated[bool, typer.Option("--watch-parent", hidden=True)] = False,
) -> None:
    """Run one node until Ctrl-C. Prints its address, which other nodes can --join."""
    from kvcomm_p2p.cli.node import NodeOptions, run_node

    options = NodeOptions(name, tuple(join or ()), model, role, system, port, as_json, watch_parent)
    raise typer.Exit(run_node(options, recorded(load_settings(), record, redact)))


@app.command()
@guarded
def up(
    file: Annotated[
        Path | None, typer.Argument(metavar="AGENTS.TOML", help="An agents.toml (see examples/agents.toml).")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=1, max=NODES_MAX, metavar="COUNT", help="Start agent-1 to agent-N instead."),
    ] = None,
    model: ModelOption = None,
    record: RecordOption = None,
    redact: RedactOption = False,
    as_json: AsJson = False,
) -> None:
    """Run several nodes in this terminal, each its own process, until Ctrl-C."""
    from dataclasses import replace

    from kvcomm_p2p.cli.agents_file import numbered, read_agents_file
    from kvcomm_p2p.cli.up import run_up

    if (file is None) == (count is None):
        raise typer.BadParameter("give either an agents.toml or -n COUNT, e.g. kvcomm up -n 3")
    agents_file = numbered(count, model) if count is not None else read_agents_file(file or Path("agents.toml"))
    if model is not None:
        agents_file = replace(agents_file, model=model)
    recorded(load_settings(), record, redact)
    flags = ["--record", str(record.absolute()), *(["--redact"] if redact else [])] if record is not None else []
    raise typer.Exit(run_up(agents_file, as_json=as_json, flags=flags))


@app.command()
@guarded
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question; - reads it from stdin.")],
    node: Annotated[str, typer.Option("--node", "-n", metavar="NAME", help="Name of a running node.")],
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", metavar="PATH", help="Text that stands before the question; repeatable."),
    ] = None,
    slot: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="Text for {NAME} in the question; NAME=@FILE reads it; repeatable."),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="How much approximation is allowed.")] = Mode.BALANCED,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Longest answer, in tokens.")] = 128,
    as_json: AsJson = False,
) -> None:
    """Ask a running node; the answer streams to stdout, where its tokens came from goes to stderr."""
    from kvcomm_p2p.cli.ask import Question, run_ask

    asked = Question(question, tuple(file or ()), tuple(slot or ()), mode.value, {"max_new_tokens": max_new_tokens})
    run_ask(load_settings().runtime_dir, node, asked, as_json=as_json)


@app.command()
@guarded
def explain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of a running node.")],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="A prompt, which is not run; - reads it from stdin.")
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The node's last request instead, with its outcome.")] = False,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", metavar="PATH", help="Text that stands before the prompt; repeatable."),
    ] = None,
    slot: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="Text for {NAME} in the prompt; NAME=@FILE reads it; repeatable."),
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="How much approximation would be allowed [default: balanced].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a node would fill a prompt, or did fill the last one: what from where, and why not from elsewhere."""
    from kvcomm_p2p.cli.ask import Question
    from kvcomm_p2p.cli.explain import explain_body, run_explain

    if (prompt is None) != last or (last and (file or slot or mode)):
        raise typer.BadParameter('give either a prompt or --last alone, e.g. kvcomm explain a "What is new?"')
    body: dict[str, object] = {"op": "explain", "last": True}
    if prompt is not None:
        question = Question(prompt, tuple(file or ()), tuple(slot or ()), (mode or Mode.BALANCED).value)
        body = explain_body(question)
    run_explain(load_settings().runtime_dir, node, body, as_json=as_json)


@app.command()
@guarded
def status(
    node: Annotated[
        str | None, typer.Option("--node", "-n", metavar="NAME", help="Only this node [default: all of yours].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show running nodes: peers, anchors, pool, and the share of prompt tokens that were not computed."""
    from kvcomm_p2p.cli.status import run_status

    run_status(load_settings().runtime_dir, node, as_json=as_json)


@app.command()
@guarded
def demo(
    model: ModelOption = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Longest answer, in tokens.")] = 40,
    as_json: AsJson = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="PATH", help="Also write the results object to a file.")
    ] = None,
) -> None:
    """Watch three agent processes answer questions about one document that only the first has read."""
    load_settings()
    from kvcomm_p2p.cli.node import DEFAULT_MODEL
    from kvcomm_p2p.evaluation.demo import run

    result = run(stderr() if as_json else stdout(), model=model or DEFAULT_MODEL, tokens=tokens, json=as_json)
    if save is not None:
        result.write(save)
    if as_json:
        write_text(result.to_json() + "\n")
