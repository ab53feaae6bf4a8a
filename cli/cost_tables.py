"""From what was measured here to a table that the simulator reads."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from kvcomm_p2p.evaluation.results import machine
from kvcomm_p2p.sim.cost_table import CostTable, save_table

if TYPE_CHECKING:
    from kvcomm_p2p.evaluation.costs import MeasuredCosts


def write_table(measured: MeasuredCosts, path: Path) -> None:
    """Named after the file."""
    spec, costs, here = measured.spec, measured.costs, machine()
    table = CostTable(
        name=path.stem,
        origin="measured",
        source=f"kvcomm bench costs --model {spec.name}",
        machine=f"{here['cpu']}, {here['cores']} cores",
        date=date.today().isoformat(),
        forward_s=costs.forward_s,
        token_s=costs.token_s,
        attention_s=costs.attention_s,
        align_bytes_per_s=costs.align_bytes_per_s,
        digest_bytes_per_s=measured.digest_bytes_per_s,
        decode_token_s=measured.decode_token_s,
        find_s=measured.find_s,
        plan_s=measured.plan_s,
        frame_s=measured.frame_s,
        request_s=measured.request_s,
        request_token_s=measured.request_token_s,
        repair_s=measured.repair_s,
        repair_token_s=measured.repair_token_s,
        check_bytes_per_s=measured.check_bytes_per_s,
        publish_bytes_per_s=measured.publish_bytes_per_s,
        foresee_token_s=measured.foresee_token_s,
        int8_encode_bytes_per_s=measured.int8_encode_bytes_per_s,
        int8_decode_bytes_per_s=measured.int8_decode_bytes_per_s,
        layers=spec.layout.layers,
        kv_heads=spec.layout.kv_heads,
        key_dim=spec.layout.key_dim,
        value_dim=spec.layout.value_dim,
        dtype=spec.layout.dtype,
        context_tokens_max=spec.context_tokens_max,
    )
    save_table(table, path)
