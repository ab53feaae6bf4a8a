"""Two agents in two processes. The second asks about a document that only the first has prefilled.

    python examples/two_agents.py

The child process holds the first agent; this one holds the second, which pulls the document's KV instead of computing it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pydoc_data.topics import topics

import kvcomm_p2p
from kvcomm_p2p.settings import share_cores

DOCUMENT = topics["exceptions"] + topics["try"]
ANSWER_TOKENS = 40


def say(who: str, what: str, since: float) -> None:
    """One line of what goes on. `since`: when the example began, by the clock that both processes share."""
    print(f"{time.time() - since:5.1f} s  {who:<7} {what}", flush=True)


def reader_process(pipe: Connection, since: float) -> None:
    """Prefills the document behind its own role, says where it is, and serves its KV until it is told to end."""

    async def run() -> None:
        say("reader", "loads torch and the model", since)
        sampling = kvcomm_p2p.Sampling(max_new_tokens=ANSWER_TOKENS)
        async with kvcomm_p2p.Agent("reader") as reader:
            say("reader", f"prefills a document of {len(DOCUMENT):,} characters and sums it up", since)
            reply = await reader.generate(
                [
                    {"role": "system", "content": "You summarise technical documents."},
                    {"role": "user", "content": "{document}\n\nSum this up in one sentence."},
                ],
                slots={"document": DOCUMENT},
                sampling=sampling,
            )
            await reader.settled()
            told = f"{reply.report.prompt_tokens:,} tokens of its prompt (first token after {reply.ttft_s:.2f} s)"
            say("reader", f"has published {told}", since)
            pipe.send(reader.address)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


async def ask_elsewhere(address: str, since: float) -> None:
    """The same document at another position behind another prefix, with exchange and without."""
    prompt = [
        {"role": "system", "content": "You are a patient teacher who answers questions of beginners."},
        {"role": "user", "content": "A student reads this:\n{document}\n\nWhat does `finally` do?"},
    ]
    say("teacher", "loads torch and the model", since)
    sampling = kvcomm_p2p.Sampling(max_new_tokens=ANSWER_TOKENS)
    async with kvcomm_p2p.Agent("teacher", join=[address]) as teacher:
        say("teacher", f"joins {address} and waits to hear of the document", since)
        while not any(peer["anchors"] for peer in teacher.status().peers):
            await asyncio.sleep(0.05)
        for mode, how in (("balanced", "with the reader's KV"), ("dense", "computing everything, to compare")):
            say("teacher", f"asks in mode {mode}: {how}", since)
            reply = await teacher.generate(prompt, slots={"document": DOCUMENT}, mode=mode, sampling=sampling)
            report = reply.report
            others = ", ".join(f"{count:,} from {name}" for name, count in report.sources.items()) or "none from others"
            print(f"\n          first token after {reply.ttft_s:.2f} s, all after {reply.total_s:.2f} s")
            print(f"          {report.prompt_tokens:,} prompt tokens: {report.recomputed_tokens:,} computed, {others}")
            print(f"          {reply.text.strip()}\n", flush=True)


def main() -> None:
    share_cores()  # before torch is imported, which `import kvcomm_p2p` does not do by itself; the child inherits it
    since = time.time()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=reader_process, args=(there, since), daemon=True)
    process.start()
    there.close()  # so that the end of the child ends our waiting
    try:
        asyncio.run(ask_elsewhere(here.recv(), since))
    except EOFError:
        raise SystemExit("the reader ended before it had read the document (see above)") from None
    finally:
        with suppress(OSError):  # the child has ended
            here.send("end")
        process.join()


if __name__ == "__main__":
    main()
