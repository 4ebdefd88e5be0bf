"""The TensorRT plugin: in real TensorRT-RTX engines, with TensorRT 11's classes, and over a small fake."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagelet.plugins.kernels.launch_plan import Shapes, workspace_bytes
from pagelet.plugins.tensorrt.host import PluginError, PluginHost
from pagelet.plugins.tensorrt.node import FIELDS, AttentionNode
from pagelet.plugins.tensorrt.plugin import AttentionPlugins, read_fields
from pagelet.plugins.tensorrt.runtime_library import TensorRTError, import_tensorrt

HAS_RTX = importlib.util.find_spec("tensorrt_rtx") is not None
needs_rtx = pytest.mark.skipif(not HAS_RTX, reason="tensorrt-rtx is not installed")
HERE = Path(__file__).parent

PLAIN = {
    "inputs": "query key_cache value_cache cumulative_sequence_length past_seqlens block_table position_ids "
    "ancestor_mask",
    "num_heads": 4,
    "kv_num_heads": 2,
    "head_dim": 32,
    "block_size": 16,
    "activation": "f16",
    "cache": "f16",
    "scale": 0.25,
    "softcap": 0.0,
    "local_window_size": -1,
    "rotary_dim": 0,
    "rotary_interleaved": 0,
    "norm_epsilon": 1e-6,
    "norm_after_rotation": 0,
    "norm_values": 0,
    "writes": 1,
}
ROTATED = PLAIN | {
    "inputs": "query key_cache value_cache cumulative_sequence_length past_seqlens block_table cos_cache "
    "sin_cache position_ids ancestor_mask",
    "rotary_dim": 32,
}
EVERYTHING = PLAIN | {
    "inputs": "query key value key_cache value_cache cumulative_sequence_length past_seqlens block_table "
    "cos_cache sin_cache key_scale_cache value_scale_cache position_ids ancestor_mask q_norm_weight "
    "k_norm_weight head_sink",
    "activation": "bf16",
    "cache": "int8",
    "rotary_dim": 16,
    "local_window_size": 100,
}
FP8 = PLAIN | {
    "inputs": "query key_cache value_cache cumulative_sequence_length past_seqlens block_table "
    "key_scale_cache value_scale_cache position_ids ancestor_mask",
    "cache": "fp8",
}


# In TensorRT-RTX


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(HERE)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def build(fields: dict[str, Any], sms: list[int], aliased: bool = True) -> dict[str, Any]:
    code = "import json, sys, rtx_engine; print(json.dumps(rtx_engine.build(*json.loads(sys.argv[1]))))"
    done = run(code, json.dumps([fields, sms, aliased]))
    assert done.returncode == 0, done.stderr
    built: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return built


@needs_rtx
@pytest.mark.parametrize(
    ("fields", "sms", "types"),
    [
        (ROTATED, [80, 86, 89, 120, 121], ["HALF"] * 3),
        (EVERYTHING, [86, 89, 120], ["BF16", "INT8", "INT8", "FLOAT", "FLOAT"]),
        (FP8, [89, 120], ["HALF", "FP8", "FP8", "FLOAT", "FLOAT"]),
    ],
    ids=["rotated", "everything", "fp8"],
)
def test_an_engine_is_built(fields: dict[str, Any], sms: list[int], types: list[str]) -> None:
    built = build(fields, sms)
    assert built["bytes"] > 10_000
    assert built["holds_fields"]
    names = fields["inputs"].split()
    written = [name for name in names if name.endswith("_cache") and name[:3] not in ("cos", "sin")]
    writer, reader, *others = built["layers"]
    assert [layer["type"] for layer in others] == ["CONSTANT", "MATRIX_MULTIPLY"]
    assert built["inputs"] == writer["inputs"] == names
    assert built["outputs"] == ["result", *(f"{name}_out" for name in written)]
    # The writer's outputs: attended rows, then each cache in the memory of its input.
    assert [dtype for _, dtype, _ in writer["outputs"]] == types
    assert writer["outputs"][0][2] == reader["outputs"][0][2] == [-1, 4 * 32]
    assert writer["aliases"] == [-1, *(names.index(name) for name in written)]
    assert [shape for _, _, shape in writer["outputs"][1:]] == [
        [-1, 16, 2, 32] if "scale" not in name else [-1, 16, 2] for name in written
    ]
    assert reader["aliases"] == [-1]
    assert reader["inputs"][1:3] == ["key_cache_out", "value_cache_out"]
    for layer, writes in ((writer, 1), (reader, 0)):
        assert layer["fields"] == pytest.approx(
            layer["fields"] | fields | {"writes": writes, "inputs": layer["fields"]["inputs"]}
        )
        assert layer["fields"].keys() == FIELDS.keys()


@needs_rtx
def test_tensorrt_sees_the_aliases() -> None:
    """It refuses aliases unless they are allowed, so it knows them."""
    assert build(ROTATED, [89], aliased=False)["bytes"] == 0


@needs_rtx
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "fields.update(head_dim=24)",
            "create_plugin: attention heads have 24 elements, expected a multiple of 16",
        ),
        ("del fields['softcap']", "create_plugin: a PagedAttention node lacks the attributes ['softcap']"),
        (
            "fields.update(cache='int8')",
            "create_plugin: a PagedAttention node has the inputs 'query key_cache",
        ),
        (
            "fields.update(activation='bf16')",
            "get_output_data_types: the inputs have the types [<DataType.HALF",
        ),
    ],
)
def test_what_a_callback_raises_reaches_the_caller(change: str, message: str) -> None:
    """And the process lives: TensorRT would only print it, and report a parser's error."""
    code = f"""
import json, sys
import rtx_engine
from pagelet.plugins.tensorrt.host import PluginError
original = rtx_engine._attention
def changed(inputs, outputs, fields):
    fields = dict(fields)
    {change}
    return original(inputs, outputs, fields)
rtx_engine._attention = changed
try:
    rtx_engine.build(json.loads(sys.argv[1]), [89])
except PluginError as error:
    print("CAUGHT", error)
"""
    done = run(code, json.dumps(PLAIN))
    assert done.returncode == 0, done.stderr
    assert f"CAUGHT PagedAttention plugin, {message}" in done.stdout


