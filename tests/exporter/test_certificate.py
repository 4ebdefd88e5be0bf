"""What a certificate says, against the same numbers computed by transformers and NumPy."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from certified import random_texts, write_certified
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from pagelet.exporter import ExportOptions
from pagelet.exporter.certificate.golden import Prompt, spread, stored_rows
from pagelet.exporter.certificate.held_out import MAX_TOKENS, MIN_TOKENS, WINDOW, held_out, sample
from pagelet.models.certificate import CERTIFICATE_NAME, OUTPUTS_NAME, Certificate, TopLogits
from pagelet.models.errors import BundleError, CheckpointError
from pagelet.runtime import Engine, EngineConfig

TEXTS = random_texts(3, 50)
GOLDEN = random_texts(3, 20, seed=1)
# float32 sums in another order: as in test_llama, of logits that reach 40.
LOGITS_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def source(make_llama: Callable[..., Path]) -> Path:
    return make_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def original(source: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def run(model: Any, ids: Sequence[int], places: Sequence[int] | None = None) -> Any:
    """(logits [T, vocab], residual streams before each layer and behind the last, [T, hidden])."""
    streams: list[torch.Tensor] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        streams.append(args[0] if args else kwargs["hidden_states"])

    layers = [*model.model.layers, model.model.norm]
    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    positions = torch.tensor([list(places or range(len(ids)))])
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)]), position_ids=positions).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, [stream[0].numpy() for stream in streams]


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


@pytest.mark.parametrize(("weights", "cache_type"), [("bf16", "f32"), ("int4", "fp8")])
def test_quality_is_that_of_transformers_and_the_engine(
    source: Path, original: Any, weights: str, cache_type: str, tmp_path: Path
) -> None:
    options = ExportOptions(weights=weights, cache_type=cache_type)
    found = write_certified(source, tmp_path / "b", options, TEXTS, GOLDEN).quality
    ours, theirs, targets = [], [], []
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="4MiB")) as engine:
        for text in TEXTS:
            ours.append(log_softmax(engine.logits(text)[:-1]))
            theirs.append(log_softmax(run(original, text)[0][:-1]))
            targets += text[1:]
    p, q, rows = np.concatenate(theirs), np.concatenate(ours), np.arange(len(targets))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    assert found.tokens == len(targets) == 3 * 49
    # A logit's error is that of its log-probability twice over.
    assert np.log(found.perplexity) == pytest.approx(-q[rows, targets].mean(), abs=2 * LOGITS_TOLERANCE)
    assert np.log(found.reference_perplexity) == pytest.approx(
        -p[rows, targets].mean(), abs=2 * LOGITS_TOLERANCE
    )
    assert found.mean_kl == pytest.approx(kl.mean(), abs=LOGITS_TOLERANCE, rel=0.02)
    assert found.p99_kl == pytest.approx(np.quantile(kl, 0.99), abs=LOGITS_TOLERANCE, rel=0.05)
    # Near-ties may fall either way.
    assert found.top1_agreement == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=2 / len(rows))
    assert found.mean_kl > 1e-4  # so that the comparison is one


def test_layer_errors_are_those_of_rounded_layers(source: Path, original: Any, tmp_path: Path) -> None:
    """With bf16 weights and an f32 cache, the bundle is transformers' model with its matrices rounded."""
    found = write_certified(
        source, tmp_path / "b", ExportOptions(weights="bf16", cache_type="f32"), TEXTS, GOLDEN
    ).layers
    rounded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for parameter in rounded.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    theirs = [run(original, text)[1] for text in TEXTS]
    ours = [run(rounded, text)[1] for text in TEXTS]
    for layer, entry in enumerate(found):
        drift = relative([s[layer + 1] for s in ours], [s[layer + 1] for s in theirs])
        assert entry.drift == pytest.approx(drift, rel=1e-2)  # float32 beside errors of 1e-3
        inputs = [torch.tensor(stream[layer])[None] for stream in theirs]
        positions = torch.arange(50)[None]
        rotations = [rounded.model.rotary_emb(x, positions) for x in inputs]
        mask = torch.full((50, 50), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            alone = [
                rounded.model.layers[layer](x, attention_mask=mask, position_embeddings=rotation)
                for x, rotation in zip(inputs, rotations, strict=True)
            ]
        added = [
            (y[0] if y.ndim == 3 else y).numpy() - x[0].numpy() for x, y in zip(inputs, alone, strict=True)
        ]
        expected = relative(added, [s[layer + 1] - s[layer] for s in theirs])
        assert entry.error == pytest.approx(expected, rel=1e-2)
        assert entry.error > 1e-4


def relative(values: Sequence[NDArray[Any]], reference: Sequence[NDArray[Any]]) -> float:
    a, b = np.concatenate(values).astype(np.float64), np.concatenate(reference).astype(np.float64)
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


def test_full_precision_is_the_original_itself(source: Path, tmp_path: Path) -> None:
    found = write_certified(source, tmp_path / "b", ExportOptions(weights="fp32", cache_type="f32"))
    assert all(layer.error == layer.drift == 0 for layer in found.layers)
    assert (found.quality.mean_kl, found.quality.top1_agreement) == (0.0, 1.0)
    assert found.quality.perplexity == found.quality.reference_perplexity
    assert all(prompt.top == prompt.reference_top for prompt in found.golden)
    assert found.agreement == 1.0


def test_golden_prompts(source: Path, original: Any, tmp_path: Path) -> None:
    found = write_certified(source, tmp_path / "b", ExportOptions(), TEXTS, GOLDEN)
    assert [list(prompt.token_ids) for prompt in found.golden] == GOLDEN
    assert found.golden[0].position_ids[-1] == 511
    assert all(prompt.position_ids == tuple(range(20)) for prompt in found.golden[1:])
    for prompt in found.golden:
        logits = run(original, prompt.token_ids, prompt.position_ids)[0][-16:]
        for row, top, token in zip(logits, prompt.reference_top, prompt.reference_tokens, strict=True):
            assert np.abs(np.sort(row)[::-1][:8] - top.logits).max() < LOGITS_TOLERANCE
            assert row[token] > row.max() - LOGITS_TOLERANCE
    with Engine.open(tmp_path / "b", EngineConfig(kv_memory="4MiB")) as engine:
        for prompt in found.golden[1:]:
            rows = engine.logits(prompt.token_ids)[-prompt.positions :]
            assert tuple(map(TopLogits.of, rows)) == prompt.top
    size = (tmp_path / "b" / OUTPUTS_NAME).stat().st_size
    assert size == 4 * 7 * len(found.layer_rows) * 64
    assert (tmp_path / "b" / CERTIFICATE_NAME).stat().st_size < 64 << 10


def test_progress_and_time(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    found = write_certified(
        source,
        tmp_path / "b",
        ExportOptions(),
        random_texts(4, 300),
        seconds=0.0,
        on_progress=lambda *step: steps.append(step),
    )
    assert 100 < found.quality.tokens < MIN_TOKENS  # no time at all: the least that says something
    assert found.note.startswith("128 of 1200 tokens")
    assert [done for done, _, _ in steps] == list(range(7))
    assert {total for _, total, _ in steps} == {6}
    assert [name for *_, name in steps[1:4]] == ["layers.0", "layers.1", "layers.2"]
    assert found.seconds > 0


@pytest.mark.parametrize("count", [1, 3, 40])
def test_held_out_takes_a_share_of_each_text(count: int) -> None:
    texts = [[number] * 700 for number in range(count)]
    for budget in (128, 1000, 4096):
        pieces = held_out(texts, budget, max_context=512)
        assert sum(map(len, pieces)) in (budget, budget - 1, min(budget, 700 * count))
        assert all(2 <= len(piece) <= min(512, WINDOW) for piece in pieces)
        kinds = {piece[0] for piece in pieces}
        assert len(kinds) >= min(count, budget // MIN_TOKENS)
        rows = sample(pieces)
        assert 0 < sum(rows_of.stop - rows_of.start for rows_of in rows) <= 256
    assert sum(map(len, held_out(texts, 10 * MAX_TOKENS, 512))) <= 700 * count
    assert held_out([[1], [2, 3]], 128, 512) == [[2, 3]]


@pytest.mark.parametrize(("length", "context"), [(1, 1), (1, 9), (5, 5), (20, 512), (48, 131_072)])
def test_spread_positions_reach_the_end(length: int, context: int) -> None:
    positions = spread(length, context)
    assert len(positions) == length
    assert positions[0] == 0
    assert positions[-1] == (context - 1 if length > 1 else 0)
    gaps = np.diff(positions)
    assert (gaps >= 1).all()
    assert (np.diff(gaps) >= -1).all()  # growing, but for rounding


@pytest.mark.parametrize("lengths", [(1,), (20,), (3, 5, 40), (2,) * 9])
def test_stored_rows_are_about_eight(lengths: tuple[int, ...]) -> None:
    rows = stored_rows([Prompt((0,) * length, tuple(range(length))) for length in lengths])
    assert all(
        chosen[-1] == length - 1 and chosen[0] >= 0 for chosen, length in zip(rows, lengths, strict=True)
    )
    assert all(sorted(set(chosen)) == chosen for chosen in rows)
    assert sum(map(len, rows)) <= max(8, len(lengths))


def scaled(source: Path, folder: Path, name: str, factor: float) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] * np.float32(factor)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_an_original_that_overflows_names_its_layer(source: Path, tmp_path: Path) -> None:
    broken = scaled(source, tmp_path / "c", "model.layers.1.mlp.down_proj.weight", 1e38)
    with pytest.raises(CheckpointError, match="the original's layer 1 gives NaN or infinity"):
        write_certified(broken, tmp_path / "b", ExportOptions(weights="fp32"))


def test_a_bundle_that_overflows_names_its_layer(source: Path, tmp_path: Path) -> None:
    """Values above 65,504 are infinite in an f16 cache, and fit the original's."""
    broken = scaled(source, tmp_path / "c", "model.layers.2.self_attn.v_proj.weight", 1e6)
    with pytest.raises(BundleError, match="the bundle's layer 2 gives NaN or infinity"):
        write_certified(broken, tmp_path / "b", ExportOptions(weights="fp32", cache_type="f16"))


def test_the_file_is_plain_json(source: Path, tmp_path: Path) -> None:
    found: Certificate = write_certified(source, tmp_path / "b", ExportOptions())
    data = json.loads((tmp_path / "b" / CERTIFICATE_NAME).read_text(encoding="utf-8"))
    assert data["quality"]["mean_kl"] == found.quality.mean_kl
