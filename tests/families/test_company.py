"""A text is the same alone and in company, with and without prefixes and guesses, in every kind of layer."""

from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified
from families.conftest import MakeFamily
from families.rows import ROWS

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig, SamplingParams

_GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("cache_type", ["f16", "int8"])
@pytest.mark.parametrize("name", ["gemma4", "gpt_oss", "qwen3_moe mixed", "cohere2", "gpt2", "ministral3"])
def test_tokens_do_not_depend_on_how_they_are_served(
    name: str, cache_type: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    folder, _ = make_family(ROWS[name])
    export(folder, tmp_path / "b", uncertified(weights="int8", cache_type=cache_type))
    rng = np.random.default_rng(0)
    shared = rng.integers(2, 258, 70).tolist()
    prompts = [shared + rng.integers(2, 258, length).tolist() for length in (1, 5, 33, 64)]
    prompts.append([*shared[:20]] * 3)  # repeats itself: there is something to guess
    plain = EngineConfig(kv_memory="16MiB", speculate="off", max_step_tokens=4096)
    with Engine.open(tmp_path / "b", plain) as engine:
        alone = []
        for prompt in prompts:
            done = engine.generate(prompt, _GREEDY, prefix_cache=False)
            alone.append((done.token_ids, engine.logits([*prompt, *done.token_ids])[-1].tobytes()))
    with Engine.open(
        tmp_path / "b", EngineConfig(kv_memory="16MiB", num_draft_tokens=3, max_step_tokens=48)
    ) as engine:
        for _ in range(2):  # the second time from the prefix cache
            together = engine.generate_all(prompts, _GREEDY)
            assert [done.token_ids for done in together] == [tokens for tokens, _ in alone]
        for prompt, (tokens, last) in zip(prompts, alone, strict=True):
            assert engine.logits([*prompt, *tokens])[-1].tobytes() == last