@needs_rtx
def test_an_error_that_tensorrt_ignores_reaches_the_caller() -> None:
    """Without a size of the workspace it builds an engine, which would write anywhere."""
    code = """
import json, sys
import rtx_engine
from pagelet.plugins.tensorrt import plugin
def get_workspace_size(*arguments):
    raise ValueError("a size that fails")
plugin.AttentionCallbacks.get_workspace_size = plugin._recorded(get_workspace_size)
check = plugin.PluginHost.check
def late(host):
    try:
        check(host)
    except plugin.PluginError as error:
        print("CAUGHT", error)
plugin.PluginHost.check = late
print("BYTES", rtx_engine.build(json.loads(sys.argv[1]), [89])["bytes"])
"""
    done = run(code, json.dumps(PLAIN))
    assert done.returncode == 0, done.stderr
    assert "CAUGHT PagedAttention plugin, get_workspace_size: a size that fails" in done.stdout
    assert int(done.stdout.split("BYTES ")[1]) > 10_000


# Finding the libraries


def rtx_lacks_a_name() -> bool:
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    return bool(spec and spec.origin and not Path(spec.origin).with_name("libtensorrt_rtx.so").exists())


@needs_rtx
@pytest.mark.skipif(not rtx_lacks_a_name(), reason="this tensorrt-rtx has all names of its libraries")
def test_a_parser_that_was_imported_unprepared_is_refused(tmp_path: Path) -> None:
    """It would end the process; with the loader's path set as the message says it is fine."""
    code = """
import tensorrt_rtx
from pagelet.plugins.tensorrt.runtime_library import TensorRTError, import_tensorrt
assert import_tensorrt("tensorrt_rtx", parser=False) is tensorrt_rtx  # engines run without the parser
try:
    import_tensorrt("tensorrt_rtx")
    print("FINE")
except TensorRTError as error:
    print("REFUSED", error)
"""
    refused = run(code).stdout
    assert "REFUSED tensorrt_rtx was imported before pagelet could prepare it" in refused
    assert "run `ln -s libtensorrt_rtx.so.1 /" in refused
    folder = Path(refused.split("prepare it, and ")[1].split(" lacks ")[0])
    (tmp_path / "libtensorrt_rtx.so").symlink_to(folder / "libtensorrt_rtx.so.1")
    assert "FINE" in run(code, LD_LIBRARY_PATH=str(tmp_path)).stdout


