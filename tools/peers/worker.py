"""An engine in a process of its own, which stays open between runs."""

import contextlib
import json
import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pagelet.models.errors import PageletError
from pagelet.tools.peers.entrants import Entrant

_WORKERS = Path(__file__).with_name("workers")
_LIMIT_SECONDS = 900.0  # of one reply; a peer that hangs must not hold the others up for ever


@dataclass(frozen=True)
class Sample:
    """One run of an engine: seconds until every sequence had its first token, and in all."""

    time_to_first_token_s: float
    seconds: float
    peak_rss_bytes: int


class WorkerError(PageletError):
    """An engine failed or its process ended."""


class Worker:
    """Starts on construction and has opened its model on return; `load_s` says in how many seconds.

    Raises:
        WorkerError: the engine could not be opened.
    """

    def __init__(self, entrant: Entrant, threads: int, tokens: int, log: Path) -> None:
        self.entrant = entrant
        self._log = log
        sizes = ["--threads", str(threads), "--tokens", str(tokens)]
        # OpenMP's and BLAS's pools do not follow the engines' own settings.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [entrant.python, _WORKERS, entrant.engine, entrant.model, *sizes],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        try:
            self.load_s = float(self._reply()["load_s"])
        except BaseException:
            self.close()
            raise

    def run(self, prompts: list[list[int]], new_tokens: int) -> Sample:
        """Generate `new_tokens` after each prompt, all at once.

        Raises:
            WorkerError: the engine failed, or gave another number of tokens.
        """
        assert self._process.stdin
        order = json.dumps({"prompts": prompts, "new_tokens": new_tokens})
        with contextlib.suppress(BrokenPipeError):  # then no reply comes, which says more
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        reply = self._reply()
        expected = len(prompts) * new_tokens
        if reply["generated_tokens"] != expected:
            raise WorkerError(
                f"{self.entrant.name} generated {reply['generated_tokens']} tokens, expected {expected}: "
                "not comparable."
            )
        return Sample(reply["time_to_first_token_s"], reply["seconds"], reply["peak_rss_bytes"])

    def close(self) -> None:
        """End the process; closing twice is fine."""
        if self._process.poll() is None:
            self._process.kill()  # it holds nothing that must be saved
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            with contextlib.suppress(BrokenPipeError):  # an order that nobody read any more
                stream.close()
        self._process.wait()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        timer = threading.Timer(_LIMIT_SECONDS, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            status = self._process.wait()
            raise WorkerError(f"{self.entrant.name} ended with status {status}; see {self._log}.")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.entrant.name}: {reply['error']}; see {self._log}.")
        return reply

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
