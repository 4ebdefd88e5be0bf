"""A certificate is read strictly: whatever does not fit the model is refused, by its name."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.models.certificate import (
    CERTIFICATE_NAME,
    MAX_CERTIFICATE_BYTES,
    OUTPUTS_NAME,
    TOP,
    Certificate,
    GoldenPrompt,
    LayerError,
    Quality,
    TopLogits,
    load_certificate,
    load_layer_outputs,
    point_names,
    point_values,
)
from pagelet.models.config import spec_from_config
from pagelet.models.errors import BundleError
from pagelet.models.manifest import FileEntry, Manifest, Quantization, TextSettings

SPEC = spec_from_config({
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True,
})  # fmt: skip
NAMES = ("model.onnx", CERTIFICATE_NAME, OUTPUTS_NAME)
MANIFEST = Manifest(
    SPEC,
    Quantization("int4"),
    TextSettings(),
    {name: FileEntry(1, "0") for name in NAMES},
    {},
    {},
    certificate=CERTIFICATE_NAME,
)
OUTPUTS = np.random.default_rng(0).standard_normal((5, 2, 64)).astype(np.float32)


def top(seed: int) -> TopLogits:
    return TopLogits.of(np.random.default_rng(seed).standard_normal(100).astype(np.float32))


CERTIFICATE = Certificate(
    Quality(100, 12.5, 12.25, 0.01, 0.25, 0.9),
    (LayerError(0, 0.01, 0.02), LayerError(1, 0.03, 0.04)),
    (
        GoldenPrompt((5, 6, 7), (0, 9, 63), 2, (1, 2), (top(0), top(1)), (top(2), top(3)), "0" * 64),
        GoldenPrompt((8,), (0,), 1, (3,), (top(4),), (top(5),), "f" * 64),
    ),
    "fused-8.1",
    (2, 3),
    seconds=1.5,
    note="100 of 100 tokens",
    max_kl=0.5,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CERTIFICATE.save(tmp_path)
    OUTPUTS.astype("<f4").tofile(tmp_path / OUTPUTS_NAME)
    return tmp_path


def test_round_trip(folder: Path) -> None:
    assert load_certificate(folder, MANIFEST) == CERTIFICATE
    np.testing.assert_array_equal(load_layer_outputs(folder, MANIFEST, CERTIFICATE), OUTPUTS)
    assert load_certificate(folder, replace(MANIFEST, certificate="")) is None


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=TOP, max_size=40))
def test_floats_come_back_to_the_bit(values: list[float]) -> None:
    logits = np.array(values, np.float32)
    best = TopLogits.of(logits)
    back = np.array(json.loads(json.dumps(best.logits)), np.float32)
    assert back.tobytes() == logits[list(best.ids)].tobytes()
    assert sorted(best.logits, reverse=True) == list(best.logits) == sorted(values, reverse=True)[:TOP]


def test_worst_layers_and_agreement() -> None:
    assert [layer.layer for layer in CERTIFICATE.worst_layers(1)] == [1]
    assert [layer.layer for layer in CERTIFICATE.worst_layers(9)] == [1, 0]
    tops = [t.ids[0] for prompt in CERTIFICATE.golden for t in prompt.top]
    assert CERTIFICATE.agreement == sum(a == b for a, b in zip(tops, (1, 2, 3), strict=True)) / 3


def test_points_are_the_graphs_values_in_order() -> None:
    assert point_names(2)[:3] == ("embedding", "layers.0.attention", "layers.0.mlp")
    assert point_values(2)[-2:] == ("/layers.1/attention/o", "/layers.1/mlp/down")
    assert len(point_names(7)) == len(point_values(7)) == 15


def golden(data: dict[str, Any]) -> dict[str, Any]:
    prompt: dict[str, Any] = data["golden"][0]
    return prompt


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda data: data.pop("quality"), "no 'quality'"),
    (lambda data: data.update(colour=1), "unknown key 'colour'"),
    (lambda data: data["quality"].update(mean_kl=math.nan), "'mean_kl' is nan"),
    (lambda data: data["quality"].update(perplexity=math.inf), "'perplexity' is inf"),
    (lambda data: data["quality"].update(perplexity=0.5), "'perplexity' is 0.5; expected 1 to"),
    (lambda data: data["quality"].update(perplexity=10**400), "int too large"),
    (lambda data: data["quality"].update(tokens=10**400), "too large"),
    (lambda data: data["quality"].update(tokens=0), "'tokens' is 0"),
    (lambda data: data["quality"].update(top1_agreement=1.5), "'top1_agreement' is 1.5; expected 0 to 1"),
    (lambda data: data["layers"].pop(), "not the model's 2 layers in order"),
    (lambda data: data["layers"].reverse(), "not the model's 2 layers in order"),
    (lambda data: data["layers"][1].update(error=-1.0), "layer 1: 'error' is -1"),
    (lambda data: data["layers"][0].update(drift=math.nan), "layer 0: 'drift' is nan"),
    (lambda data: data["golden"].clear(), "0 golden prompts"),
    (lambda data: data.update(golden=data["golden"] * 33), "66 golden prompts"),
    (lambda data: golden(data).update(token_ids=[5] * 5000), "of 5001 tokens"),
    (lambda data: golden(data).update(token_ids=[5, 6, 100]), "'token_ids' has 100; expected 0 to 99"),
    (lambda data: golden(data).update(token_ids=[5, 6, -1]), "'token_ids' has -1"),
    (lambda data: golden(data).update(position_ids=[0, 9, 64]), "'position_ids' has 64; expected 0 to 63"),
    (lambda data: golden(data).update(position_ids=[0, 9, 9]), "not 3 ascending positions"),
    (lambda data: golden(data).update(position_ids=[0, 9]), "not 3 ascending positions"),
    (lambda data: golden(data).update(positions=4), "'positions' is 4; expected 1 to 3"),
    (lambda data: golden(data).update(positions=0), "'positions' is 0"),
    (lambda data: golden(data)["reference_tokens"].pop(), "'reference_tokens' has 1 entries for 2"),
    (lambda data: golden(data)["reference_tokens"].__setitem__(0, 100), "'reference_tokens' has 100"),
    (lambda data: golden(data)["top"].append(golden(data)["top"][0]), "'top' has 3 entries"),
    (lambda data: golden(data)["top"][0]["ids"].pop(), "not 8 logits of 8 tokens"),
    (lambda data: golden(data)["top"][0]["ids"].__setitem__(0, 1 << 70), "'ids' has"),
    (lambda data: golden(data)["top"][0]["logits"].__setitem__(0, math.inf), "'logits' is inf"),
    (lambda data: golden(data).update(logits_sha256="0" * 63), "'logits_sha256'"),
    (lambda data: data.update(layer_rows=[]), "'layer_rows'"),
    (lambda data: data.update(layer_rows=[3, 2]), "'layer_rows'"),
    (lambda data: data.update(layer_rows=[-1, 2]), "'layer_rows'"),
    (lambda data: data.update(layer_rows=[2, 4]), "ascending rows below 4"),
    (lambda data: data.update(layer_outputs="../x"), "'../x' is not among the bundle's files"),
    (lambda data: data.update(seconds=-1), "'seconds' is -1"),
    (lambda data: data.update(max_kl=math.nan), "'max_kl' is nan"),
    (lambda data: data.update(note="x" * 1001), "'note' is not at most 1000 printable characters"),
    (lambda data: data.update(note="\x1b[31mred"), "'note' is not at most 1000 printable characters"),
    (lambda data: data.update(arithmetic=3), "'arithmetic' is 3"),
    (lambda data: data.update(arithmetic="x"), "'arithmetic' is 'x', which no kernel has"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_certificate_that_does_not_fit(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = folder / CERTIFICATE_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(BundleError, match=message):
        load_certificate(folder, MANIFEST)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null", '"x"', "{}", "\udc80", "9" * 5000])
def test_not_json_of_ours(folder: Path, text: str) -> None:
    (folder / CERTIFICATE_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BundleError):
        load_certificate(folder, MANIFEST)


def test_files_that_are_missing_or_too_large(folder: Path) -> None:
    with (folder / CERTIFICATE_NAME).open("ab") as stream:
        stream.truncate(MAX_CERTIFICATE_BYTES + 1)
    with pytest.raises(BundleError, match="that is no certificate"):
        load_certificate(folder, MANIFEST)
    (folder / CERTIFICATE_NAME).unlink()
    with pytest.raises(BundleError, match=r"certificate\.json cannot be read"):
        load_certificate(folder, MANIFEST)


def test_layer_outputs_of_another_size_or_not_finite(folder: Path) -> None:
    path = folder / OUTPUTS_NAME
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    with pytest.raises(BundleError, match=r"has 2556 bytes; float32 \[5, 2, 64\] has 2560"):
        load_layer_outputs(folder, MANIFEST, CERTIFICATE)
    path.write_bytes(content[:-4] + np.float32(np.nan).tobytes())
    with pytest.raises(BundleError, match="NaN or infinity"):
        load_layer_outputs(folder, MANIFEST, CERTIFICATE)
    path.unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        load_layer_outputs(folder, MANIFEST, CERTIFICATE)
