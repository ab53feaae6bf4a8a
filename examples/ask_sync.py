"""One agent without an event loop, as in a notebook: ask twice about one text, and see what the second answer cost.

python examples/ask_sync.py
"""

from __future__ import annotations

from pydoc_data.topics import topics

from kvcomm_p2p import Reply, Sampling, SyncAgent

TEXT = topics["with"]


def main() -> None:
    with SyncAgent("notebook") as agent:
        for question in ("What is this text about?", "What is a context manager?"):
            pieces = agent.stream(
                "{text}\n\n{question}",
                slots={"text": TEXT, "question": question},
                sampling=Sampling(max_new_tokens=40),
            )
            for piece in pieces:
                if isinstance(piece, Reply):
                    report = piece.report
                    print(
                        f"\n  [{report.recomputed_tokens} of {report.prompt_tokens} tokens computed, "
                        f"first one after {piece.ttft_s:.2f} s]\n"
                    )
                else:
                    print(piece, end="", flush=True)


if __name__ == "__main__":
    main()
