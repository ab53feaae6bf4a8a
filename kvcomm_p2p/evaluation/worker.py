"""An agent in its own process that does as it is told, one JSON object per line: what measurements with several agents
run on.

    python -m kvcomm_p2p.evaluation.worker '{"name": "holder", "model": "smollm2-135m", "join": []}'

It answers one line per command, ends at the end of stdin (so it does not outlive whoever started it, however that one
ended), and keeps stdout to itself: what libraries print goes to stderr.

    {"do": "hold", "messages", "slots"}                           -> {"tokens", "anchors"}: prefilled and published
    {"do": "wait", "anchors": n}                                  -> {}: some peer is known to hold n anchors
    {"do": "measure", "messages", "slots", "tokens", "dense_first"} -> see `_measure`
    {"do": "answer", "messages", "slots", "tokens", "mode"}          -> as a user asks; see `_answer`
    {"do": "forward", "tokens", "seed"}                              -> {"seconds"}: of one forward over random tokens
    {"do": "sent"}                                                -> {"bytes", "frames", "lost"}: by message type
    {"do": "strike", "messages", "slots", "tokens", "pid", "signal", "after_bytes"} -> see `_strike`
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any, TextIO

import torch

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.errors import KVCommError
from kvcomm_p2p.evaluation.compare import aside, compare_filled, timed_fill
from kvcomm_p2p.evaluation.costs import timed_forward_s
from kvcomm_p2p.model.decoding import Sampling
from kvcomm_p2p.planning.types import Mode
from kvcomm_p2p.prompts import PreparedPrompt, prepare
from kvcomm_p2p.reuse.engine import Filled
from kvcomm_p2p.settings import Settings

WAIT_S = 10.0
POLL_S = 0.02
STRIKE_POLL_S = 0.0002


def main() -> None:
    """Runs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    asyncio.run(_serve(options, answers))


async def _serve(options: dict[str, Any], answers: TextIO) -> None:
    loop = asyncio.get_running_loop()
    agent = Agent(options["name"], model=options["model"], join=options["join"], settings=Settings.from_env())
    try:
        await agent.start()
    except KVCommError as error:
        _say(answers, {"error": str(error)})
        return
    try:
        _say(answers, {"address": agent.address, "pid": os.getpid(), "model": agent.runner.spec.name})
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            try:
                _say(answers, await _obey(agent, json.loads(line)))
            except KVCommError as error:
                _say(answers, {"error": str(error)})
    finally:
        await agent.close()


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


