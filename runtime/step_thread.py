"""The thread that owns an engine's step loop: works while there is work, sleeps otherwise."""

import os
import threading
import weakref
from typing import Protocol

from pagelet.models.errors import EngineClosedError
from pagelet.runtime.request import STEP_THREAD_NAME


class Owner(Protocol):
    def step(self) -> bool:
        """Do one step; False when there was nothing to do."""

    def abort(self, error: BaseException) -> None:
        """End everything: `step` raised."""


class StepThread:
    """Calls `owner.step()` until nothing is left, then waits for `wake`, without using the processor.

    It holds its owner weakly, so that an engine that was forgotten is collected, and stops with it. At
    the interpreter's exit it stops too: the thread is a daemon, and joined by the finalizer.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._condition = threading.Condition()
        self._has_work = False
        self._stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=STEP_THREAD_NAME, daemon=True)
        weakref.finalize(owner, self.stop)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one with the thread."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise EngineClosedError in a fork: threads, and so the step loop, do not live on there."""
        if self.forked:
            raise EngineClosedError(
                f"the engine was opened in process {self._pid} and does not run in its fork {os.getpid()}. "
                "Open an engine in the child, or start it with multiprocessing's 'spawn'."
            )

    def wake(self) -> None:
        with self._condition:
            self._has_work = True
            self._condition.notify()

    def stop(self) -> None:
        """Let the current step end, then end the thread; waits for it except in the thread itself."""
        if self.forked:
            return
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if not self.is_current:
            self._thread.join()

    def _main(self) -> None:
        while self._wait_for_work():
            owner = self._owner()
            if owner is None:
                return
            try:
                while not self._stopping and owner.step():
                    pass
            except BaseException as error:  # a thread that died silently would leave its callers waiting
                owner.abort(error)
            del owner  # or it would live as long as the thread sleeps

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not self._has_work and not self._stopping:
                self._condition.wait()
            self._has_work = False
            return not self._stopping
