"""One HTML page of a study that opens without a network: what was simulated, the figures, the pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from kvcomm_p2p.sim.cost_table import CostTable, described
from kvcomm_p2p.sim.scenario import Scenario
from kvcomm_p2p.sim.study import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.head td { font-weight: 600; background: #f4f6f8; }
img { max-width: 100%; } pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; font-size: .8rem; }
p.note { color: #666; }
"""


def page(
    scenario: Scenario,
    table: CostTable,
    rows: Sequence[Figure],
    pictures: Sequence[Path],
    *,
    command: str,
    scenario_text: str,
) -> str:
    """The page, pictures inside it."""
    body = [
        f"<h1>{_text(scenario.name)}</h1>",
        f"<p>{_text(scenario.about)}</p>",
        f"<p class='note'>{scenario.agents:,} agents, {scenario.duration_s:g} simulated seconds, seed {scenario.seed}. "
        f"Costs: {_text(described(table))}.</p>",
        *(_picture(path) for path in pictures),
        "<h2>Figures</h2>",
        _table(rows),
        "<h2>How to make this page again</h2>",
        f"<pre>{_text(command)}</pre>",
        f"<pre>{_text(scenario_text)}</pre>",
    ]
    title = _text(f"{scenario.name}: simulated")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


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
    return f"<p><img alt='{_text(path.stem)}' src='data:image/png;base64,{data}'></p>"


def _text(value: str) -> str:
    return html.escape(value)