async def _obey(agent: Agent, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "wait":
        return await _wait(agent, command["anchors"])
    if command["do"] == "sent":
        return await aside(partial(_sent, agent))
    if command["do"] == "answer":
        return await _answer(agent, command)
    if command["do"] == "forward":
        # Once, in a process that was idle before: as a request finds it.
        timed = partial(timed_forward_s, agent.runner, command["tokens"], repeats=1, seed=command["seed"], warm_ups=0)
        return {"seconds": await aside(timed)}
    started = time.perf_counter()
    prompt = prepare(agent.runner.tokenizer, command["messages"], command["slots"])
    tokenize_s = time.perf_counter() - started
    if command["do"] == "hold":
        await agent.fill(prompt, Mode.DENSE)
        await agent.settled()
        return {"tokens": len(prompt.token_ids), "anchors": agent.status().anchors}
    tokens = int(command["tokens"])
    if command["do"] == "strike":
        return await _strike(agent, prompt, tokens, command["pid"], command["signal"], command["after_bytes"])
    return await _measure(agent, prompt, tokens, tokenize_s, dense_first=command["dense_first"])


async def _wait(agent: Agent, anchors: int) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while not any(peer["anchors"] >= anchors for peer in agent.status().peers):
        if time.monotonic() > deadline:
            raise KVCommError(f"no peer was heard to hold {anchors} anchors within {WAIT_S:g} s")
        await asyncio.sleep(POLL_S)
    return {}


async def _answer(agent: Agent, command: dict[str, Any]) -> dict[str, Any]:
    """Answers a prompt with at most `tokens` tokens, and returns when it is published: the prompt's token ids and the ranges
    of its named contents, the answer's token ids, seconds, and the report."""
    reply = await agent.generate(
        command["messages"],
        slots=command["slots"],
        mode=command["mode"],
        sampling=Sampling(max_new_tokens=command["tokens"]),
    )
    await agent.settled()
    tokenizer, key = agent.runner.tokenizer, agent._running().group_key
    prompt = await aside(partial(prepare, tokenizer, command["messages"], command["slots"], key=key))
    return {
        "prompt": prompt.token_ids.tolist(),
        "marks": sorted({(mark.position, mark.position + mark.length) for mark in prompt.marks}),
        "answer": reply.token_ids,
        "ttft_s": reply.ttft_s,
        "total_s": reply.total_s,
        "report": reply.report.as_dict(),
    }


def _sent(agent: Agent) -> dict[str, Any]:
    stats, _ = agent._running().snapshot()
    wire = stats.wire
    return {"bytes": dict(wire.sent_bytes), "frames": dict(wire.sent), "lost": dict(wire.lost)}


async def _measure(
    agent: Agent, prompt: PreparedPrompt, tokens: int, tokenize_s: float, *, dense_first: bool
) -> dict[str, Any]:
    """The same prompt with exchange and by full prefill (in the order asked for), and by a plain call of the model.

    Nothing is published or kept, so the prompt is as new to this agent's pool afterwards as it was before. Seconds
    include tokenization.
    """
    if dense_first:
        dense, dense_s = await timed_fill(agent, prompt, Mode.DENSE, tokens)
        shared, shared_s = await timed_fill(agent, prompt, Mode.BALANCED, tokens)
    else:
        shared, shared_s = await timed_fill(agent, prompt, Mode.BALANCED, tokens)
        dense, dense_s = await timed_fill(agent, prompt, Mode.DENSE, tokens)
    plain_s = await aside(partial(_plain_s, agent, prompt))
    return {
        "ttft_s": tokenize_s + shared_s,
        "dense_ttft_s": tokenize_s + dense_s,
        "plain_ttft_s": tokenize_s + plain_s,
        **await _compared(agent, dense, shared, tokens),
    }


async def _strike(
    agent: Agent, prompt: PreparedPrompt, tokens: int, pid: int, name: str, after_bytes: int
) -> dict[str, Any]:
    """Fills the prompt from the holder `pid` and sends it the signal `name` as soon as more than `after_bytes` bytes of
    payload have come (-1: as soon as it has told its token ids); then by full prefill. `struck_at_bytes`: how much had
    come when the signal was sent (-1: it never was)."""
    stack = agent._running()
    driver = stack.driver
    before = driver.stats().wire
    struck_at = -1

    async def watch() -> None:
        nonlocal struck_at
        while True:
            wire = driver.stats().wire
            came = wire.payload_bytes_received - before.payload_bytes_received
            told = wire.received["Tokens"] > before.received["Tokens"]
            if told if after_bytes < 0 else came > after_bytes:
                os.kill(pid, getattr(signal, name))
                struck_at = came
                return
            await asyncio.sleep(STRIKE_POLL_S)

    watching = driver.run(watch())
    try:
        shared, shared_s = await timed_fill(agent, prompt, Mode.BALANCED, tokens)
    finally:
        watching.cancel()
    dense, dense_s = await timed_fill(agent, prompt, Mode.DENSE, tokens)
    return {
        "ttft_s": shared_s,
        "dense_ttft_s": dense_s,
        "struck_at_bytes": struck_at,
        **await _compared(agent, dense, shared, tokens),
    }


async def _compared(agent: Agent, dense: Filled, shared: Filled, tokens: int) -> dict[str, Any]:
    _, divergence = await aside(partial(compare_filled, agent, dense, shared, tokens))
    return {
        "kl_mean": divergence.kl_mean,
        "top1": divergence.top1,
        "tokens": divergence.tokens,
        "identical_tokens": divergence.identical_tokens,
        "report": shared.report.as_dict(),
    }


def _plain_s(agent: Agent, prompt: PreparedPrompt) -> float:
    """Seconds of `model(input_ids)` as transformers' own `generate` calls it: with a cache, logits of the last
    token."""
    ids = torch.tensor([[int(token) for token in prompt.token_ids]], device=agent.runner.model.device)

    def forward() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            agent.runner.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started

    return agent.runner.in_forward_thread(forward)


if __name__ == "__main__":
    main()
