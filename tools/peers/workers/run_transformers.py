"""transformers with PyTorch, float32, its own growing cache and no compilation."""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

torch: Any = import_module("torch")  # Any: it may not be installed where types are checked
transformers: Any = import_module("transformers")


class TransformersEngine:
    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, int]:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            began = time.perf_counter()
            out = self._model(tokens, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            first = time.perf_counter() - began
            for _ in range(new_tokens - 1):
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
        return first, time.perf_counter() - began, len(prompts) * new_tokens


def open_engine(model: Path, threads: int, tokens: int) -> TransformersEngine:
    torch.set_num_threads(threads)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return TransformersEngine(loaded.eval())
