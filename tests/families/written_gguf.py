"""A small GGUF writer: names by the gguf package's own table, values as llama.cpp documents them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

F32 = gguf.GGMLQuantizationType.F32
_SPECIALS = ["<bos>", "<eos>"]
_MERGE = ("a", "b")


def _vocabulary() -> list[str]:
    return [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(_MERGE)]


def write_merging_tokenizer(folder: Path) -> None:
    """A byte-level BPE with one merge: without any, a GGUF file cannot say that it has none."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(_vocabulary())}, [_MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Of the family's own class it would gain that class's special tokens.
    declared = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))


def write_gguf(
    path: Path,
    arch: str,
    model: Any,
    keys: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> None:
    """A model of transformers as a GGUF file.

    `keys`: metadata under "{arch}."; `extra`: more tensors; `kinds`: quantized types, by the ends of names.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**_common(model.config), **keys}.items():
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    _write_tokenizer(writer)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    for name, array in _stacked(model).items():
        name += "" if name.endswith((".weight", ".bias")) else ".weight"
        gguf_name = names.get_name(name, (".weight", ".bias"))
        kind = next((kind for end, kind in (kinds or {}).items() if gguf_name.endswith(end)), "F32")
        qtype = gguf.GGMLQuantizationType[kind]
        values = _converted(arch, name, array, model.config)
        writer.add_tensor(gguf_name, values if qtype == F32 else quantize(values, qtype), raw_dtype=qtype)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _common(config: Any) -> dict[str, Any]:
    of_rms = hasattr(config, "rms_norm_eps")
    epsilon = config.rms_norm_eps if of_rms else config.layer_norm_eps
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        f"attention.layer_norm_{'rms_' if of_rms else ''}epsilon": epsilon,
    }
    head_dim = config.to_dict().get("head_dim")  # Gemma 4's config itself does not tell
    if head_dim:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return keys


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = _vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in _SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(_MERGE)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _stacked(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors by their names in a folder, experts in one; a tied head is left out."""
    tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name in [name for name in tensors if name.endswith("mlp.experts.gate_up_proj")]:
        gate, up = np.split(tensors.pop(name), 2, axis=1)
        tensors[name.replace("gate_up", "gate") + ".weight"] = np.ascontiguousarray(gate)
        tensors[name.replace("gate_up", "up") + ".weight"] = np.ascontiguousarray(up)
        down = name.replace("gate_up", "down")
        tensors[down + ".weight"] = tensors.pop(down)
    return tensors


def _converted(arch: str, name: str, array: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    module = name.split(".")[-2]
    if module == "query_key_value":  # a head's q, k and v: all heads' q, then k, then v
        by_head = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
        return np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(array.shape)
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    if arch in ("llama", "smollm3", "granite") and module in heads:
        halves = array.reshape(heads[module], 2, -1, *array.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return array + np.float32(1)
    return array
