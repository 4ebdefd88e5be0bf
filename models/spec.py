"""ModelSpec: everything about a model that the graph and the runtime depend on, frozen."""

from dataclasses import dataclass
from functools import cached_property

from pagelet.models.architectures import Architecture, architecture_by_name
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.rope import RopeSpec

# Far above any real model; a damaged or hostile config must not size an allocation.
LIMITS = {
    "vocab_size": 4_000_000,
    "hidden_size": 131_072,
    "intermediate_size": 1_048_576,
    "num_layers": 1_024,
    "num_heads": 1_024,
    "num_kv_heads": 1_024,
    "head_dim": 512,  # of the attention op
    "max_context": 16_777_216,
    "num_experts": 1_024,
    "layer_inputs": 8_192,
}
BLOCKS = ("pre", "post", "sandwich", "parallel", "parallel_norms")
NORM_TYPES = ("rms", "layer")


@dataclass(frozen=True)
class NormSpec:
    """The norms of a model.

    Attributes:
        type: "rms" (Zhang and Sennrich, 2019) or "layer" (Ba et al., 2016: the mean is taken away first).
        weight: they have one; else it is 1.
        bias: they have one; only of "layer".
    """

    epsilon: float
    type: str = "rms"
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention of all layers has in common.

    Attributes:
        scale: of the scores.
        bias, output_bias: q, k and v have one; o has one.
        softcap: scores become softcap · tanh(score / softcap); 0: they stay.
        norm: of queries and keys: "" none, "head" each head for itself, "row" all heads as one.
        norm_after_rotation: they are rotated first.
        norm_weight: that norm has a weight; else it is 1.
        norm_values: values are normed too, head by head, without a weight.
        sinks: each head has a logit without a value (Xiao et al., 2023).
        rotary_interleaved: neighbours are rotated in pairs.
        temperature: beyond `temperature_context` tokens a query at position p is scaled by
            1 + temperature · ln(1 + floor(p / temperature_context)) (Llama 4's model card); 0: by 1.
    """

    num_heads: int
    scale: float
    bias: bool = False
    output_bias: bool = False
    softcap: float = 0.0
    norm: str = ""
    norm_after_rotation: bool = False
    norm_weight: bool = True
    norm_values: bool = False
    sinks: bool = False
    rotary_interleaved: bool = False
    temperature: float = 0.0
    temperature_context: int = 0


@dataclass(frozen=True)
class MlpSpec:
    """act(gate) · up, or act(up) where nothing is gated.

    `activation` is a name of `plugins.activations`; its parameters are here unless each layer has its own.
    """

    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    activation_parameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in the place of an MLP (Shazeer et al., 2017).

    Attributes:
        count, per_token: how many there are, and how many a token goes through.
        routing: "softmax_topk" (over all logits, then the largest) or "topk_softmax" (over the largest).
        normalize: the weights of the chosen ones are made to sum to one.
        router_bias: the router has one.
    """

    count: int
    per_token: int
    intermediate_size: int
    routing: str = "softmax_topk"
    normalize: bool = True
    router_bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer.

    Attributes:
        window: tokens that a row attends to, itself included; 0: all.
        rope: which of the model's rotations; -1: none.
        cache_of: the earlier layer whose keys and values it reads, having none of its own; -1: none.
        experts: a mixture of experts stands in the place of the MLP.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    window: int = 0
    rope: int = 0
    experts: bool = False
    cache_of: int = -1

    @property
    def shares_cache(self) -> bool:
        return self.cache_of >= 0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are elements; `max_context` is tokens.

    Attributes:
        block: where the norms of a layer stand: "pre" before attention and MLP, "post" behind them,
            "sandwich" both; "parallel" one norm before both, which run side by side; "parallel_norms" the
            same with a norm each.
        embedding_scale, residual_scale: factors of the table's rows, and of what a layer adds.
        embedding_norm: the table's rows are normed, without a weight.
        logits_scale, logits_softcap: the logits are scaled, then capped as scores are (0: not).
        position_table: positions have vectors of their own, added to the table's rows.
        layer_inputs: elements of the vector that each token has for each layer (Gemma 3n's model card), from
            a table of its own and from the token's row; 0: none.
        layer_scales: what a layer gives is scaled as a whole, by a number of its own.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_context: int
    norm: NormSpec
    attention: AttentionSpec
    mlp: MlpSpec
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    tie_embeddings: bool
    block: str = "pre"
    experts: ExpertsSpec | None = None
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    position_table: bool = False
    layer_inputs: int = 0
    layer_scales: bool = False

    def __post_init__(self) -> None:
        check_limits(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_context=self.max_context,
            num_layers=len(self.layers),
            num_heads=self.attention.num_heads,
        )
        for index, layer in enumerate(self.layers):
            self._check_layer(layer)
            self._check_sharing(index, layer)
        shapes = {(layer.window, layer.num_kv_heads, layer.head_dim) for layer in self.layers}
        if len(shapes) != len({layer.window for layer in self.layers}):
            raise CheckpointError("layers with the same window have keys of different sizes.")
        if not 0 < self.norm.epsilon < 1:
            raise CheckpointError(f"norm epsilon is {self.norm.epsilon}; expected a value between 0 and 1.")
        _check_name("block", self.block, BLOCKS)
        _check_name("norm type", self.norm.type, NORM_TYPES)
        _check_name("attention norm", self.attention.norm, ("", "head", "row"))
        if self.layer_inputs:
            check_limits(layer_inputs=self.layer_inputs)
        if any(layer.experts for layer in self.layers):
            self._check_experts()

    def _check_layer(self, layer: LayerSpec) -> None:
        check_limits(
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            intermediate_size=layer.intermediate_size,
        )
        if layer.head_dim % 8:
            raise UnsupportedError(
                f"heads have {layer.head_dim} elements; the attention op takes multiples of 8 up to 512."
            )
        if not 0 <= layer.window <= LIMITS["max_context"]:
            raise CheckpointError(f"a layer's window is out of range: {layer.window}.")
        if not -1 <= layer.rope < len(self.ropes):
            raise CheckpointError(f"a layer asks for rotation {layer.rope} of {len(self.ropes)}.")
        if self.attention.num_heads % layer.num_kv_heads:
            raise CheckpointError(
                f"{self.attention.num_heads} attention heads do not divide into {layer.num_kv_heads} "
                "KV heads."
            )
        rotary_dim = self.ropes[layer.rope].rotary_dim if layer.rope >= 0 else 2
        if rotary_dim % 2 or not 0 < rotary_dim <= layer.head_dim:
            raise CheckpointError(
                f"rotary dimension {rotary_dim} must be even and at most head_dim {layer.head_dim}."
            )

    def _check_sharing(self, index: int, layer: LayerSpec) -> None:
        if not layer.shares_cache:
            return
        owner = self.layers[layer.cache_of] if layer.cache_of < index else layer
        if owner.shares_cache or (owner.window, owner.head_dim) != (layer.window, layer.head_dim):
            raise CheckpointError(f"layer {index} cannot read the keys of layer {layer.cache_of}.")
        if owner.num_kv_heads != layer.num_kv_heads:
            raise CheckpointError(f"layer {index} has other KV heads than layer {layer.cache_of}.")

    def _check_experts(self) -> None:
        experts = self.experts
        if experts is None:
            raise CheckpointError("layers have experts, but nothing says how many.")
        check_limits(num_experts=experts.count, intermediate_size=experts.intermediate_size)
        if not 1 <= experts.per_token <= experts.count:
            raise CheckpointError(f"{experts.per_token} of {experts.count} experts per token makes no sense.")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def cache_owners(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        return tuple(index for index, layer in enumerate(self.layers) if not layer.shares_cache)

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    def query_size(self, layer: int) -> int:
        """Elements of a token's queries."""
        return self.num_heads * self.layers[layer].head_dim

    def kv_size(self, layer: int) -> int:
        """Elements of a token's keys, and of its values."""
        return self.layers[layer].num_kv_heads * self.layers[layer].head_dim

    @cached_property
    def window_groups(self) -> tuple[int, ...]:
        """The distinct windows, full attention (0) first. Layers of one group share a block table."""
        return tuple(sorted({layer.window for layer in self.layers}))

    def group_of(self, layer: int) -> int:
        """Index into `window_groups`."""
        return self.window_groups.index(self.layers[layer].window)

    @property
    def row(self) -> Architecture:
        return architecture_by_name(self.architecture)

    def norms(self, layer: int) -> tuple[str, ...]:
        """Roles of a layer's norms of the residual stream, in the graph's order."""
        names = {
            "pre": ("attention.norm", "mlp.norm"),
            "post": ("attention.post_norm", "mlp.post_norm"),
            "sandwich": ("attention.norm", "attention.post_norm", "mlp.norm", "mlp.post_norm"),
            "parallel": ("attention.norm",),
            "parallel_norms": ("attention.norm", "mlp.norm"),
        }
        return tuple(f"layers.{layer}.{name}" for name in names[self.block])


def read_share(spec: ModelSpec, tokens: int) -> float:
    """Of all experts, those that so many tokens go through at most."""
    experts = spec.experts
    return min(tokens * experts.per_token / experts.count, 1.0) if experts else 1.0


def check_limits(**sizes: int) -> None:
    """Sizes by their names in LIMITS.

    Raises:
        CheckpointError: one is not positive, or far above any real model's.
    """
    for name, value in sizes.items():
        if not 1 <= value <= LIMITS[name]:
            raise CheckpointError(f"{name} is {value}; expected 1 to {LIMITS[name]}. Is the config damaged?")


def _check_name(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise CheckpointError(f"{what} is {value!r}; known: {', '.join(map(repr, known))}.")
