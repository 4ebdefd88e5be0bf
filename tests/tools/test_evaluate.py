"""Perplexity and divergence, against their definitions and transformers' loss."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagelet.exporter import ExportOptions, export
from pagelet.models.errors import InputError
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.cli import main
from pagelet.tools.evaluate import evaluate, log_softmax, windows


def test_windows_cover_the_text_and_leave_out_what_cannot_be_scored() -> None:
    assert list(windows([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4]]
    assert list(windows([1, 2, 3, 4, 5], 3, limit=4)) == [[1, 2, 3]]
    assert list(windows([1], 4)) == []


def test_log_softmax_of_large_logits() -> None:
    logits = np.float32([[1e4, 1e4 - 1, -1e4]])
    np.testing.assert_allclose(log_softmax(logits)[0, :2], [-0.3132617, -1.3132617], rtol=1e-4)


def test_against_transformers(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_llama()
    export(checkpoint, tmp_path / "fp32", ExportOptions(weights="fp32", cache_type="f32"))
    export(checkpoint, tmp_path / "int4", ExportOptions(weights="int4"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    pieces = [list(range(10, 40)), list(range(60, 90))]
    with torch.no_grad():
        losses = [float(model(torch.tensor([p]), labels=torch.tensor([p])).loss) for p in pieces]
    config = EngineConfig(kv_memory="4MiB")
    with Engine.open(tmp_path / "fp32", config) as fp32, Engine.open(tmp_path / "int4", config) as int4:
        itself = evaluate(fp32, pieces, fp32)
        rounded = evaluate(int4, pieces, fp32)
        with pytest.raises(InputError, match="nothing to score"):
            evaluate(fp32, [])
    assert itself.tokens == 58
    assert itself.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert (itself.mean_kl, itself.top1_agreement) == (0.0, 1.0)
    assert rounded.reference_perplexity == itself.perplexity
    assert rounded.mean_kl is not None
    assert 0 < rounded.mean_kl <= rounded.p99_kl


def test_a_checkpoint_as_the_reference_is_run_in_fp32_throughout(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cache too: an fp32 bundle with an f32 cache is at no distance from it, one with an f16 cache is."""
    checkpoint, text = make_llama(), tmp_path / "text.txt"
    text.write_text("The tide comes in twice a day, and twice a day it leaves. " * 4, encoding="utf-8")
    distances = []
    for cache_type in ("f32", "f16"):
        export(checkpoint, tmp_path / cache_type, ExportOptions(weights="fp32", cache_type=cache_type))
        arguments = ["eval", tmp_path / cache_type, "--text", text, "--reference", checkpoint, "--json"]
        assert main([str(argument) for argument in arguments]) == 0
        distances.append(json.loads(capsys.readouterr().out)["mean_kl"])
    assert distances[0] == 0.0 < distances[1]
