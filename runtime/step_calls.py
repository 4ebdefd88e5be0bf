"""Calls from other threads into the step thread, made between two steps."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class StepCalls:
    """A queue of functions; the step thread runs them when no step is under way, so they see whole steps."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def put(self, function: Callable[[], R]) -> "Future[R]":
        """Queue a call; the future has its result, or what it raised."""
        future: Future[R] = Future()
        self._waiting.append((function, future))
        return future

    def run(self) -> None:
        """Make the calls that wait."""
        for _ in range(len(self._waiting)):
            # It leaves the queue last, so that `fail` reaches it if what it raises ends the loop.
            function, future = self._waiting[0]
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            self._waiting.popleft()

    def fail(self, error: Exception) -> None:
        """Raise `error` in place of every call that waits."""
        while self._waiting:
            self._waiting.popleft()[1].set_exception(error)
