"""Bulk transfers among real processes: many who want the same, and whether questions are answered meanwhile."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

from kvcomm_p2p.evaluation.cluster_processes import Cluster, cpu_load
from kvcomm_p2p.evaluation.plain_sockets import round_trips
from kvcomm_p2p.evaluation.progress import Step
from kvcomm_p2p.evaluation.results import Row
from kvcomm_p2p.evaluation.samples import high_row, median_row

HERD_SHAPE = {"blocks": 16, "block_kv_bytes": 1 << 20}
BULK_SHAPE = {"blocks": 16, "block_kv_bytes": 4 << 20}
START_IN_S = 0.5
QUESTIONS = 500
QUESTION_S = 0.01
BURNERS = 2


def herd(step: Step, *, nodes: int = 16, repeats: int = 3, seed: int = 0) -> list[Row]:
    """All but one want the same 16 MiB of the one that has it, at once."""
    copies, misses, slowest, alone = [], [], [], []
    reasons: Counter[str] = Counter()
    for count in range(repeats):
        step(f"herd {count + 1}")
        with Cluster(seed=seed + count) as cluster:
            cluster.grow(nodes)
            origin, *others = cluster.nodes
            origin.ask("publish", numbers=[1, 2], shape=HERD_SHAPE)
            wanted: dict[str, Any] = {"holder": origin.node_id, "shape": HERD_SHAPE}
            alone.append(others[0].ask("fetch", number=1, **wanted)["seconds"])
            before = origin.ask("stats")["uploaded_bytes"]
            at = time.monotonic() + START_IN_S
            asked = [node.begin("fetch", number=2, publish=True, pass_on=True, at=at, **wanted) for node in others]
            answers = [future.result(60) for future in asked]
            uploaded = origin.ask("stats")["uploaded_bytes"] - before
            copies.append(uploaded / (HERD_SHAPE["blocks"] * HERD_SHAPE["block_kv_bytes"]))
            misses.append(sum(bool(answer["missed"]) or not answer["right"] for answer in answers))
            for answer in answers:
                reasons.update(answer["missed"])
            slowest.append(max(answer["ended"] for answer in answers) - at)
    title = f"{nodes - 1} of {nodes} nodes want the same 16 MiB"
    ratio = float(sorted(slowest)[len(slowest) // 2] / sorted(alone)[len(alone) // 2])
    return [
        Row(title, "copies that the origin uploaded, most (goal ≤ 6)", max(copies), "", repeats),
        Row(title, "nodes that missed blocks, most (goal 0)", max(misses), f"of {nodes - 1}", repeats),
        median_row(title, "everybody has it after", slowest, "s"),
        median_row(title, "one transfer alone", alone, "s"),
        Row(title, "everybody, in transfers alone", ratio, "×", repeats),
        *(
            Row(title, f"blocks missed in all: {reason}", count, "", repeats)
            for reason, count in sorted(reasons.items())
        ),
    ]


def latency(step: Step, *, questions: int = QUESTIONS, seed: int = 0) -> list[Row]:
    """Round trips on the control plane, idle, and while two nodes pull as fast as they can and two processes compute; and those
    of plain sockets in as many processes under the same load, which says what of it is the machine's."""
    cores = len(os.sched_getaffinity(0))
    with Cluster(seed=seed) as cluster:
        step("starting")
        holder, asker, puller, other = cluster.grow(4)
        holder.ask("publish", numbers=[1])
        holder.ask("publish", numbers=[2, 3], shape=BULK_SHAPE)
        question: dict[str, Any] = {"holder": holder.node_id, "number": 1, "count": questions, "interval_s": QUESTION_S}
        step("idle")
        idle = asker.ask("tokens", within_s=60, **question)
        step("saturated")
        with cpu_load(BURNERS):
            asked = asker.begin("tokens", **question)
            moved, seconds = 0, time.monotonic()
            while not asked.done():
                pulls = [
                    node.begin("fetch", holder=holder.node_id, number=number, shape=BULK_SHAPE)
                    for number, node in ((2, puller), (3, other))
                ]
                moved += sum(pull.result(60)["found"] * BULK_SHAPE["block_kv_bytes"] for pull in pulls)
            seconds = time.monotonic() - seconds
            busy = asked.result(60)
    step("plain sockets")
    with cpu_load(BURNERS):
        plain = round_trips(questions, QUESTION_S)
    title = f"token ids asked of a holder that two pull from, {BURNERS} busy processes, {cores} cores"
    return [
        median_row(title, "round trip, idle, median", [s * 1e3 for s in idle["seconds"]], "ms"),
        median_row(title, "round trip, saturated, median", [s * 1e3 for s in busy["seconds"]], "ms"),
        high_row(title, "round trip, saturated, p99 (goal ≤ 20)", [s * 1e3 for s in busy["seconds"]], "ms"),
        median_row(title, "plain sockets under the same load, median", [s * 1e3 for s in plain], "ms"),
        high_row(title, "plain sockets under the same load, p99", [s * 1e3 for s in plain], "ms"),
        Row(title, "questions without an answer", busy["missed"] + idle["missed"], f"of {2 * questions}", 1),
        Row(title, "pulled meanwhile", moved / seconds / 1e6, "MB/s", 1),
    ]
