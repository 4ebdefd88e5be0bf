"""ModelSpec: everything about a model that the graph and the runtime depend on, frozen."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagelet.models.architectures import Architecture, architecture_by_name, architecture_of_hf
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.rope import RopeSpec, rope_from_config
from pagelet.models.strict import require

# Far above any real model; a damaged or hostile config must not size an allocation.
LIMITS = {
    "vocab_size": 4_000_000,
    "hidden_size": 131_072,
    "intermediate_size": 1_048_576,
    "num_layers": 1_024,
    "num_heads": 1_024,
    "num_kv_heads": 1_024,
    "head_dim": 1_024,
    "max_context": 16_777_216,
}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are elements; `max_context` is tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_epsilon: float
    rope: RopeSpec
    tie_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_windows: tuple[
        int, ...
    ] = ()  # tokens that each layer attends to, itself included; 0: all. Empty: all 0

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise CheckpointError(f"{name} is {value}; expected 1 to {limit}. Is the config damaged?")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise CheckpointError(f"{len(self.layer_windows)} windows for {self.num_layers} layers.")
        if any(not 0 <= window <= LIMITS["max_context"] for window in self.layer_windows):
            raise CheckpointError(f"a layer's window is out of range: {self.layer_windows}.")
        if not 0 < self.norm_epsilon < 1:
            raise CheckpointError(f"norm epsilon is {self.norm_epsilon}; expected a value between 0 and 1.")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} KV heads."
            )
        if self.rope.rotary_dim % 2 or not 0 < self.rope.rotary_dim <= self.head_dim:
            raise CheckpointError(
                f"rotary dimension {self.rope.rotary_dim} must be even and at most head_dim {self.head_dim}."
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def window_groups(self) -> tuple[int, ...]:
        """The distinct windows, full attention (0) first. Layers of one group share a block table."""
        return tuple(sorted(set(self.layer_windows))) or (0,)

    def group_of(self, layer: int) -> int:
        """Index into `window_groups`."""
        return self.window_groups.index(self.layer_windows[layer]) if self.layer_windows else 0

    @property
    def row(self) -> Architecture:
        return architecture_by_name(self.architecture)

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(role, shape) of every tensor that a checkpoint of this model holds, in graph order.

        Roles end in ".weight" or ".bias"; linear weights are [out, in]. A tied head is not listed.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        yield "embedding.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            yield at + "attention.norm.weight", (hidden,)
            yield from _linear(at + "attention.q", self.query_size, hidden, self.attention_bias)
            yield from _linear(at + "attention.k", self.kv_size, hidden, self.attention_bias)
            yield from _linear(at + "attention.v", self.kv_size, hidden, self.attention_bias)
            yield from _linear(at + "attention.o", hidden, self.query_size, self.attention_bias)
            yield at + "mlp.norm.weight", (hidden,)
            yield from _linear(at + "mlp.gate", inner, hidden, self.mlp_bias)
            yield from _linear(at + "mlp.up", inner, hidden, self.mlp_bias)
            yield from _linear(at + "mlp.down", hidden, inner, self.mlp_bias)
        yield "final_norm.weight", (hidden,)
        if not self.tie_embeddings:
            yield "head.weight", (self.vocab_size, hidden)


def _linear(role: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield role + ".weight", (out_size, in_size)
    if bias:
        yield role + ".bias", (out_size,)


def source_name(role: str, names: Mapping[str, str]) -> str:
    """Name of `role` in a checkpoint whose naming table is `names` (a row's, or GGUF_NAMES)."""
    stem, _, kind = role.rpartition(".")
    layer = ""
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
    return f"{names[stem].format(layer=layer)}.{kind}"


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Read a Hugging Face config.json (already parsed).

    Raises:
        UnsupportedError: an architecture, activation or rope type that is not known.
        CheckpointError: a value is missing or makes no sense.
    """
    row = architecture_of_hf(config.get("architectures"))
    where = "config.json"

    def number(key: str, default: int | None = None) -> int:
        if config.get(key) is None and default is not None:
            return default
        return int(require(config, key, int, where, CheckpointError))

    activation = require(config, "hidden_act", str, where, CheckpointError)
    if activation not in row.activations:
        known = ", ".join(row.activations)
        raise UnsupportedError(f"{where}: hidden_act is {activation!r}; known for {row.name}: {known}.")
    heads = number("num_attention_heads")
    hidden = number("hidden_size")
    head_dim = number("head_dim", hidden // max(heads, 1))
    return ModelSpec(
        architecture=row.name,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=head_dim,
        max_context=number("max_position_embeddings"),
        norm_epsilon=require(config, "rms_norm_eps", (int, float), where, CheckpointError),
        rope=rope_from_config(config, head_dim),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        layer_windows=_layer_windows(config, number("num_hidden_layers")) if row.windows else (),
    )


def _layer_windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """`sliding_window` for the layers that `layer_types` names, or for all; () where nothing is limited."""
    window = config.get("sliding_window")
    if window is None:
        return ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(f"config.json: 'sliding_window' is {window!r}; expected a number of tokens.")
    kinds = config.get("layer_types") or ["sliding_attention"] * num_layers
    sizes = {"sliding_attention": window, "full_attention": 0}
    unknown = [kind for kind in kinds if kind not in sizes]
    if unknown:
        raise UnsupportedError(
            f"config.json: layer type {unknown[0]!r} is not known; known: {', '.join(sizes)}."
        )
    windows = tuple(sizes[kind] for kind in kinds)
    return windows if any(windows) else ()
