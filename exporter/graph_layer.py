"""One layer of the graph: attention and MLP, with the norms where the family has them."""

import onnx_ir as ir

from pagelet.exporter.graph_attention import CacheFormat, Step, add_attention
from pagelet.exporter.graph_builder import DOMAIN, GraphBuilder, format_of, path
from pagelet.models.spec import ModelSpec
from pagelet.plugins.activations import Activation

# What the linear layers of a layer read or give, float32 [T, width]: the inputs of qkv and of the MLP (before
# their norm, where that is part of the linear layer), qkv itself, what o and down read, and what the two read
# that take in the layer's own input.
TAPS = ("attention_in", "qkv", "attended", "mlp_in", "gated", "inputs_in", "inputs_gated")


def add_layer(
    build: GraphBuilder,
    spec: ModelSpec,
    residual: ir.Value,
    step: Step,
    layer: int,
    cache: CacheFormat,
    own_input: ir.Value | None = None,
) -> dict[str, ir.Value]:
    """The values of TAPS, and "residual": the stream [T, hidden] behind the layer.

    `own_input`: [T, layer_inputs] of models whose layers have inputs of their own.
    """
    at, norms = f"layers.{layer}.", spec.norms(layer)
    first, second = at + "attention.norm", at + "mlp.norm"
    x, norm = _normed(build, spec, residual, first if first in norms else "")
    qkv = build.linear(x, at + "attention.qkv", norm=norm)
    attended = add_attention(build, spec, qkv, step, layer, cache)
    middle = _add(build, spec, attended, at + "attention.o", residual)
    if second in norms:
        y, norm = _normed(build, spec, residual if spec.block == "parallel_norms" else middle, second)
    elif spec.block == "parallel":
        y = x
    else:
        y, norm = middle, ""
    if spec.layers[layer].experts:
        values = {"gated": y, "residual": _experts(build, spec, y, norm, middle, layer)}
    else:
        gated = _activated(build, spec, y, norm, layer)
        values = {"gated": gated, "residual": _add(build, spec, gated, at + "mlp.down", middle)}
    if own_input is not None:
        values |= _take_in(build, spec, values["residual"], own_input, layer)
    if spec.layer_scales:
        scale = build.vector(at + "scale.values")
        values["residual"] = build.op("Mul", [values["residual"], scale], name=path(at + "scaled"))
    return {"attention_in": x, "qkv": qkv, "attended": attended, "mlp_in": y, **values}


def tap_widths(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Of TAPS."""
    inner = spec.hidden_size if spec.layers[layer].experts else spec.layers[layer].intermediate_size
    return {
        "attention_in": spec.hidden_size,
        "qkv": spec.query_size(layer) + 2 * spec.kv_size(layer),
        "attended": spec.query_size(layer),
        "mlp_in": spec.hidden_size,
        "gated": inner,
        **({"inputs_in": spec.hidden_size, "inputs_gated": spec.layer_inputs} if spec.layer_inputs else {}),
    }


def fused_norm(spec: ModelSpec, layer: int, module: str) -> str:
    """The norm that is part of a linear layer, "attention.qkv" say, which reads the tap before it; or ""."""
    if spec.norm.type != "rms" or module in ("attention.o", "mlp.down"):
        return ""
    name = "attention.norm" if module == "attention.qkv" or spec.block == "parallel" else "mlp.norm"
    role = f"layers.{layer}.{name}"
    return role if role in spec.norms(layer) else ""


def _normed(build: GraphBuilder, spec: ModelSpec, x: ir.Value, role: str) -> tuple[ir.Value, str]:
    """(what a linear layer reads, the norm that it does itself)."""
    if not role or spec.norm.type == "rms":
        return x, role
    return build.norm(x, role), ""


def _add(build: GraphBuilder, spec: ModelSpec, x: ir.Value, module: str, residual: ir.Value) -> ir.Value:
    """residual + what the module gives, normed before it is added where the family does."""
    post = module.rpartition(".")[0] + ".post_norm"
    scaled: dict[str, object] = {"output_scale": spec.residual_scale} if spec.residual_scale != 1.0 else {}
    if spec.block not in ("post", "sandwich"):
        return build.linear(x, module, residual=residual, more=scaled)
    given = build.norm(build.linear(x, module, path(module) + "/given", more=scaled), post)
    return build.op("Add", [residual, given], name=path(module))


def _activated(build: GraphBuilder, spec: ModelSpec, x: ir.Value, norm: str, layer: int) -> ir.Value:
    module = f"layers.{layer}.mlp." + ("gate_up" if spec.mlp.gated else "up")
    plain = spec.mlp.gated and spec.mlp.activation == "silu"  # what gating means where nothing is said
    attributes = {} if plain else _activation(build, spec, module)
    return build.linear(x, module, norm=norm, more=attributes)


def _activation(build: GraphBuilder, spec: ModelSpec, module: str) -> dict[str, str | float]:
    parameters = build.weights.linears[module].activation_parameters or spec.mlp.activation_parameters
    return Activation(spec.mlp.activation, parameters).attributes()


def _take_in(
    build: GraphBuilder, spec: ModelSpec, x: ir.Value, own_input: ir.Value, layer: int
) -> dict[str, ir.Value]:
    """x + norm(W₂ · (act(W₁ · x) · own_input)): Gemma 3n's per-layer embeddings."""
    at = f"layers.{layer}.inputs."
    activation = Activation(spec.mlp.activation).attributes()
    gate = build.linear(x, at + "gate", more=activation)
    gated = build.op("Mul", [gate, own_input], name=path(at + "gated"))
    return {"inputs_in": x, "inputs_gated": gated, "residual": _add(build, spec, gated, at + "projection", x)}


def _experts(
    build: GraphBuilder, spec: ModelSpec, x: ir.Value, norm: str, residual: ir.Value, layer: int
) -> ir.Value:
    """The router's logits choose each token's experts inside the op."""
    at, experts = f"layers.{layer}.mlp.", spec.experts
    assert experts is not None
    router = build.linear(x, at + "router", norm=norm)
    gate_up, down = (build.weights.linears[f"{at}experts.{name}"] for name in ("gate_up", "down"))
    biases = [build.stored(one.bias) if one.bias else None for one in (gate_up, down)]
    inputs = [
        x, router, build.stored(gate_up.weight), build.stored(down.weight), *biases,
        build.norm_weight(norm) if norm else None, residual,
    ]  # fmt: skip
    formats = {
        f"{prefix}{key}": value
        for prefix, linear in (("gate_up_", gate_up), ("down_", down))
        for key, value in format_of(linear).items()
        if not key.endswith("_features")
    }
    return build.op(
        "Experts",
        inputs,
        name=path(at + "down"),
        domain=DOMAIN,
        num_experts=experts.count,
        top_k=experts.per_token,
        routing=experts.routing,
        normalize=int(experts.normalize),
        in_features=spec.hidden_size,
        intermediate=experts.intermediate_size,
        epsilon=spec.norm.epsilon,
        output_scale=spec.residual_scale,
        **_activation(build, spec, at + "experts.gate_up"),
        **formats,
    )
