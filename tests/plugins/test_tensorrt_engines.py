"""The TensorRT plugin in real TensorRT-RTX engines, with TensorRT 11's classes, and how both are imported."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attention_fields import EVERYTHING, FP8, PLAIN, ROTATED

from pagelet.plugins.tensorrt.node import FIELDS
from pagelet.plugins.tensorrt.runtime_library import TensorRTError, import_tensorrt

HAS_RTX = importlib.util.find_spec("tensorrt_rtx") is not None
needs_rtx = pytest.mark.skipif(not HAS_RTX, reason="tensorrt-rtx is not installed")
HERE = Path(__file__).parent

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
    with pytest.raises(TensorRTError, match=f"{package} cannot be imported .*: run `{command}"):
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
