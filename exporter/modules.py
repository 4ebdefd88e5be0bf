"""The modules of a model as its graph has them: which matrices stand as one, and what else layers have.

Linear layers that read the same input are one module (q, k and v; gate and up), so that the graph runs one
wide layer instead of three narrow ones.
"""

from collections.abc import Iterator

from pagelet.models.spec import ModelSpec
from pagelet.models.weight_shapes import weight_shapes


def layer_units(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, roles stacked along its outputs) of a layer's linear layers, in graph order.

    All experts of a layer stand in one matrix, one after another.
    """
    at = f"layers.{layer}."
    own = "q" if spec.layers[layer].shares_cache else "qkv"
    yield at + "attention.qkv", tuple(at + "attention." + part for part in own)
    yield at + "attention.o", (at + "attention.o",)
    if spec.layers[layer].experts and spec.experts:
        expert = [f"{at}mlp.experts.{number}." for number in range(spec.experts.count)]
        yield at + "mlp.router", (at + "mlp.router",)
        yield at + "mlp.experts.gate_up", tuple(one + part for one in expert for part in ("gate", "up"))
        yield at + "mlp.experts.down", tuple(one + "down" for one in expert)
    else:
        if spec.mlp.gated:
            yield at + "mlp.gate_up", (at + "mlp.gate", at + "mlp.up")
        else:
            yield at + "mlp.up", (at + "mlp.up",)
        yield at + "mlp.down", (at + "mlp.down",)
    if spec.layer_inputs:
        yield at + "inputs.gate", (at + "inputs.gate",)
        yield at + "inputs.projection", (at + "inputs.projection",)


def layer_input_units(spec: ModelSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Those that make the layers' own inputs."""
    if spec.layer_inputs:
        yield "layer_inputs.table", ("layer_inputs.table",)
        yield "layer_inputs.projection", ("layer_inputs.projection",)


def is_routed(module: str) -> bool:
    """Whether a router decides which tokens it sees, or it is the router."""
    return ".mlp.experts." in module or module.endswith("mlp.router")


def linear_units(spec: ModelSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Those of the whole model.

    The embedding table counts as one: tied to the head, it is the head's weight.
    """
    yield "embedding", ("embedding",)
    yield from layer_input_units(spec)
    for layer in range(spec.num_layers):
        yield from layer_units(spec, layer)
    if not spec.tie_embeddings:
        yield "head", ("head",)


def layer_vectors(spec: ModelSpec, layer: int) -> Iterator[str]:
    """Roles of all that a layer has beside its linear layers' weights and biases, with their endings."""
    linear = {role for _, roles in layer_units(spec, layer) for role in roles}
    for role, _ in weight_shapes(spec):
        if (
            role.startswith(f"layers.{layer}.")
            and role.rpartition(".")[0] not in linear
            and not role.endswith(("alpha_p.values", "alpha_n.values"))
        ):
            yield role


def norm_vectors(spec: ModelSpec, norm: str) -> Iterator[str]:
    """Roles of what a norm of the residual stream has, with their endings."""
    if spec.norm.weight:
        yield norm + ".weight"
    if spec.norm.bias:
        yield norm + ".bias"
