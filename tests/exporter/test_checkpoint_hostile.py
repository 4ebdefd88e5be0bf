"""Damaged files: whatever is flipped, cut or put in, the answer is a checkpoint or a PageletError."""

import json
import tracemalloc
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.text import write_text_files
from pagelet.models.config import spec_from_config
from pagelet.models.errors import PageletError
from pagelet.models.names import GGUF_NAMES
from pagelet.models.weight_shapes import source_name, weight_shapes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
# The files have about 30 KB; nothing that reads them honestly needs more than a few times that.
MOST_BYTES = 4 << 20

# Half of the damage hits the first kilobytes, where the header's numbers are.
positions = st.one_of(st.integers(0, 2_000), st.integers(0, 40_000))
damage = st.lists(
    st.one_of(
        st.tuples(st.just("set"), positions, st.binary(min_size=1, max_size=8)),
        st.tuples(
            st.just("set"), positions, st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff" * 4, b"\0\0\0\x80"])
        ),
        st.tuples(st.just("insert"), positions, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("cut"), positions, st.just(b"")),
    ),
    min_size=1,
    max_size=3,
)
hostile = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def damaged(data: bytes, steps: list[tuple[str, int, bytes]]) -> bytes:
    for kind, at, new in steps:
        at %= len(data) + 1
        if kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + new + data[at + (len(new) if kind == "set" else 0) :]
    return data


def use(path: Path, out: Path) -> None:
    """Open and read everything; the traced memory stays small whatever the file claims."""
    tracemalloc.start()
    try:
        with suppress(PageletError), open_checkpoint(path) as checkpoint:
            for role in checkpoint.weights:
                checkpoint.read(role)
                checkpoint.read_blocks(role)
            write_text_files(checkpoint, out)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "c", "ab", "abc", "Ġ", "<s>", "</s>"])
    writer.add_token_types([1, 1, 1, 1, 1, 1, 3, 3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(6)
    writer.add_eos_token_id(7)
    writer.add_chat_template("{{ messages }}")
    for number, (role, shape) in enumerate(weight_shapes(spec_from_config(CONFIG))):
        array = np.ones(shape, np.float32)
        kind = (
            gguf.GGMLQuantizationType.Q4_1
            if len(shape) == 2 and number % 2
            else gguf.GGMLQuantizationType.F32
        )
        writer.add_tensor(source_name(role, GGUF_NAMES), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    spec = spec_from_config(CONFIG)
    named = {
        source_name(role, spec.row.names): np.ones(shape, np.float16 if len(shape) == 1 else np.float32)
        for role, shape in weight_shapes(spec)
    }
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<s>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    flags = {"content": "<x>", "special": True, "lstrip": False}
    declared = {
        "bos_token": {"content": "<s>"},
        "chat_template": "{{ x }}",
        "added_tokens_decoder": {"4": flags},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3], "temperature": 0.5, "top_k": 5})
    )
    return folder


@hostile
@given(steps=damage)
def test_a_damaged_gguf_file(gguf_bytes, tmp_path_factory, steps):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.gguf"
    path.write_bytes(damaged(gguf_bytes, steps))
    use(path, folder)


@hostile
@given(steps=damage)
def test_a_damaged_safetensors_file(folder, tmp_path_factory, steps):
    path = folder / "model.safetensors"
    good = path.read_bytes()
    try:
        path.write_bytes(damaged(good, steps))
        use(folder, tmp_path_factory.getbasetemp())
    finally:
        path.write_bytes(good)


@hostile
@given(
    name=st.sampled_from(["vocab.json", "merges.txt", "tokenizer_config.json", "generation_config.json"]),
    steps=damage,
)
def test_damaged_text_files(folder, tmp_path_factory, name, steps):
    path = folder / name
    good = path.read_bytes()
    try:
        path.write_bytes(damaged(good, steps))
        use(folder, tmp_path_factory.getbasetemp())
    finally:
        path.write_bytes(good)


def test_the_undamaged_files_open(gguf_bytes, folder, tmp_path):
    """Or the tests above would only ever see the first check fail."""
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf_bytes)
    for source in (path, folder):
        with open_checkpoint(source) as checkpoint:
            settings_, _ = write_text_files(checkpoint, tmp_path)
        assert settings_.bos_token_id is not None
