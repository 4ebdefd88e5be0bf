"""The graph of target `cuda` on a machine without CUDA: its attention nodes become those of the CPU's op.

ONNX Runtime has no CPU kernel of com.microsoft's PagedAttention, but one of everything else in the graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

INPUTS = (
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens",
    "block_table", "cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight",
    "k_scale", "v_scale", "attention_metadata",
)  # fmt: skip
_ATTRIBUTES = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "rotary_interleaved")
_LARGEST = {TensorProto.INT8: 127.0, TensorProto.FLOAT8E4M3FN: 448.0}


def attention_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "PagedAttention"]


def on_cpu(model: onnx.ModelProto, activations: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    """A copy whose attention runs here, with the very contract of the op that it stands for.

    `position_ids` becomes an input if it was none. Where a cache is quantized, the layer's new keys and
    values go into it before any row reads them, as on the device. `activations` may be float32, which the
    device's op does not take.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = list(copy.graph.node)
    del copy.graph.node[:]
    for node in nodes:
        if node.op_type == "PagedAttention":
            copy.graph.node.extend(_Attention(copy, node, nodes, activations).nodes())
        else:
            copy.graph.node.append(node)
    if "position_ids" not in {value.name for value in copy.graph.input}:
        positions = helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["T"])
        copy.graph.input.append(positions)
    copy.graph.initializer.append(numpy_helper.from_array(np.empty((0, 0), np.int32), "no_trees"))
    copy.opset_import.append(helper.make_opsetid("pagelet", 1))
    return copy


