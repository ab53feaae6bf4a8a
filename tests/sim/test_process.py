"""Promises and processes."""

from __future__ import annotations

import pytest

from kvcomm_p2p.errors import InternalError
from kvcomm_p2p.sim.process import Process, Promise, gather, kept, spawn


def test_a_process_waits_for_its_promises_in_turn() -> None:
    first: Promise[int] = Promise()
    second: Promise[int] = Promise()

    def work() -> Process[int]:
        a = yield first
        b = yield second
        return a * 10 + b

    done = spawn(work())
    second.resolve(2)
    assert not done.done
    first.resolve(1)
    assert done.value == 12


def test_promises_that_are_kept_do_not_deepen_the_stack() -> None:
    def work() -> Process[int]:
        total = 0
        for number in range(50_000):
            total += yield kept(number)
        return total

    assert spawn(work()).value == sum(range(50_000))


def test_gather_keeps_the_order_and_waits_for_all() -> None:
    parts: list[Promise[str]] = [Promise() for _ in range(3)]
    together = gather(parts)
    parts[2].resolve("c")
    parts[0].resolve("a")
    assert not together.done
    parts[1].resolve("b")
    assert together.value == ["a", "b", "c"]
    assert gather([]).value == []


def test_a_promise_is_kept_once_and_read_when_it_is_there() -> None:
    promise: Promise[int] = Promise()
    with pytest.raises(InternalError):
        _ = promise.value
    promise.resolve(1)
    with pytest.raises(InternalError):
        promise.resolve(2)
