"""The activation functions of `plugins.activations`, spelled in ONNX's own ops."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from pagelet.exporter.graph_builder import GraphBuilder


def add_activation(
    build: GraphBuilder,
    function: str,
    parameters: Sequence[float],
    x: ir.Value,
    up: ir.Value | None,
    name: str,
) -> ir.Value:
    """function(x), times `up` if there is one; float32 like x."""
    if function == "swiglu_oai":
        assert up is not None
        return _swiglu_oai(_Ops(build, name), x, up, parameters[0])
    ops = _Ops(build, name)
    y = _FUNCTIONS[function](ops, x, *parameters)
    return y if up is None else ops("Mul", y, up)


class _Ops:
    """Nodes below one name, numbered by what they do."""

    def __init__(self, build: GraphBuilder, name: str) -> None:
        self._build = build
        self._name = f"{name}/act"
        self._count = 0

    def __call__(self, op_type: str, *inputs: ir.Value | float, **attributes: str) -> ir.Value:
        self._count += 1
        name = f"{self._name}/{op_type.lower()}_{self._count}"
        values = [self._build.constant(f"number.{x!r}", x) if isinstance(x, float) else x for x in inputs]
        return self._build.op(op_type, values, name=name, domain="", **attributes)


def _swiglu_oai(ops: _Ops, gate: ir.Value, up: ir.Value, limit: float) -> ir.Value:
    bounded = ops("Min", gate, limit)
    other = ops("Add", ops("Max", ops("Min", up, limit), -limit), 1.0)
    return ops("Mul", ops("Mul", other, bounded), ops("Sigmoid", ops("Mul", bounded, 1.702)))


def _softcap(ops: _Ops, x: ir.Value, cap: float) -> ir.Value:
    return ops("Mul", ops("Tanh", ops("Mul", x, 1.0 / cap)), cap)


def _relu2(ops: _Ops, x: ir.Value) -> ir.Value:
    positive = ops("Relu", x)
    return ops("Mul", positive, positive)


def _xielu(ops: _Ops, x: ir.Value, alpha_p: float, alpha_n: float, beta: float, eps: float) -> ir.Value:
    scaled = ops("Mul", x, beta)
    positive = ops("Add", ops("Mul", ops("Mul", x, x), alpha_p), scaled)
    grown = ops("Add", ops("Exp", ops("Min", x, eps)), -1.0)
    negative = ops("Add", ops("Mul", ops("Sub", grown, x), alpha_n + beta), scaled)
    return ops("Where", ops("Greater", x, 0.0), positive, negative)


_FUNCTIONS: dict[str, Callable[..., ir.Value]] = {
    "none": lambda ops, x: x,
    "silu": lambda ops, x: ops("Mul", x, ops("Sigmoid", x)),
    "gelu": lambda ops, x: ops("Gelu", x),
    "gelu_tanh": lambda ops, x: ops("Gelu", x, approximate="tanh"),
    "relu": lambda ops, x: ops("Relu", x),
    "relu2": _relu2,
    "softcap": _softcap,
    "xielu": _xielu,
}