@dataclass
class _Attention:
    """One node, spelled anew."""

    model: onnx.ModelProto
    node: onnx.NodeProto
    nodes_before: list[onnx.NodeProto]
    activations: int
    made: list[onnx.NodeProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = zip(INPUTS, self.node.input, strict=False)
        self.inputs = {name: value for name, value in pairs if value}
        self.attributes = {each.name: helper.get_attribute_value(each) for each in self.node.attribute}

    def nodes(self) -> list[onnx.NodeProto]:
        caches = [self.inputs["key_cache"], self.inputs["value_cache"]]
        attended, *written = self.node.output
        if not written:  # slot_mapping says that nothing is
            self.attend(
                [self.full("query"), "", ""], self.full_caches(caches), [f"{attended}/f32"], reads=True
            )
        elif "k_scale" in self.inputs:
            self.attend_quantized(caches, written, f"{attended}/f32")
        else:
            self.attend(self.rows(), caches, [f"{attended}/f32", *written])
        self.op("Cast", [f"{attended}/f32"], attended, to=self.activations)
        return self.made

    def rows(self) -> list[str]:
        return [self.full(name) if name in self.inputs else "" for name in ("query", "key", "value")]

    def attend_quantized(self, caches: list[str], written: list[str], output: str) -> None:
        """Once to write, then, as a reader of what the quantized caches kept, once to attend."""
        rows = self.rows()
        held = self.full_caches(caches)
        fresh = [f"{name}/fresh" for name in written]
        self.attend(rows, held, [f"{output}/early", *fresh])
        for name, target, scale in zip(fresh, written, ("k_scale", "v_scale"), strict=True):
            self.quantize(name, target, self.inputs[scale])
        query = rows[0]
        if not rows[1]:
            sizes = [int(self.attributes["num_heads"]), *[int(self.attributes["kv_num_heads"])] * 2]
            split = self.constant("sizes", np.asarray(sizes, np.int64) * self.head_dim())
            query = self.name("q")
            outputs = [query, self.name("k"), self.name("v")]
            self.made.append(helper.make_node("Split", [rows[0], split], outputs, axis=-1))
        self.attend([query, "", ""], self.full_caches(written), [output], reads=True)

    def attend(self, rows: list[str], caches: list[str], outputs: list[str], reads: bool = False) -> None:
        optional = {
            name: self.full(name)
            for name in ("cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight", "head_sink")
            if name in self.inputs and not (reads and name == "k_norm_weight")
        }
        if not self.attributes["do_rotary"]:
            optional = {
                name: value for name, value in optional.items() if name not in ("cos_cache", "sin_cache")
            }
        inputs = [
            *rows, *caches, *(self.inputs[name] for name in INPUTS[5:8]), optional.get("cos_cache", ""),
            optional.get("sin_cache", ""), "", "", "position_ids", "no_trees",
            *(optional.get(name, "") for name in ("q_norm_weight", "k_norm_weight", "head_sink")),
        ]  # fmt: skip
        while not inputs[-1]:
            inputs.pop()
        attributes = {name: self.attributes[name] for name in _ATTRIBUTES if name in self.attributes}
        if "qk_norm_epsilon" in self.attributes:
            attributes["norm_epsilon"] = self.attributes["qk_norm_epsilon"]
        if self.attributes["do_rotary"]:
            attributes["rotary_dim"] = 2 * self.table_width()
        self.made.append(
            helper.make_node(
                "PagedAttention", inputs, outputs, self.name("cpu"), domain="pagelet", **attributes
            )
        )

    def head_dim(self) -> int:
        cache = next(value for value in self.model.graph.input if value.name == self.inputs["key_cache"])
        return cache.type.tensor_type.shape.dim[3].dim_value

    def table_width(self) -> int:
        """Columns of the cosines, a table of the weights' file or what it was cast to."""
        name = self.inputs["cos_cache"]
        casts = {node.output[0]: node.input[0] for node in self.nodes_before if node.op_type == "Cast"}
        tables = {each.name: each.dims for each in self.model.graph.initializer}
        return tables[casts.get(name, name)][1]

    def full(self, name: str) -> str:
        return self.op("Cast", [self.inputs[name]], self.name(f"{name}/f32"), to=TensorProto.FLOAT)

    def full_caches(self, caches: Sequence[str]) -> list[str]:
        """As float32 numbers where they are quantized; in the caches' own type otherwise."""
        if "k_scale" not in self.inputs:
            return list(caches)
        found = []
        for name, scale in zip(caches, ("k_scale", "v_scale"), strict=True):
            codes = self.op("Cast", [name], self.name(f"{name}/codes"), to=TensorProto.FLOAT)
            found.append(self.op("Mul", [codes, self.inputs[scale]], self.name(f"{name}/held")))
        return found

    def quantize(self, name: str, target: str, scale: str) -> None:
        """clamp(round(x / scale)) to INT8, or x / scale to FP8, as paged_attention_impl.cu has it."""
        element = next(value for value in self.model.graph.output if value.name == target)
        kind = element.type.tensor_type.elem_type
        scaled = self.op("Div", [name, scale], self.name(f"{target}/scaled"))
        if kind == TensorProto.INT8:
            scaled = self.op("Round", [scaled], self.name(f"{target}/rounded"))
        bounds = [
            self.constant(end, np.float32(sign * _LARGEST[kind])) for end, sign in (("low", -1), ("high", 1))
        ]
        clipped = self.op("Clip", [scaled, *bounds], self.name(f"{target}/clipped"))
        self.op("Cast", [clipped], target, to=kind)

    def constant(self, name: str, values: Any) -> str:
        name = self.name(f"{name}/{len(self.made)}")
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def name(self, suffix: str) -> str:
        return f"{self.node.name}/{suffix}/{len(self.made)}"

    def op(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.made.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output


@dataclass(frozen=True)
class Ragged:
    """A step: how many tokens of each sequence the cache holds, and the new ones."""

    pasts: tuple[int, ...]
    texts: tuple[Sequence[int], ...]
    tables: NDArray[np.int32]

    def feeds(self, groups: int) -> dict[str, NDArray[Any]]:
        lengths = [len(text) for text in self.texts]
        positions = [np.arange(past, past + n) for past, n in zip(self.pasts, lengths, strict=True)]
        longest = max(past + n for past, n in zip(self.pasts, lengths, strict=True))
        return {
            "input_ids": np.concatenate([np.asarray(text, np.int64) for text in self.texts]),
            "position_ids": np.concatenate(positions).astype(np.int64),
            "cumulative_sequence_length": np.cumsum([0, *lengths], dtype=np.int32),
            "past_seqlens": np.asarray(self.pasts, np.int32),
            "logits_indices": np.arange(sum(lengths), dtype=np.int64),
            "ancestor_mask": np.empty((0, 0), np.int32),
            "attention_metadata": np.asarray([max(lengths), longest, longest], np.int32),
            **{f"block_table_{group}": self.tables for group in range(groups)},
        }


def caches_of(session: Any, num_blocks: int) -> Iterator[tuple[str, Any]]:
    """Zeroed caches of a session's graph, each an OrtValue of the element type that the graph says."""
    import onnxruntime

    kinds = {"float": (np.float32, 1), "float16": (np.float16, 10), "int8": (np.int8, 3)}
    kinds["float8e4m3fn"] = (np.uint8, 17)
    for each in session.get_inputs():
        if "_cache." in each.name:
            dtype, element = kinds[each.type.removeprefix("tensor(").removesuffix(")")]
            array = np.zeros((num_blocks, *each.shape[1:]), dtype)
            yield each.name, onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element)


def run_steps(session: Any, steps: Sequence[Ragged], groups: int, num_blocks: int) -> NDArray[np.float32]:
    """Logits of all rows of all steps, [rows, vocab]; one cache serves them."""
    caches = dict(caches_of(session, num_blocks))
    known = {each.name for each in session.get_inputs()}
    found = []
    for step in steps:
        binding = session.io_binding()
        for name, value in step.feeds(groups).items():
            if name in known:
                binding.bind_cpu_input(name, value)
        for name, value in caches.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("_cache.", "_cache_out."), value)
        binding.bind_output("logits")  # the last that is bound is the last that is found
        session.run_with_iobinding(binding)
        found.append(binding.get_outputs()[-1].numpy().copy())
    return np.concatenate(found)
