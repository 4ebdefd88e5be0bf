"""Run one engine for `bench_peers`: `PYTHON tools/peers/workers ENGINE MODEL …`, in that engine's own Python.

Only the standard library is imported here, and nothing of pagelet, so that any interpreter will do. JSON, a
document per line: at first this process says how long the model took to open; then, for each line
{"prompts": [[token, …], …], "new_tokens": N} on stdin, how long N greedy tokens after each prompt took, all
sequences at once. It ends with its stdin.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

ENGINES = ("pagelet", "llama_cpp", "openvino", "onnxruntime_genai", "transformers")


class Engine(Protocol):
    """What a module `run_<engine>` gives from `open_engine(model, threads, tokens)`.

    `tokens` is the most that all sequences of a run hold together, prompts and replies.
    """

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, int]:
        """Seconds until every sequence had its first token, seconds in all, and tokens generated."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    replies = _take_stdout()
    opener = import_module(f"run_{args.engine}").open_engine  # imports are not part of the load time
    began = time.perf_counter()
    engine: Engine = opener(args.model, args.threads, args.tokens)
    _reply(replies, {"load_s": time.perf_counter() - began})
    for line in sys.stdin:
        _reply(replies, _answer(engine.run, json.loads(line)))
    return 0


def _answer(run: Callable[[list[list[int]], int], tuple[float, float, int]], order: Any) -> dict[str, Any]:
    try:
        first, seconds, count = run(order["prompts"], order["new_tokens"])
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "time_to_first_token_s": first,
        "seconds": seconds,
        "generated_tokens": count,
        "peak_rss_bytes": _peak_rss(),
    }


def _take_stdout() -> TextIO:
    """Stdout for the replies alone: what a library prints goes to stderr from here on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reply(stream: TextIO, document: dict[str, Any]) -> None:
    stream.write(json.dumps(document) + "\n")
    stream.flush()


def _peak_rss() -> int:
    """As `pagelet.tools.memory.peak_rss`, on Linux; 0 elsewhere."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    sys.exit(main())
