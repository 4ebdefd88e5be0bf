"""Tiny Llama weights, and writers that put them into a folder or a GGUF file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import published_cuts
import pytest
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pagelet.models.config import spec_from_config
from pagelet.models.names import GGUF_NAMES
from pagelet.models.spec import ModelSpec
from pagelet.models.weight_shapes import source_name, weight_shapes

Weights = dict[str, NDArray[np.float32]]
WriteFolder = Callable[..., Path]
WriteGGUF = Callable[..., Path]


@pytest.fixture(scope="session")
def config() -> dict[str, Any]:
    """A config.json; rows are 256 wide, so that every GGUF block type fits."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 48,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


@pytest.fixture(scope="session")
def spec(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config)


@pytest.fixture(scope="session")
def weights(spec: ModelSpec) -> Weights:
    """Random float32 weights by role; exact in bfloat16, so that one oracle serves every dtype."""
    rng = np.random.default_rng(7)

    def draw(shape: tuple[int, ...]) -> NDArray[np.float32]:
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32)

    return {role: draw(shape) for role, shape in weight_shapes(spec)}


@pytest.fixture
def write_folder(tmp_path: Path, config: dict[str, Any], spec: ModelSpec) -> WriteFolder:
    """write_folder(tensors by role, **config changes): config.json and one safetensors file."""

    def write(tensors: Mapping[str, NDArray[Any]], **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        named = {source_name(role, spec.row.names): array for role, array in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.fixture
def write_gguf(tmp_path: Path, spec: ModelSpec) -> WriteGGUF:
    """write_gguf(tensors by role, kind, **metadata): q and k permuted as llama.cpp's converter does."""

    def write(
        tensors: Weights, kind: str = "F32", extra: Mapping[str, Any] | None = None, **metadata: Any
    ) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        _describe(writer, spec)
        for key, value in metadata.items():
            writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
        for role, array in tensors.items():
            name = source_name(role, GGUF_NAMES)
            if ".attention.q." in role or ".attention.k." in role:
                array = permuted(array, array.shape[0] // spec.layers[0].head_dim)
            if array.ndim == 1:
                writer.add_tensor(name, array)
                continue
            qtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(array, qtype), raw_dtype=qtype)
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _describe(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.layers[0].intermediate_size)
    writer.add_head_count(spec.attention.num_heads)
    writer.add_head_count_kv(spec.layers[0].num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm.epsilon)
    writer.add_rope_freq_base(spec.ropes[0].theta)
    writer.add_rope_dimension_count(spec.ropes[0].rotary_dim)


def permuted(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """The converter's own formula: the two halves of each head's rows, interleaved."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = "<tool>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. I'll say it's 12345 times; WE'VE SAID SO!",
    "  leading spaces,   inner   spaces and trailing ones   ",
    "\ttabs\t\tand\nnew\n\nlines\r\nof\n   every kind \n",
    "3.14159 1,000,000 0x1F ٣٤٥ ²³ ½ Ⅷ 2024-12-31T23:59:59",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 ☺️ 🤷🏽‍♀️",
    "日本語のテキスト、中文字符。한국어 텍스트",
    "العربية مع تَشْكِيل ועברית עם נִקּוּד",
    "combining e\u0301 a\u0300\u0323 ñ n\u0303 Å A\u030a ﬁ",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 3,
    "<|im_start|>user\nhi<|im_end|> and <|endoftext|>.<tool> <tool>x</tool> <|not_special|>",
    "snake_case CamelCase kebab-case a/b\\c {[()]} a==b && c!=d // комментарий",
    "\u00a0\u2003\u200b\ufeff zero width",
    "'S 'T don’t 'RE",
    "a",
    " ",
    "",
]
NASTY: list[str] = json.loads(
    (Path(__file__).parents[1] / "data" / "tokenizer_corpus.json").read_text(encoding="utf-8")
)


def train(pre: str) -> Tokenizer:
    """A byte-level BPE with real merges, trained on the corpus that it will be tried on."""
    cut, composes = published_cuts.CUTS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in published_cuts.WHOLE_WORDS))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*SPECIALS, USER], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] != USER
    return Tokenizer.from_str(json.dumps(document))


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


@pytest.fixture(scope="session")
def specials() -> list[str]:
    """The special tokens of a trained tokenizer, ids 0 to 2; "<tool>" follows them and is not special."""
    return SPECIALS


@pytest.fixture(scope="session")
def trained() -> Callable[[str], Tokenizer]:
    """trained(pre): a fresh copy of the tokenizer whose text is cut as `tokenizer.ggml.pre` says."""
    documents: dict[str, str] = {}

    def copy(pre: str) -> Tokenizer:
        if pre not in documents:
            documents[pre] = train(pre).to_str()
        return Tokenizer.from_str(documents[pre])

    return copy


@pytest.fixture(scope="session")
def assert_same_tokens() -> Callable[[Tokenizer, Tokenizer], None]:
    """Ids, tokens and decoded text of both corpora are the same."""

    def check(ours: Tokenizer, original: Tokenizer) -> None:
        for text in [*CORPUS, *NASTY]:
            expected = original.encode(text, add_special_tokens=False)
            actual = ours.encode(text, add_special_tokens=False)
            assert actual.tokens == expected.tokens
            assert actual.ids == expected.ids
            for skip in (True, False):
                assert ours.decode(actual.ids, skip_special_tokens=skip) == original.decode(
                    expected.ids, skip_special_tokens=skip
                )

    return check


@pytest.fixture(scope="session")
def vocabulary_960(weights: Weights) -> Weights:
    """The weights, tied, with room for a trained tokenizer."""
    body = {role: array for role, array in weights.items() if role != "head.weight"}
    return body | {"embedding.weight": weights["embedding.weight"].repeat(20, axis=0)}
