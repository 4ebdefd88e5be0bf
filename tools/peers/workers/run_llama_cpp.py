"""llama.cpp through its C interface, as llama-cpp-python wraps it: batches of many sequences need that."""

import ctypes
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_STEP_TOKENS = 512

llama: Any = import_module("llama_cpp")  # Any: it may not be installed where types are checked


class LlamaCppEngine:
    """A context per shape of run: made before the clock starts, it holds no more cache than the run needs."""

    def __init__(self, model: Any, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._shape = (0, 0)
        self._context: Any = None
        self._batch: Any = None

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, int]:
        self._prepare(len(prompts), len(prompts[0]) + new_tokens)
        began = time.perf_counter()
        tokens = self._read(prompts)
        first = time.perf_counter() - began
        length = len(prompts[0])
        for position in range(length, length + new_tokens - 1):
            rows = [(token, position, sequence, True) for sequence, token in enumerate(tokens)]
            tokens = self._step(rows)
        return first, time.perf_counter() - began, len(prompts) * new_tokens

    def _prepare(self, sequences: int, length: int) -> None:
        if self._shape != (sequences, length):
            self._shape = (sequences, length)
            if self._context is not None:
                llama.llama_free(self._context)
            self._context, self._batch = self._open(sequences, length)
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _open(self, sequences: int, length: int) -> tuple[Any, Any]:
        params = llama.llama_context_default_params()
        params.n_ctx = sequences * ((length + 255) // 256 * 256)  # its cache comes in such pieces
        params.n_batch = params.n_ubatch = _STEP_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp could not open a context of {params.n_ctx} tokens")
        return context, llama.llama_batch_init(_STEP_TOKENS, 0, 1)

    def _read(self, prompts: list[list[int]]) -> list[int]:
        """All prompts, one after the other, in full steps; the token after each."""
        rows = [
            (token, index, sequence, index == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for index, token in enumerate(prompt)
        ]
        steps = range(0, len(rows), _STEP_TOKENS)
        return [token for start in steps for token in self._step(rows[start : start + _STEP_TOKENS])]

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One step over (token, position, sequence, needs logits); the likeliest token of those that do."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, logits) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = logits
        if status := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        llama.llama_synchronize(self._context)
        return [self._likeliest(index) for index, row in enumerate(rows) if row[3]]

    def _likeliest(self, row: int) -> int:
        pointer = llama.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocab_size,)).argmax())


def open_engine(model: Path, threads: int, tokens: int) -> LlamaCppEngine:
    llama.llama_backend_init()
    loaded = llama.llama_model_load_from_file(str(model).encode(), llama.llama_model_default_params())
    if not loaded:
        raise RuntimeError(f"llama.cpp could not load {model}")
    return LlamaCppEngine(loaded, threads)
