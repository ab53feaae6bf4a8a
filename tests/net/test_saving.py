"""Of each kind the latest reaches the disk, whatever the order of threads, and nothing waits when the node ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st
from net_nodes import wait_until

from kvcomm_p2p.net.saving import Saving


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=30))
def test_the_last_of_each_kind_is_written_last(steps: list[tuple[str, bool]]) -> None:
    written: dict[str, list[int]] = {"a": [], "b": []}
    with ThreadPoolExecutor(2) as executor:
        saving = Saving(executor)
        for number, (kind, flush) in enumerate(steps):
            saving.keep(kind, lambda kind=kind, number=number: written[kind].append(number))  # type: ignore[misc]
            if flush:
                saving.flush()
                assert written[kind][-1] == number
        saving.flush()
        for kind, numbers in written.items():
            kept = [number for number, (each, _) in enumerate(steps) if each == kind]
            assert numbers == sorted(numbers) and numbers[-1:] == kept[-1:]


def test_what_comes_while_something_is_written_is_one_more_write() -> None:
    writing, go_on, written = threading.Event(), threading.Event(), []

    def slowly() -> None:
        writing.set()
        assert go_on.wait(5.0)
        written.append(0)

    with ThreadPoolExecutor(2) as executor:
        saving = Saving(executor)
        saving.keep("a", slowly)
        assert writing.wait(5.0)
        for number in range(1, 100):
            saving.keep("a", lambda number=number: written.append(number))  # type: ignore[misc]
        done = saving.written()
        assert done is not None and not done.done()
        go_on.set()
        done.result(5.0)
        assert written == [0, 99]
        assert wait_until(lambda: saving.written() is None)


def test_after_the_threads_have_ended_flush_writes_the_rest() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    written: list[int] = []
    saving = Saving(executor)
    saving.keep("a", lambda: written.append(1))
    assert saving.written() is None and written == []
    saving.flush()
    assert written == [1]
