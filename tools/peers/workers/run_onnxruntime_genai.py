"""onnxruntime-genai: a batch of prompts of one length, which begins and ends together."""

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

genai: Any = import_module("onnxruntime_genai")  # Any: it may not be installed where types are checked


class OnnxRuntimeGenAiEngine:
    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, int]:
        length = len(prompts[0]) + new_tokens
        params = genai.GeneratorParams(self._model)
        # A least length equal to the most makes it go on past an end token.
        params.set_search_options(
            do_sample=False, batch_size=len(prompts), min_length=length, max_length=length
        )
        generator = genai.Generator(self._model, params)
        tokens = np.array(prompts, np.int32)
        began = time.perf_counter()
        generator.append_tokens(tokens)
        generator.generate_next_token()
        first, count = time.perf_counter() - began, 1
        while not generator.is_done():
            generator.generate_next_token()
            count += 1
        return first, time.perf_counter() - began, len(prompts) * count


def open_engine(model: Path, threads: int, tokens: int) -> OnnxRuntimeGenAiEngine:
    config = genai.Config(str(model))
    session = {"intra_op_num_threads": threads}  # by itself it takes one thread
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    return OnnxRuntimeGenAiEngine(genai.Model(config))