@needs_rtx
def test_the_private_links_go_with_the_process(tmp_path: Path) -> None:
    code = """
import os
from pagelet.plugins.tensorrt.runtime_library import import_tensorrt
assert import_tensorrt("tensorrt_rtx") is import_tensorrt("tensorrt_rtx")
print(os.listdir(os.environ["TMPDIR"]))
"""
    done = run(code, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert ("pagelet-tensorrt-rtx-" in done.stdout) == rtx_lacks_a_name()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "command"),
    [("tensorrt", "pip install tensorrt-cu13"), ("tensorrt_rtx", "pip install tensorrt-rtx")],
)
def test_a_missing_package_says_how_to_install_it(
    package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("pagelet.plugins.tensorrt.runtime_library._prepare_rtx_parser", lambda **needed: None)
    with pytest.raises(TensorRTError, match=f"{package} cannot be imported .*: install it with `{command}"):
        import_tensorrt(package)


# In TensorRT 11, whose libraries are not there: only its classes

LIBRARIES = ("nvonnxparser", "nvinfer_plugin", "nvinfer")
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_bindings") is None or shutil.which("cc") is None,
    reason="tensorrt-cu13-bindings or a C compiler is not installed",
)
def test_tensorrt_11_takes_the_classes(tmp_path: Path) -> None:
    """Its bindings load over libraries of empty functions, which the classes of plugins do not call."""
    source = tmp_path / "empty.c"
    source.write_text("\n".join(f"void *{name}(void) {{ return 0; }}" for name in FUNCTIONS))
    for name in LIBRARIES:
        library = f"lib{name}.so.11"
        subprocess.run(
            ["cc", "-shared", "-fPIC", source, f"-Wl,-soname,{library}", "-o", tmp_path / library], check=True
        )
    code = """
import json, sys
import tensorrt_bindings as trt
from pagelet.plugins.tensorrt.host import PluginHost
from pagelet.plugins.tensorrt.node import AttentionNode
from pagelet.plugins.tensorrt.plugin import AttentionPlugins, read_fields
node = AttentionNode.from_fields(json.loads(sys.argv[1]))
plugins = AttentionPlugins(trt)
plugin = plugins.plugin_class(node, PluginHost(), True).clone()
fields = plugin.get_fields_to_serialize()
loaded = plugins.creator.create_plugin("a", fields, trt.TensorRTPhase.RUNTIME)
assert (loaded.node.variant, loaded.node.inputs) == (plugin.node.variant, plugin.node.inputs), loaded.node
assert not loaded.building
print(json.dumps({
    "bases": all(isinstance(plugin, base) for base in (
        trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)),
    "name": [plugin.plugin_namespace, plugin.plugin_name, plugin.plugin_version, plugin.num_outputs],
    "creator": [plugins.creator.plugin_namespace, plugins.creator.name, plugins.creator.plugin_version],
    "declared": {field.name: field.type.name for field in plugins.creator.field_names},
    "types": [str(each) for each in plugin.get_output_data_types([
        *[trt.bfloat16] * 3, *[trt.int8] * 2, *[trt.int32] * 3, *[trt.float32] * 4, trt.int64, trt.int32,
        *[trt.float32] * 3])],
}))
"""
    fields = EVERYTHING | {"norm_epsilon": 0.5**20}  # what float32 holds exactly
    done = run(code, json.dumps(fields), LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "bases": True,
        "name": ["pagelet", "PagedAttention", "1", 5],
        "creator": ["pagelet", "PagedAttention", "1"],
        "declared": {
            name: {str: "CHAR", int: "INT32", float: "FLOAT32"}[kind] for name, kind in FIELDS.items()
        },
        "types": ["DataType.BF16", "DataType.INT8", "DataType.INT8", "DataType.FLOAT", "DataType.FLOAT"],
    }


# The callbacks, over a fake of the module


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
    assert list(tensors) == [*PLAIN["inputs"].split(), "output"]  # type: ignore[attr-defined]
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
