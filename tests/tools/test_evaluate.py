"""Perplexity and divergence, against their definitions and transformers' loss."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import uncertified
from transformers import AutoModelForCausalLM

from pagelet.exporter import export
from pagelet.models.distance import log_softmax
from pagelet.models.errors import InputError
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.cli import evaluate as command
from pagelet.tools.cli import main
from pagelet.tools.evaluate import evaluate, windows
from pagelet.tools.quality.layers import layer_kl


def test_windows_cover_the_text_and_leave_out_what_cannot_be_scored() -> None:
    assert list(windows([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4]]
    assert list(windows([1, 2, 3, 4, 5], 3, limit=4)) == [[1, 2, 3]]
    assert list(windows([1], 4)) == []


def test_against_transformers(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_llama()
    export(checkpoint, tmp_path / "fp32", uncertified(weights="fp32", cache_type="f32"))
    export(checkpoint, tmp_path / "int4", uncertified(weights="int4"))
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


def test_divergence_by_its_definition(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """Every figure again, in float64, from the engines' logits; more rows than are taken at once."""
    checkpoint = make_llama()
    for weights in ("fp32", "int4"):
        export(checkpoint, tmp_path / weights, uncertified(weights=weights))
    pieces = [[(7 * i) % 300 + 2 for i in range(200)], list(range(60, 90))]
    config = EngineConfig(kv_memory="4MiB")
    with Engine.open(tmp_path / "fp32", config) as fp32, Engine.open(tmp_path / "int4", config) as int4:
        found = evaluate(int4, pieces, fp32)
        ours, theirs = (
            np.concatenate([engine.logits(piece)[:-1] for piece in pieces]).astype(np.float64)
            for engine in (int4, fp32)
        )
    log_q, log_p = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (ours, theirs))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    targets = [token for piece in pieces for token in piece[1:]]
    loss = -log_q[np.arange(len(targets)), targets]
    assert found.tokens == len(targets) == 228
    # Log-probabilities are float32: seven digits, of logits up to about 20.
    assert found.mean_kl == pytest.approx(kl.mean(), abs=1e-5)
    assert found.p99_kl == pytest.approx(np.quantile(kl, 0.99), abs=1e-5)
    assert found.perplexity == pytest.approx(np.exp(loss.mean()), rel=1e-5)
    assert found.top1_agreement == (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()


def test_one_layer_of_a_bundle_among_the_references(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """A model of one layer whose tables are the reference's own: that layer makes the whole distance."""
    checkpoint = make_llama(num_hidden_layers=1)
    plain = uncertified(weights="fp16", cache_type="f32")
    rounded = uncertified(weights="fp8", cache_type="f32")
    for name, options in (("plain", plain), ("rounded", rounded)):
        export(checkpoint, tmp_path / name, options)
    pieces, seen = [list(range(10, 40)), list(range(60, 90))], []
    kl = layer_kl(tmp_path / "rounded", tmp_path / "plain", pieces, lambda *step: seen.append(step))
    with (
        Engine.open(tmp_path / "plain", EngineConfig(kv_memory="4MiB")) as reference,
        Engine.open(tmp_path / "rounded", EngineConfig(kv_memory="4MiB")) as engine,
    ):
        pairs = [(log_softmax(reference.logits(p)), log_softmax(engine.logits(p))) for p in pieces]
    whole = np.concatenate([(np.exp(p) * (p - q)).sum(axis=1) for p, q in pairs]).mean()
    assert len(kl) == len(seen) == 1
    assert kl[0] == pytest.approx(whole, rel=1e-3)  # float32 sums in another order
    assert kl[0] > 1e-4
    assert layer_kl(tmp_path / "plain", tmp_path / "plain", pieces, lambda *_: None) == [0.0]


def test_layers_of_every_kind_of_weights(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_llama(tie_word_embeddings=True, attention_bias=True)
    pieces = [list(range(10, 40))]
    for weights in ("fp32", "int4", "int8"):
        export(checkpoint, tmp_path / weights, uncertified(weights=weights))
    four, eight = (
        layer_kl(tmp_path / w, tmp_path / "fp32", pieces, lambda *_: None) for w in ("int4", "int8")
    )
    assert all(0 < e < f for e, f in zip(eight, four, strict=True))
    other = make_llama(num_hidden_layers=3)
    export(other, tmp_path / "other", uncertified())
    with pytest.raises(InputError, match="not of one model"):
        layer_kl(tmp_path / "other", tmp_path / "fp32", pieces, lambda *_: None)


def test_bundles_beside_each_other_and_pictures(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, text = make_llama(), tmp_path / "text.txt"
    text.write_text("The tide comes in twice a day. " * 4, encoding="utf-8")
    bundles = []
    for weights in ("int4", "int8"):
        bundles.append(str(tmp_path / weights))
        export(checkpoint, Path(bundles[-1]), uncertified(weights=weights))
    common = ["--text", str(text), "--reference", str(checkpoint)]
    sizes, layers = tmp_path / "sizes.png", tmp_path / "layers.png"

    def run(*arguments: str) -> str:
        assert main(["eval", bundles[0], *common, *arguments]) == 0
        return capsys.readouterr().out

    alone = json.loads(run("--json", "--plot", str(layers)))
    both = json.loads(run("--json", "--compare", bundles[1], "--plot", str(sizes)))
    assert [row["name"] for row in both["rows"]] == ["int4", "int8"]
    assert both["rows"][0]["result"] == alone
    assert "| int8 | 8.50 | 8.50 |" in run("--compare", bundles[1])
    for picture in (sizes, layers):
        assert picture.read_bytes().startswith(b"\x89PNG")
    without = ["eval", bundles[0], "--text", str(text)]
    for option in (["--compare", bundles[1]], ["--plot", str(sizes)]):
        assert main([*without, *option]) == 1
        assert "--reference" in capsys.readouterr().err


def test_a_checkpoint_as_the_reference_is_run_in_fp32_throughout(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cache too: an fp32 bundle with an f32 cache is at no distance from it, one with an f16 cache is."""
    checkpoint, text = make_llama(), tmp_path / "text.txt"
    text.write_text("The tide comes in twice a day, and twice a day it leaves. " * 4, encoding="utf-8")
    distances = []
    for cache_type in ("f32", "f16"):
        export(checkpoint, tmp_path / cache_type, uncertified(weights="fp32", cache_type=cache_type))
        arguments = ["eval", tmp_path / cache_type, "--text", text, "--reference", checkpoint, "--json"]
        assert main([str(argument) for argument in arguments]) == 0
        distances.append(json.loads(capsys.readouterr().out)["mean_kl"])
    assert distances[0] == 0.0 < distances[1]


def test_a_picture_of_layers_needs_what_an_export_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The tide.", encoding="utf-8")
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    common = ["--text", str(text), "--reference", "b", "--plot", str(tmp_path / "a.png")]
    assert main(["eval", "a", *common]) == 1
    assert "pip install 'pagelet[export,plot]'" in capsys.readouterr().err
