"""Two agents in two processes. The second asks about a document that only the first has prefilled.

    python examples/two_agents.py

The child process holds the first agent; this one holds the second, which pulls the document's KV instead of computing it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from pydoc_data.topics import topics

from kvcomm_p2p import Agent, Sampling

DOCUMENT = topics["exceptions"] + topics["try"]
SHORT = Sampling(max_new_tokens=40)


def reader_process(pipe: Connection) -> None:
    """Prefills the document behind its own role, says where it is, and serves its KV until it is told to end."""

    async def run() -> None:
        async with Agent("reader") as reader:
            await reader.generate(
                [
                    {"role": "system", "content": "You summarise technical documents."},
                    {"role": "user", "content": "{document}\n\nSum this up in one sentence."},
                ],
                slots={"document": DOCUMENT},
                sampling=SHORT,
            )
            await reader.settled()
            pipe.send(reader.address)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


async def ask_elsewhere(address: str) -> None:
    """The same document at another position behind another prefix, with exchange and without."""
    prompt = [
        {"role": "system", "content": "You are a patient teacher who answers questions of beginners."},
        {"role": "user", "content": "A student reads this:\n{document}\n\nWhat does `finally` do?"},
    ]
    async with Agent("teacher", join=[address]) as teacher:
        while not any(peer["anchors"] for peer in teacher.status().peers):
            await asyncio.sleep(0.05)
        for mode in ("balanced", "dense"):
            reply = await teacher.generate(prompt, slots={"document": DOCUMENT}, mode=mode, sampling=SHORT)
            report = reply.report
            print(f"{mode:>8}: first token after {reply.ttft_s:.2f} s; of {report.prompt_tokens} prompt tokens")
            print(f"          {report.recomputed_tokens} computed here, from others: {report.sources or 'none'}")
            print(f"          {reply.text.strip()}\n")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=reader_process, args=(there,), daemon=True)
    process.start()
    try:
        asyncio.run(ask_elsewhere(here.recv()))
    finally:
        here.send("end")
        process.join()


if __name__ == "__main__":
    main()
