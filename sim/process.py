"""What simulated agents are written in: generators that wait for promises, resumed in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from kvcomm_p2p.errors import InternalError

T = TypeVar("T")


class Promise(Generic[T]):
    """A value that is there later. Resolved exactly once; who waits is called at once, in the order of waiting."""

    __slots__ = ("_callbacks", "_value", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._callbacks: list[Callable[[T], None]] = []

    @property
    def value(self) -> T:
        """Raises InternalError before it is there."""
        if not self.done:
            raise InternalError("the promise is not kept yet")
        return self._value  # type: ignore[return-value]

    def resolve(self, value: T) -> None:
        """Raises InternalError the second time."""
        if self.done:
            raise InternalError("a promise was kept twice")
        self.done, self._value = True, value
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(value)

    def then(self, callback: Callable[[T], None]) -> None:
        """Call back with the value, now if it is there."""
        if self.done:
            callback(self.value)
        else:
            self._callbacks.append(callback)


Process = Generator[Promise[Any], Any, T]
"""Yields promises and is sent their values; what it returns is its own promise's value."""


def spawn(process: Process[T]) -> Promise[T]:
    """Run a process as far as it gets; the promise is its return value."""
    finished: Promise[T] = Promise()

    def step(value: Any) -> None:
        # A promise that is kept already continues here instead of by recursion, which deep histories would exhaust.
        while True:
            try:
                promise = process.send(value)
            except StopIteration as stop:
                finished.resolve(stop.value)
                return
            if not promise.done:
                promise.then(step)
                return
            value = promise.value

    step(None)
    return finished


def gather(promises: Sequence[Promise[T]]) -> Promise[list[T]]:
    """Kept when all are, with their values in order."""
    together: Promise[list[T]] = Promise()
    left = len(promises)
    if not left:
        together.resolve([])
        return together

    def one(_: T) -> None:
        nonlocal left
        left -= 1
        if not left:
            together.resolve([promise.value for promise in promises])

    for promise in promises:
        promise.then(one)
    return together


def kept(value: T) -> Promise[T]:
    """A promise that is kept already."""
    promise: Promise[T] = Promise()
    promise.resolve(value)
    return promise
