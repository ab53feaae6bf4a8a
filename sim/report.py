"""One HTML page of a study that opens without a network: what was simulated, the figures, the pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcomm_p2p.sim.cost_table import CostTable, described
from kvcomm_p2p.sim.metrics import Summary
from kvcomm_p2p.sim.scenario import Scenario
from kvcomm_p2p.sim.study import Figure, named

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.head td { font-weight: 600; background: #f4f6f8; }
img { max-width: 100%; } pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; font-size: .8rem; }
p.note, figcaption { color: #555; } figure { margin: 1.5rem 0; } th { font-weight: 600; } th.n { text-align: right; }
dt { font-weight: 600; } dd { margin: 0 0 .3rem 1.2rem; }
"""

MEANING = {
    "none": "every prompt is computed in full",
    "own": "each agent reuses what it computed itself behind the same exact prefix, as serving engines do",
    "central": "one server keeps everybody's KV: one lock, one network interface in each direction",
    "peers": "agents reuse what any of them has computed, wherever it stands in their prompts",
}
CAPTIONS = {
    "first-token": "Left: how many prompts had their first token after how long. Right: how much of the prompts was not computed "
    "again, by when they were asked.",
    "outages": "What agents that went down lost, and how fast they had something to reuse again.",
    "holders": "Who was asked, and who served the KV that others reused: bars far above the dotted line are hot spots.",
    "protocol": "How fast one update was known, and what the messages that keep everybody informed cost (KV itself not counted).",
}
ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("first token, median", lambda each: f"{each.ttft_p50_s:.3g} s"),
    ("first token, 90th percentile", lambda each: f"{each.ttft_p90_s:.3g} s"),
    ("first token, 99th percentile", lambda each: f"{each.ttft_p99_s:.3g} s"),
    ("of it waiting for the model, 99th percentile", lambda each: f"{each.queued_p99_s:.3g} s"),
    ("prompt tokens not recomputed", lambda each: f"{100 * each.reused:.1f} %"),
    ("KV pulled from elsewhere", lambda each: f"{each.pulled_bytes / 1e9:,.2f} GB"),
    ("prompts answered / not answered", lambda each: f"{each.requests:,} / {each.unanswered:,}"),
)


def page(
    scenario: Scenario,
    table: CostTable,
    rows: Sequence[Figure],
    pictures: Sequence[Path],
    *,
    summaries: Sequence[Summary],
    command: str,
    scenario_text: str,
) -> str:
    """The page, pictures inside it."""
    asked = [each for each in summaries if each.requests]
    body = [
        f"<h1>{_text(scenario.name)}</h1>",
        f"<p>{_text(scenario.about)}</p>",
        f"<p class='note'>{scenario.agents:,} agents, {scenario.duration_s:g} simulated seconds, seed {scenario.seed}. "
        f"{_faults(scenario)} Prompts asked in the first {scenario.warmup_s:g} s are not counted. "
        f"Costs: {_text(described(table))}.</p>",
        _side_by_side(asked),
        *(_picture(path) for path in pictures),
        "<h2>All figures</h2>",
        _table(rows),
        "<h2>How to make this page again</h2>",
        f"<pre>{_text(command)}</pre>",
        "<p>or, whatever becomes of the preset, with this scenario in a file of its own:</p>",
        f"<pre>{_text(scenario_text)}</pre>",
    ]
    title = _text(f"{scenario.name}: simulated")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _faults(scenario: Scenario) -> str:
    told = [
        f"{fault.kind} at {fault.at_s:g} s" + (f" for {fault.for_s:g} s" if fault.for_s else "")
        for fault in scenario.faults
    ]
    return f"What goes wrong: {_text(', '.join(told))}." if told else "Nothing goes wrong."


def _side_by_side(summaries: Sequence[Summary]) -> str:
    """The figures that people compare, a column for each way to share, and what these are."""
    if not summaries:
        return ""
    head = "".join(f"<th class='n'>{_text(named(each.fabric))}</th>" for each in summaries)
    lines = [
        f"<tr><td>{_text(name)}</td>{''.join(f'<td class=n>{_text(told(each))}</td>' for each in summaries)}</tr>"
        for name, told in ROWS
    ]
    known = [each.fabric for each in summaries if each.fabric in MEANING]
    meant = "".join(f"<dt>{_text(named(fabric))}</dt><dd>{_text(MEANING[fabric])}</dd>" for fabric in known)
    return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table><dl>{meant}</dl>"


def _table(rows: Sequence[Figure]) -> str:
    lines: list[str] = []
    case = ""
    for row in rows:
        if row.case != case:
            case = row.case
            lines.append(f"<tr class='head'><td colspan='4'>{_text(case)}</td></tr>")
        ratio = "" if row.ratio is None else f"{row.ratio:.3g} × faster"
        value = f"{row.value:,.4g} {_text(row.unit)}"
        lines.append(
            f"<tr><td>{_text(row.metric)}</td><td class='n'>{value}</td><td class='n'>{ratio}</td>"
            f"<td class='n'>n = {row.n:,}</td></tr>"
        )
    return f"<table>{''.join(lines)}</table>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    caption = next((told for kind, told in CAPTIONS.items() if path.stem.endswith(kind)), path.stem)
    return (
        f"<figure><img alt='{_text(path.stem)}' src='data:image/png;base64,{data}'>"
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _text(value: str) -> str:
    return html.escape(value)
