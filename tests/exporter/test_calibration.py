"""What calibration measures, against transformers in float64; and the texts that it measures on."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from pagelet.exporter import ExportOptions
from pagelet.exporter.calibration.attention_mass import attention_mass
from pagelet.exporter.calibration.corpus import (
    MIN_TOKENS,
    WINDOW,
    calibration_texts,
    golden_prompts,
    held_out_texts,
    read_text,
)
from pagelet.exporter.calibration.moments import LayerMoments, rms_norm, small_weights
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.original import Original
from pagelet.exporter.text import write_text_files
from pagelet.models.errors import InputError
from pagelet.models.spec import ModelSpec
from pagelet.models.text import Tokenizer

MakeCheckpoint = Callable[..., Path]
Float64 = NDArray[np.float64]
LENGTHS = (1, 70, 33)
TOKENS = [
    np.random.default_rng(seed).integers(2, 258, length).tolist() for seed, length in enumerate(LENGTHS)
]


class Reference:
    """transformers in float64: what each linear layer of one layer reads and gives, and the attention."""

    MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")

    def __init__(self, source: Path, layer: int, texts: Sequence[Sequence[int]]) -> None:
        options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
        model: Any = AutoModelForCausalLM.from_pretrained(source, **options).eval()
        self.inputs: dict[str, Float64] = {}
        self.outputs: dict[str, Float64] = {}
        kept: dict[str, list[Any]] = {name: [] for name in self.MODULES}
        block = model.model.layers[layer]
        for name in self.MODULES:
            parent = block.mlp if name in ("gate_proj", "down_proj") else block.self_attn
            getattr(parent, name).register_forward_hook(
                lambda module, args, output, name=name: kept[name].append(
                    (args[0][0].numpy().copy(), output[0].numpy().copy())
                )
            )
        self.mass = np.zeros(0)
        with torch.no_grad():
            for text in texts:
                attentions = model(torch.tensor([list(text)]), output_attentions=True).attentions
                # The mask's -inf stand-in leaves exact zeros.
                squares = np.square(attentions[layer][0].numpy().astype(np.float64))
                self.mass = np.append(self.mass, squares.sum(axis=(0, 1)))
        for name, pairs in kept.items():
            self.inputs[name] = np.concatenate([pair[0] for pair in pairs])
            self.outputs[name] = np.concatenate([pair[1] for pair in pairs])

    @property
    def qkv(self) -> NDArray[np.float32]:
        return np.concatenate([self.outputs[part + "_proj"] for part in "qkv"], axis=1).astype(np.float32)


def spec_of(source: Path) -> ModelSpec:
    with open_checkpoint(source) as checkpoint:
        return checkpoint.spec


def assert_mass(source: Path, layer: int) -> None:
    expected = Reference(source, layer, TOKENS)
    found = attention_mass(spec_of(source), layer, expected.qkv, LENGTHS, {})
    assert found.dtype == np.float64
    assert found.mean() == pytest.approx(1)
    # Scores of float32 that reach 30: a probability is off by some 1e-5 of itself, its square by twice that.
    np.testing.assert_allclose(found, expected.mass / expected.mass.mean(), rtol=1e-4, atol=1e-6)
    assert found.max() > 3  # or all tokens were alike


@pytest.mark.parametrize(
    "options",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "attention_bias": True},
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
)
def test_attention_mass_is_that_of_transformers(options: dict[str, Any], make_llama: MakeCheckpoint) -> None:
    assert_mass(make_llama(**options), 1)


@pytest.mark.parametrize("window", [1, 9])
@pytest.mark.parametrize("layer", [0, 1])
def test_attention_mass_with_a_window(window: int, layer: int, make_windowed: MakeCheckpoint) -> None:
    """Layer 0 has the window, layer 1 looks back all the way."""
    source = make_windowed(window)
    spec = spec_of(source)
    assert spec.window_groups[spec.group_of(layer)] == (0 if layer else window)
    if window == 1 and layer == 0:  # each token sees itself alone
        qkv = Reference(source, layer, TOKENS).qkv
        np.testing.assert_array_equal(attention_mass(spec, layer, qkv, LENGTHS, {}), 1)
    else:
        assert_mass(source, layer)


def expected_moments(reference: Reference, rows: slice) -> dict[str, Float64]:
    """Sums of x xᵀ over the rows of one run."""
    mass = reference.mass[rows] / reference.mass[rows].mean()
    x = {name: values[rows] for name, values in reference.inputs.items()}
    return {
        "attention.qkv": (x["q_proj"] * ((1 + mass) / 2)[:, None]).T @ x["q_proj"],
        "attention.o": x["o_proj"].T @ x["o_proj"],
        "mlp.gate_up": x["gate_proj"].T @ x["gate_proj"],
        "mlp.down": x["down_proj"].T @ x["down_proj"],
    }


@pytest.mark.parametrize(
    "options", [{}, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}]
)
def test_moments_are_those_of_transformers_inputs(
    options: dict[str, Any], make_llama: MakeCheckpoint
) -> None:
    source, layer = make_llama(**options), 1
    reference = Reference(source, layer, TOKENS)
    run = Layerwise(Texts.of(TOKENS), CacheFormat(32, "f32"))
    taps: list[tuple[Any, Any]] = []
    with open_checkpoint(source) as checkpoint:
        spec = checkpoint.spec
        norms = small_weights(checkpoint, spec, layer)
        with Original(checkpoint, spec, max(LENGTHS)) as original:
            residual = run.embed(original.embedding())
            residual = run.layer(original.layer(0), 0, residual)
            run.layer(original.layer(layer), layer, residual, lambda *told: taps.append(told))
    (values, lengths), first = taps[0], sum(LENGTHS[:2])
    assert len(taps) == 1
    assert lengths == LENGTHS
    moments = LayerMoments(spec, layer, norms)
    for rows, some in ((slice(0, first), LENGTHS[:2]), (slice(first, None), LENGTHS[2:])):
        moments.add({name: value[rows] for name, value in values.items()}, some)
    parts = [expected_moments(reference, rows) for rows in (slice(0, first), slice(first, None))]
    for module in parts[0]:
        found = moments.hessian(module)
        expected = (parts[0][module] + parts[1][module]) / sum(LENGTHS)
        assert found.dtype == np.float64
        # Activations in float32, a layer down: off by some 1e-5 of the largest.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_rms_norm_is_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((9, 64)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    x[3], x[4] = 0, x[4] * 1e-4  # where epsilon counts
    norm = LlamaRMSNorm(64, eps=1e-5)
    norm.weight.data = torch.from_numpy(weight)
    with torch.no_grad():
        expected = norm(torch.from_numpy(x)).numpy()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)  # two roundings of float32


# ---- texts ----


OpenTokenizer = Callable[..., Tokenizer]
TEXTS = Path(str(importlib.util.find_spec("pagelet.exporter.calibration").origin)).parent / "texts"  # type: ignore[union-attr]
TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


@pytest.fixture
def open_tokenizer(make_llama: MakeCheckpoint, tmp_path: Path) -> OpenTokenizer:
    """Opens a byte tokenizer, with the chat template that is given."""

    def opened(template: str | None = None) -> Tokenizer:
        source = tmp_path / "source"
        shutil.copytree(make_llama(num_hidden_layers=1), source)
        if template is not None:
            (source / "chat_template.jinja").write_text(template)
        folder = tmp_path / "text"
        folder.mkdir()
        with open_checkpoint(source) as checkpoint:
            text, _ = write_text_files(checkpoint, folder)
        return Tokenizer.open(folder, text)

    return opened


def passages(name: str) -> list[str]:
    """The passages as the file separates them, without surrounding space."""
    return [passage.strip() for passage in (TEXTS / name).read_text(encoding="utf-8").split("\n---\n")]


def contents() -> list[str]:
    conversations = json.loads((TEXTS / "chat.json").read_text(encoding="utf-8"))
    return [message["content"] for messages in conversations for message in messages]


def test_the_texts_are_part_of_the_package() -> None:
    names = {path.name for path in TEXTS.iterdir()}
    assert names == {"english.txt", "code.txt", "multilingual.txt", "chat.json", "held_out.txt"}
    for name in names - {"chat.json"}:
        assert len(passages(name)) > 5
        assert all(passages(name))
    assert all(contents())


def test_nothing_is_calibrated_on_what_is_held_out() -> None:
    """No passage, and no line or sentence that is longer than a phrase."""
    calibration = [p for name in ("english.txt", "code.txt", "multilingual.txt") for p in passages(name)]
    seen = "\n".join([*calibration, *contents()])
    assert not set(passages("held_out.txt")) & set(calibration)
    pieces = [
        piece.strip()
        for passage in passages("held_out.txt")
        for line in passage.splitlines()
        for piece in line.split(". ")
    ]
    assert len([piece for piece in pieces if len(piece) > 30]) > 50
    assert [piece for piece in pieces if len(piece) > 30 and piece in seen] == []


@pytest.mark.parametrize("num_tokens", [1024, 1537, 16_384, 1 << 20])
def test_built_in_texts_come_in_windows_up_to_the_number(
    num_tokens: int, open_tokenizer: OpenTokenizer
) -> None:
    options = ExportOptions(quantizer="gptq", calibration_tokens=num_tokens)
    windows = calibration_texts(options, open_tokenizer())
    total = sum(map(len, windows))
    assert all(2 <= len(window) <= WINDOW for window in windows)
    # A rest of one token is no text.
    assert total in (num_tokens, num_tokens - 1) or (num_tokens == 1 << 20 and 100_000 < total < num_tokens)


@pytest.mark.parametrize(
    ("template", "first"),
    [
        (None, "system: You are a helpful assistant.\n\nuser: Why"),
        (TEMPLATE, "<|system|>You are a helpful assistant.\n<|user|>Why"),
        (NO_SYSTEM, "<|user|>Why"),
        ("{{ raise_exception('never') }}", "system: You are a helpful assistant.\n\nuser: Why"),
    ],
)
def test_every_kind_has_its_turn(template: str | None, first: str, open_tokenizer: OpenTokenizer) -> None:
    """Prose, conversations, code and other languages, again and again."""
    tokenizer = open_tokenizer(template)
    windows = calibration_texts(ExportOptions(quantizer="awq", calibration_tokens=16_384), tokenizer)
    assert len(windows) == 32
    for kind, name in ((0, "english.txt"), (2, "code.txt"), (3, "multilingual.txt")):
        stream = [token for p in passages(name) for token in tokenizer.encode(p + "\n")]
        assert [t for window in windows[kind::4] for t in window] == stream[: 8 * WINDOW]
    chat = tokenizer.decode([t for window in windows[1::4] for t in window])
    assert chat.startswith(first)


def test_no_text_without_need(open_tokenizer: OpenTokenizer) -> None:
    assert calibration_texts(ExportOptions(), open_tokenizer()) == []


def test_a_file_is_read_in_windows(tmp_path: Path, open_tokenizer: OpenTokenizer) -> None:
    tokenizer = open_tokenizer()
    text = "".join(f"{number} and so on, " for number in range(400))
    (tmp_path / "mine.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())  # the mark is no text
    ids = tokenizer.encode(text)
    for num_tokens in (1024, 2000, 1 << 20):
        options = ExportOptions(
            quantizer="gptq", calibration=tmp_path / "mine.txt", calibration_tokens=num_tokens
        )
        windows = calibration_texts(options, tokenizer)
        assert [token for window in windows for token in window] == ids[:num_tokens]
        assert {len(window) for window in windows[:-1]} == {WINDOW}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\t \n", "is empty"),
        (b"GGUF\0\0\0\0" * 400, "holds NUL bytes: it is binary"),
        (b"caf\xe9 " * 400, "is no UTF-8 text .* at byte 3"),
        (b"x" * (MIN_TOKENS - 1), "has 1023 tokens; calibration needs at least 1024"),
    ],
)
def test_a_file_that_cannot_serve_is_named(
    data: bytes, message: str, tmp_path: Path, open_tokenizer: OpenTokenizer
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    options = ExportOptions(quantizer="gptq", calibration=path)
    with pytest.raises(InputError, match=rf"bad\.txt {message}"):
        calibration_texts(options, open_tokenizer())


def test_a_file_of_just_enough_tokens_serves(tmp_path: Path, open_tokenizer: OpenTokenizer) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * MIN_TOKENS)
    options = ExportOptions(quantizer="gptq", calibration=tmp_path / "short.txt")
    assert sum(map(len, calibration_texts(options, open_tokenizer()))) == MIN_TOKENS


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(InputError, match=r"large\.txt has 67108865 bytes; expected at most 67108864"):
        read_text(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt cannot be read: No such file"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(InputError, match=r"cannot be read: Is a directory"):
        read_text(tmp_path)


@pytest.mark.parametrize("window", [2, 100, 1024])
def test_held_out_texts(window: int, open_tokenizer: OpenTokenizer) -> None:
    tokenizer = open_tokenizer()
    stream = [token for p in passages("held_out.txt") for token in tokenizer.encode(p + "\n")]
    windows = held_out_texts(tokenizer, window)
    assert all(2 <= len(each) <= window for each in windows)
    found = [token for each in windows for token in each]
    assert found == stream[: len(found)]
    assert len(stream) - len(found) <= 1


def test_golden_prompts_are_beginnings_of_passages(open_tokenizer: OpenTokenizer) -> None:
    tokenizer = open_tokenizer()
    prompts = golden_prompts(tokenizer, 48, 4)
    beginnings = [tokenizer.encode(passage)[:48] for passage in passages("held_out.txt")]
    assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 4
    assert all(prompt in beginnings and len(prompt) == 48 for prompt in prompts)
    assert golden_prompts(tokenizer, 1, 4) == []  # nothing to predict in one token
