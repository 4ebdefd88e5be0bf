"""OpenVINO GenAI's continuous batching, which its plain pipeline uses too.

Prefix caching, on by default, is off; the KV cache has its default type, INT8.
"""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

genai: Any = import_module("openvino_genai")  # Any: it may not be installed where types are checked
core: Any = import_module("openvino")

_BLOCK_TOKENS = 32


class OpenVinoEngine:
    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._requests = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, int]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        inputs = [core.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        began = time.perf_counter()
        handles = []
        for tokens in inputs:
            handles.append(self._pipeline.add_request(self._requests, tokens, config))
            self._requests += 1
        first, counts = 0.0, [0] * len(handles)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    counts[index] += sum(len(part.generated_ids) for part in handle.read().values())
            if not first and all(counts):
                first = time.perf_counter() - began
        return first, time.perf_counter() - began, sum(counts)


def open_engine(model: Path, threads: int, tokens: int) -> OpenVinoEngine:
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.num_kv_blocks = tokens // _BLOCK_TOKENS + 64  # a partly filled block for each sequence
    scheduler.max_num_batched_tokens = 512
    properties = {"INFERENCE_NUM_THREADS": threads}
    return OpenVinoEngine(genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties))
