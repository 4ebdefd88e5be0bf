"""The first layers of a model as a draft of it: `pagelet export --layers`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import uncertified
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagelet.exporter import ExportOptions, export
from pagelet.models.errors import CheckpointError, InputError
from pagelet.runtime import Engine, EngineConfig, SamplingParams

MakeCheckpoint = Callable[..., Path]
IDS = np.random.default_rng(2).integers(2, 258, 60).tolist()


def add_tensors(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = checkpoint / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def logits_of(bundle: Path) -> np.ndarray:
    with Engine.open(bundle, EngineConfig(kv_memory="16MiB", threads=1)) as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("exit_parts", [(), ("norm",), ("norm", "head"), ("head",)])
def test_logits_are_those_of_the_first_layers(
    make_llama: MakeCheckpoint, tmp_path: Path, tied: bool, exit_parts: tuple[str, ...]
) -> None:
    checkpoint = make_llama(num_hidden_layers=4, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.manual_seed(5)
    parts = {"norm": 1 + 0.3 * torch.randn(64), "head": 0.3 * torch.randn(320, 64)}
    # An exit of another layer must not be taken for this one's.
    add_tensors(checkpoint, {"early_exit.1.norm.weight": torch.zeros(64)})
    add_tensors(checkpoint, {f"early_exit.3.{part}.weight": parts[part] for part in exit_parts})
    del model.model.layers[3:]
    if "norm" in exit_parts:
        model.model.norm.weight.data = parts["norm"]
    if "head" in exit_parts:
        model.lm_head.weight = torch.nn.Parameter(parts["head"])
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    manifest = export(checkpoint, tmp_path / "b", uncertified(weights="fp32", cache_type="f32", layers=3))
    assert manifest.spec.num_layers == 3
    # As for whole models: float32 sums in another order.
    assert np.abs(logits_of(tmp_path / "b") - expected).max() <= 2e-3


def test_a_checkpoint_with_exits_exports_whole_as_without(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    options = uncertified(weights="fp32")
    checkpoint = make_llama()
    export(checkpoint, tmp_path / "plain", options)
    add_tensors(checkpoint, {"early_exit.1.norm.weight": torch.zeros(64)})
    export(checkpoint, tmp_path / "b", options)
    assert (logits_of(tmp_path / "plain") == logits_of(tmp_path / "b")).all()


def test_an_exit_guesses_ahead_of_its_model(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = make_llama(num_hidden_layers=4)
    export(checkpoint, tmp_path / "target", uncertified(weights="fp32"))
    export(checkpoint, tmp_path / "draft", uncertified(weights="int4", layers=3))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with Engine.open(tmp_path / "target", EngineConfig(kv_memory="16MiB", speculate="off")) as engine:
        plain = engine.generate(IDS, params)
    config = EngineConfig(kv_memory="16MiB", speculate="draft", draft=tmp_path / "draft", num_draft_tokens=3)
    with Engine.open(tmp_path / "target", config) as engine:
        assert engine.generate(IDS, params).token_ids == plain.token_ids
        assert engine.stats().drafted_tokens > 0


def test_what_cannot_be_an_exit(make_llama: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = make_llama()
    with pytest.raises(InputError, match="layers is 2; the model has 2, expected 1 to 1"):
        export(checkpoint, tmp_path / "b", uncertified(layers=2))
    with pytest.raises(InputError, match="layers is 0"):
        ExportOptions(layers=0)
    add_tensors(checkpoint, {"early_exit.1.norm.weight": torch.zeros(65)})
    with pytest.raises(CheckpointError, match=r"early_exit.1.norm.weight has shape \[65\], expected \[64\]"):
        export(checkpoint, tmp_path / "b", uncertified(layers=1))
    add_tensors(checkpoint, {"early_exit.1.norm.weight": torch.zeros(64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match="dtype I32"):
        export(checkpoint, tmp_path / "b", uncertified(layers=1))
    assert not (tmp_path / "b").exists()
