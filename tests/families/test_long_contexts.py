"""Rotations do not change in the middle of a sequence."""

from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified
from families.conftest import MakeFamily
from families.rows import Row

from pagelet.exporter import export
from pagelet.models.errors import PromptTooLongError
from pagelet.runtime import Engine, EngineConfig, SamplingParams

_ORIGINAL = 4096
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": _ORIGINAL,
    "short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
_ROWS = {
    "longrope": Row("Phi3", {"rope_parameters": _LONGROPE, "max_position_embeddings": 8192}),
    "dynamic": Row("Llama", {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": _ORIGINAL,
    }, max_context=8192),
}  # fmt: skip


@pytest.mark.parametrize("name", _ROWS)
def test_twenty_tokens_across_the_boundary_are_those_of_one_prefill(
    name: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    row = _ROWS[name]
    folder, _ = make_family(row)
    export(folder, tmp_path / "b", uncertified(weights="fp32", cache_type="f32", max_context=row.max_context))
    prompt = np.random.default_rng(0).integers(2, 258, 4090).tolist()
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="64MiB")) as engine:
        done = engine.generate(prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        logits = engine.logits([*prompt, *done.token_ids])
    assert list(done.token_ids) == logits[4089:-1].argmax(axis=1).tolist()


def test_a_bundle_of_the_short_context_ends_there(make_family: MakeFamily, tmp_path: Path) -> None:
    """Its factors are others, so that it cannot go on."""
    folder, _ = make_family(_ROWS["longrope"])
    export(folder, tmp_path / "b", uncertified(max_context=_ORIGINAL))
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="64MiB")) as engine:
        prompt = [5] * (_ORIGINAL - 6)
        done = engine.generate(prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        assert (len(done.token_ids), done.finish_reason) == (6, "length")
        with pytest.raises(PromptTooLongError):
            engine.generate([5] * _ORIGINAL)
