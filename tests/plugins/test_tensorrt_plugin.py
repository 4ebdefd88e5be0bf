"""The callbacks of the TensorRT plugin, over a fake of the module; and what a node may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attention_fields import EVERYTHING, FP8, PLAIN, ROTATED

from pagelet.plugins.kernels.launch_plan import Shapes, workspace_bytes
from pagelet.plugins.tensorrt.host import PluginError, PluginHost
from pagelet.plugins.tensorrt.node import AttentionNode
from pagelet.plugins.tensorrt.plugin import AttentionPlugins, read_fields


class Library:
    """A kernel library that records."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.loaded: list[Any] = []
        self.error = error

    def load(self, variant: Any) -> None:
        self.loaded.append(variant)

    def run(self, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        self.runs.append(arguments)


class Field:
    def __init__(self, name: str, data: Any, type: str) -> None:
        self.name, self.data, self.type = name, data, type


def fake_tensorrt() -> Any:
    """As much of the module as the callbacks touch."""
    names = ("float32", "float16", "bfloat16", "int8", "fp8", "int32", "int64")
    classes = (
        "IPluginV3",
        "IPluginV3OneCore",
        "IPluginV3OneBuildV2",
        "IPluginV3OneRuntime",
        "IPluginCreatorV3One",
    )
    registered: list[Any] = []

    def register_creator(creator: Any, namespace: str) -> bool:
        registered.append((creator, namespace))
        return len(registered) == 1

    return SimpleNamespace(
        **{name: name for name in names},
        **{name: type(name, (), {}) for name in classes},
        PluginField=Field,
        PluginFieldCollection=list,
        PluginFieldType=SimpleNamespace(CHAR="CHAR", INT32="INT32", FLOAT32="FLOAT32"),
        TensorFormat=SimpleNamespace(LINEAR="LINEAR"),
        TensorRTPhase=SimpleNamespace(BUILD="BUILD", RUNTIME="RUNTIME"),
        DimsExprs=list,
        get_plugin_registry=lambda: SimpleNamespace(register_creator=register_creator),
    )


def create(fields: dict[str, Any], host: PluginHost, phase: str = "RUNTIME") -> Any:
    trt = fake_tensorrt()
    plugins = AttentionPlugins(trt)
    source = plugins.plugin_class(AttentionNode.from_fields(fields), PluginHost(), True)
    with plugins.hosting(host):
        return plugins.creator.create_plugin("node", source.get_fields_to_serialize(), phase)


STEP = {"query": (5, 256), "block_table": (2, 7), "ancestor_mask": (5, 1)}


def described(node: AttentionNode) -> list[Any]:
    return [SimpleNamespace(dims=STEP.get(name, (1,)), max=STEP.get(name, (1,))) for name in node.inputs]


def enqueue(plugin: Any) -> None:
    pointers = [4096 * (index + 1) for index in range(len(plugin.node.inputs))]
    plugin.enqueue(described(plugin.node), [], pointers, [1 << 20, *pointers[1:3]], 1 << 21, 7)


def test_a_step_goes_to_the_kernels() -> None:
    host = PluginHost(Library())
    plugin = create(PLAIN, host).clone().attach_to_context(None)
    assert host.library.loaded == [plugin.node.variant]  # before the first step, which may be captured
    enqueue(plugin)
    ((variant, shapes, tensors, workspace, stream),) = host.library.runs
    assert variant == plugin.node.variant
    assert shapes == Shapes(tokens=5, sequences=2, table_width=7, mask_rows=5, mask_words=1)
    assert list(tensors) == [*PLAIN["inputs"].split(), "output"]
    assert [tensors["query"], tensors["key_cache"], tensors["output"]] == [4096, 8192, 1 << 20]
    assert (workspace, stream) == (1 << 21, 7)


def test_nothing_runs_while_an_engine_is_built() -> None:
    """TensorRT times plugins on memory with anything in it."""
    host = PluginHost(Library())
    plugin = create(PLAIN, host, "BUILD")
    enqueue(plugin.clone())
    assert not host.library.runs
    assert not host.library.loaded


def test_an_error_of_a_step_is_raised_into_tensorrt_and_kept() -> None:
    host = PluginHost(Library(RuntimeError("the launch failed")))
    plugin = create(PLAIN, host)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the launch failed"):
            enqueue(plugin)
    with pytest.raises(PluginError, match="PagedAttention plugin, enqueue: the launch failed"):
        host.check()
    host.check()  # it was raised


def test_an_engine_without_kernels_does_not_run() -> None:
    host = PluginHost()
    with pytest.raises(PluginError, match="loaded without its kernels"):
        enqueue(create(PLAIN, host))


def test_plugins_belong_to_the_host_that_created_them() -> None:
    first, second = PluginHost(Library()), PluginHost(Library())
    trt = fake_tensorrt()
    plugins = AttentionPlugins(trt)
    fields = plugins.plugin_class(AttentionNode.from_fields(PLAIN), first, False).get_fields_to_serialize()
    created = []
    for host in (first, second):
        with plugins.hosting(host):
            created.append(plugins.creator.create_plugin("node", fields, "RUNTIME"))
    enqueue(created[1])
    assert (len(first.library.runs), len(second.library.runs)) == (0, 1)
    with pytest.raises(PluginError, match="loaded without"):  # nobody's
        enqueue(plugins.creator.create_plugin("node", fields, "RUNTIME"))


def test_the_error_of_a_plugin_takes_the_place_of_the_parsers() -> None:
    plugins = AttentionPlugins(fake_tensorrt())
    with pytest.raises(PluginError, match="lacks the attributes"), plugins.hosting(PluginHost()):
        with pytest.raises(ValueError, match="lacks the attributes"):
            plugins.creator.create_plugin("node", [], "BUILD")
        raise OSError("the parser failed")
    with pytest.raises(OSError, match="another"), plugins.hosting(PluginHost()):
        raise OSError("another")


def test_it_is_registered_once() -> None:
    trt = fake_tensorrt()
    plugins = AttentionPlugins(trt)
    plugins.register()
    plugins.register()
    registry = trt.get_plugin_registry()
    assert not registry.register_creator(None, "")  # the fake takes one
    with pytest.raises(PluginError, match=r"did not take the plugin pagelet\.PagedAttention"):
        AttentionPlugins(SimpleNamespace(**(vars(trt)))).register()


@pytest.mark.parametrize("fields", [PLAIN, ROTATED, EVERYTHING, FP8, EVERYTHING | {"scale": 0.0}])
def test_fields_survive_an_engine(fields: dict[str, Any]) -> None:
    plugin = create(fields, PluginHost())
    read = read_fields(plugin.get_fields_to_serialize())
    assert read == pytest.approx(fields | read | {"inputs": read["inputs"]})
    assert plugin.node.inputs == tuple(fields["inputs"].split())
    again = AttentionNode.from_fields(read)
    assert [spec.key for spec in again.variant.kernels()] == [
        spec.key for spec in AttentionNode.from_fields(fields).variant.kernels()
    ]


def test_fields_of_any_width_are_read() -> None:
    """A string may come with a zero byte behind it or without, numbers as any array."""
    assert read_fields(
        [
            Field("inputs", np.frombuffer(b"query key_cache\0", np.int8), "CHAR"),
            Field("activation", np.frombuffer(b"bf16", np.uint8), "CHAR"),
            Field("num_heads", np.array([8], np.int64), "INT64"),
            Field("scale", np.array([0.5], np.float64), "FLOAT64"),
            Field("from_a_parser", np.array([1], np.int32), "INT32"),
        ]
    ) == {"inputs": "query key_cache", "activation": "bf16", "num_heads": 8, "scale": 0.5}


def test_only_linear_tensors_of_the_nodes_types_are_taken() -> None:
    plugin = create(FP8, PluginHost())
    types = ["float16", "fp8", "fp8", "int32", "int32", "int32", "float32", "float32", "int64", "int32"]
    types += ["float16", "fp8", "fp8", "float32", "float32"]  # outputs
    for place, right in enumerate(types):
        for dtype in ("float16", "fp8", "int32", "float32", "int64", "int8"):
            for layout in ("LINEAR", "CHW32"):
                described = [SimpleNamespace(desc=SimpleNamespace(type=dtype, format=layout))] * len(types)
                taken = plugin.supports_format_combination(place, described, 10)
                assert taken == (dtype == right and layout == "LINEAR")


def test_the_workspace_is_that_of_the_profiles_largest_step() -> None:
    plugin = create(PLAIN, PluginHost(), "BUILD")
    plugin.configure_plugin(described(plugin.node), [])
    size = plugin.get_workspace_size(described(plugin.node), [])
    assert size == workspace_bytes(plugin.node.variant, max_tokens=5, max_sequences=2, table_width=7) > 0


@pytest.mark.parametrize(
    ("inputs", "ranks", "message"),
    [
        ("query", None, "has the inputs 'query', its attributes ask for 'query key_cache"),
        ("key_cache query " + str(PLAIN["inputs"])[16:], None, "ask for 'query key_cache"),
        (PLAIN["inputs"], [2, 4, 4, 1, 1, 1, 1, 2], "input block_table .* has 1 axes, expected 2"),
        (PLAIN["inputs"], [2, 4, 4], "has 3 inputs, but names 8"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: str, ranks: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionNode.from_fields(PLAIN | {"inputs": inputs}).check_ranks(ranks or [])
