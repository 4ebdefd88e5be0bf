"""llama.cpp for `quality_bench`: quantize a GGUF file, and score texts with one. Run in the peers' Python.

    PYTHON quality_llama_cpp.py quantize SOURCE OUT TYPE [--pure]
    PYTHON quality_llama_cpp.py score MODEL --threads N

Nothing of pagelet is imported here. `score` speaks JSON, a document per line: first {"vocab_size": V}; then,
for each {"tokens": [...], "out": PATH} on stdin, it reads the tokens as they are into an empty context,
writes float32 logits [T, V] to PATH, and answers {"rows": T}. It ends with its stdin.
"""

import argparse
import ctypes
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

_STEP_TOKENS = 512

llama: Any = import_module("llama_cpp")  # Any: it may not be installed where types are checked


def quantize(source: Path, out: Path, kind: str, pure: bool) -> None:
    """All tensors' types by llama.cpp's own rules; `pure`: one type for all matrices, the head too."""
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    params.pure = pure
    if llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantize {source} to {kind}")


class LlamaCppScorer:
    """A model with a context that holds the longest text so far."""

    def __init__(self, model: Path, threads: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(
            str(model).encode(), llama.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {model}")
        self.vocab_size: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._threads = threads
        self._batch = llama.llama_batch_init(_STEP_TOKENS, 0, 1)
        self._context: Any = None
        self._room = 0

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """[T, V] after each token."""
        self._empty_context(len(tokens))
        out = np.empty((len(tokens), self.vocab_size), np.float32)
        for start in range(0, len(tokens), _STEP_TOKENS):
            step = tokens[start : start + _STEP_TOKENS]
            out[start : start + len(step)] = self._step(step, start)
        return out

    def _empty_context(self, tokens: int) -> None:
        if tokens > self._room:
            if self._context is not None:
                llama.llama_free(self._context)
            params = llama.llama_context_default_params()
            params.n_ctx = self._room = (tokens + 255) // 256 * 256  # its cache comes in such pieces
            params.n_batch = params.n_ubatch = _STEP_TOKENS
            params.n_threads = params.n_threads_batch = self._threads
            self._context = llama.llama_init_from_model(self._model, params)
            if not self._context:
                raise RuntimeError(f"llama.cpp could not open a context of {params.n_ctx} tokens")
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _step(self, tokens: list[int], first: int) -> NDArray[np.float32]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, first + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = True
        if status := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        address = ctypes.cast(llama.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (len(tokens), self.vocab_size))


def score(model: Path, threads: int) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the library prints goes to stderr
    scorer = LlamaCppScorer(model, threads)
    _reply(replies, {"vocab_size": scorer.vocab_size})
    for line in sys.stdin:
        order = json.loads(line)
        logits = scorer.logits(order["tokens"])
        logits.tofile(order["out"])
        _reply(replies, {"rows": len(logits)})


def _reply(stream: TextIO, document: dict[str, Any]) -> None:
    stream.write(json.dumps(document) + "\n")
    stream.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("quantize")
    maker.add_argument("source", type=Path)
    maker.add_argument("out", type=Path)
    maker.add_argument("kind")
    maker.add_argument("--pure", action="store_true")
    scorer = commands.add_parser("score")
    scorer.add_argument("model", type=Path)
    scorer.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    if args.command == "quantize":
        quantize(args.source, args.out, args.kind, args.pure)
    else:
        score(args.model, args.threads)


if __name__ == "__main__":
    main()
