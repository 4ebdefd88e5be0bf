"""The model families, one data row each, and the names their weights have in a checkpoint.

A *role* is pagelet's own name of a weight ("layers.3.attention.q"); a row says what the role is
called in a Hugging Face checkpoint. GGUF names its tensors alike in all families, so that table
stands once.
"""

from dataclasses import dataclass, field

from pagelet.models.errors import UnsupportedError

_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention.norm": "model.layers.{layer}.input_layernorm",
    "attention.q": "model.layers.{layer}.self_attn.q_proj",
    "attention.k": "model.layers.{layer}.self_attn.k_proj",
    "attention.v": "model.layers.{layer}.self_attn.v_proj",
    "attention.o": "model.layers.{layer}.self_attn.o_proj",
    "mlp.norm": "model.layers.{layer}.post_attention_layernorm",
    "mlp.gate": "model.layers.{layer}.mlp.gate_proj",
    "mlp.up": "model.layers.{layer}.mlp.up_proj",
    "mlp.down": "model.layers.{layer}.mlp.down_proj",
}

GGUF_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attention.norm": "blk.{layer}.attn_norm",
    "attention.q": "blk.{layer}.attn_q",
    "attention.k": "blk.{layer}.attn_k",
    "attention.v": "blk.{layer}.attn_v",
    "attention.o": "blk.{layer}.attn_output",
    "mlp.norm": "blk.{layer}.ffn_norm",
    "mlp.gate": "blk.{layer}.ffn_gate",
    "mlp.up": "blk.{layer}.ffn_up",
    "mlp.down": "blk.{layer}.ffn_down",
}


@dataclass(frozen=True)
class Architecture:
    """One family.

    Attributes:
        name: pagelet's name, as the manifest stores it.
        hf_classes: entries of `architectures` in config.json that it serves.
        gguf_name: `general.architecture` in a GGUF file.
        hf_names: role to module name in a Hugging Face checkpoint.
        ignored: endings of tensors that a checkpoint may hold and the model does not use.
        activations: values of `hidden_act` that it knows.
        windows: config.json may limit what a layer attends to (`sliding_window`, `layer_types`).
        gguf_permutes_rotary: GGUF stores q and k rows paired for interleaved rotation.
    """

    name: str
    hf_classes: tuple[str, ...]
    gguf_name: str
    hf_names: dict[str, str] = field(hash=False)
    ignored: tuple[str, ...] = ()
    activations: tuple[str, ...] = ("silu",)
    windows: bool = False
    gguf_permutes_rotary: bool = False


ARCHITECTURES = (
    Architecture(
        name="llama",
        hf_classes=("LlamaForCausalLM",),
        gguf_name="llama",
        hf_names=_LLAMA_NAMES,
        ignored=("rotary_emb.inv_freq",),
        gguf_permutes_rotary=True,
    ),
    Architecture(
        name="mistral",
        hf_classes=("MistralForCausalLM", "MinistralForCausalLM"),
        gguf_name="",  # Mistral's GGUF files call themselves llama
        hf_names=_LLAMA_NAMES,
        windows=True,
    ),
)


def _known() -> str:
    names = [*(name for row in ARCHITECTURES for name in row.hf_classes)]
    gguf = [row.gguf_name for row in ARCHITECTURES if row.gguf_name]
    return f"{', '.join(names)}; in GGUF files {', '.join(gguf)}"


def architecture_by_name(name: str) -> Architecture:
    for row in ARCHITECTURES:
        if row.name == name:
            return row
    raise UnsupportedError(f"Unknown architecture {name!r}; known: {_known()}.")


def architecture_of_hf(classes: object) -> Architecture:
    """The row that serves config.json's `architectures`."""
    names = classes if isinstance(classes, list) else []
    for row in ARCHITECTURES:
        if any(name in row.hf_classes for name in names):
            return row
    found = ", ".join(map(str, names)) or "none named"
    raise UnsupportedError(f"Unknown architecture ({found}) in config.json; known: {_known()}.")


def architecture_of_gguf(name: str) -> Architecture:
    """The row that serves a GGUF file's `general.architecture`."""
    for row in ARCHITECTURES:
        if name and row.gguf_name == name:
            return row
    raise UnsupportedError(f"Unknown architecture {name!r} in the GGUF file; known: {_known()}.")
