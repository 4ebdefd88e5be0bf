"""Every tensor that a checkpoint of a model holds: roles, shapes, and the names they have there."""

from collections.abc import Iterator
from dataclasses import dataclass

from pagelet.models.names import Names, Part
from pagelet.models.spec import ModelSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def weight_shapes(spec: ModelSpec) -> Shapes:
    """(role, shape) in graph order. Linear weights are [out, in]; roles end in .weight, .bias or .values.

    A tied head is not listed.
    """
    hidden = spec.hidden_size
    yield "embedding.weight", (spec.vocab_size, hidden)
    if spec.position_table:
        yield "positions.weight", (spec.max_context, hidden)
    yield from _layer_inputs(spec)
    for layer in range(spec.num_layers):
        for norm in spec.norms(layer):
            yield from _norm(spec, norm)
        yield from _attention(spec, layer)
        yield from _experts(spec, layer) if spec.layers[layer].experts else _mlp(spec, layer)
        yield from _layer_input(spec, layer)
        if spec.layer_scales:
            yield f"layers.{layer}.scale.values", (1,)
    yield from _norm(spec, "final_norm")
    if not spec.tie_embeddings:
        yield "head.weight", (spec.vocab_size, hidden)


def _attention(spec: ModelSpec, layer: int) -> Shapes:
    at, attention = f"layers.{layer}.attention.", spec.attention
    queries, keys = spec.query_size(layer), spec.kv_size(layer)
    own = not spec.layers[layer].shares_cache
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        if own or name == "q":
            yield from _linear(at + name, size, spec.hidden_size, attention.bias)
    yield from _linear(at + "o", spec.hidden_size, queries, attention.output_bias)
    if attention.norm and attention.norm_weight:
        whole = attention.norm == "row"
        for name, size in (("q_norm", queries), ("k_norm", keys)):
            if own or name == "q_norm":
                yield f"{at}{name}.weight", (size if whole else spec.layers[layer].head_dim,)
    if attention.sinks:
        yield at + "sinks.values", (attention.num_heads,)


def _layer_inputs(spec: ModelSpec) -> Shapes:
    """What makes the vectors that each token has for each layer; those of all layers stand side by side."""
    if not spec.layer_inputs:
        return
    together = spec.num_layers * spec.layer_inputs
    yield "layer_inputs.table.weight", (spec.vocab_size, together)
    yield "layer_inputs.projection.weight", (together, spec.hidden_size)
    yield "layer_inputs.norm.weight", (spec.layer_inputs,)


def _layer_input(spec: ModelSpec, layer: int) -> Shapes:
    """What a layer does with its own."""
    if not spec.layer_inputs:
        return
    at = f"layers.{layer}.inputs."
    yield at + "gate.weight", (spec.layer_inputs, spec.hidden_size)
    yield at + "projection.weight", (spec.hidden_size, spec.layer_inputs)
    yield at + "post_norm.weight", (spec.hidden_size,)


def _mlp(spec: ModelSpec, layer: int) -> Shapes:
    at, inner, bias = f"layers.{layer}.mlp.", spec.layers[layer].intermediate_size, spec.mlp.bias
    for name in ("gate", "up") if spec.mlp.gated else ("up",):
        yield from _linear(at + name, inner, spec.hidden_size, bias)
    yield from _linear(at + "down", spec.hidden_size, inner, bias)
    if spec.mlp.activation == "xielu":
        yield at + "alpha_p.values", (1,)
        yield at + "alpha_n.values", (1,)


def _experts(spec: ModelSpec, layer: int) -> Shapes:
    assert spec.experts is not None
    at, inner, bias = f"layers.{layer}.mlp.", spec.experts.intermediate_size, spec.mlp.bias
    yield from _linear(at + "router", spec.experts.count, spec.hidden_size, spec.experts.router_bias)
    for expert in range(spec.experts.count):
        for name in ("gate", "up"):
            yield from _linear(f"{at}experts.{expert}.{name}", inner, spec.hidden_size, bias)
        yield from _linear(f"{at}experts.{expert}.down", spec.hidden_size, inner, bias)


def _norm(spec: ModelSpec, role: str) -> Shapes:
    if spec.norm.weight:
        yield role + ".weight", (spec.hidden_size,)
    if spec.norm.bias:
        yield role + ".bias", (spec.hidden_size,)


def _linear(role: str, out_size: int, in_size: int, bias: bool) -> Shapes:
    yield role + ".weight", (out_size, in_size)
    if bias:
        yield role + ".bias", (out_size,)


@dataclass(frozen=True)
class Role:
    """A role's name in its parts: "layers.3.mlp.experts.7.gate.weight".

    Attributes:
        stem: as the naming tables have it: "mlp.experts.gate".
        kind: "weight", "bias", or "values" (a tensor without such an ending).
        layer, expert: -1 where there is none.
    """

    stem: str
    kind: str
    layer: int = -1
    expert: int = -1

    @classmethod
    def parse(cls, name: str) -> "Role":
        stem, _, kind = name.rpartition(".")
        layer = expert = -1
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            layer = int(number)
        if stem.startswith("mlp.experts."):
            _, _, number, last = stem.split(".")
            stem, expert = f"mlp.experts.{last}", int(number)
        return cls(stem, kind, layer, expert)

    def sibling(self, stem: str) -> str:
        """The name of another role of the same layer, expert and kind."""
        if self.expert >= 0:
            stem = stem.replace("experts.", f"experts.{self.expert}.")
        at = f"layers.{self.layer}." if self.layer >= 0 else ""
        return f"{at}{stem}.{self.kind}"

    def tensor_name(self, source: str | Part) -> str:
        """In a checkpoint that calls the stem so."""
        name = source.name if isinstance(source, Part) else source
        name = name.format(layer=self.layer, expert=self.expert)
        if isinstance(source, Part) and source.suffix:
            return name if self.kind == "weight" else f"{name}_{self.kind}"
        return name if self.kind == "values" else f"{name}.{self.kind}"


def source_name(role: str, names: Names) -> str:
    """Name of `role` in a checkpoint whose naming table is `names` (a row's, or GGUF_NAMES)."""
    parsed = Role.parse(role)
    return parsed.tensor_name(names[parsed.stem])
