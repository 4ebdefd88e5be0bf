"""The attention plugin: an `IPluginV3` and its creator, over the module ``tensorrt`` or ``tensorrt_rtx``.

Works with TensorRT from 10.3 (the first with plugins that write their inputs, `IPluginV3OneBuildV2`) and
TensorRT-RTX from 1.7. What TensorRT does when a callback raises was tried with the latter: an error of most
makes parsing or building fail; one of `get_aliased_input`, `get_workspace_size` or `get_fields_to_serialize`
is passed over; one of `clone` or `get_capability_interface` ends the process. So what these return is made
when a plugin is created, or asked for in `configure_plugin` too, and the `PluginHost` keeps every error.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from pagelet.plugins.kernels.launch_plan import workspace_bytes
from pagelet.plugins.tensorrt.host import PluginError, PluginHost
from pagelet.plugins.tensorrt.node import FIELDS, NAME, NAMESPACE, VERSION, AttentionNode, Field

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Our name of a type: TensorRT's.
_TYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8": "fp8",
    "int32": "int32",
    "int64": "int64",
}


def _recorded(callback: Callable[_P, _R]) -> Callable[_P, _R]:
    """What the callback raises is kept by the host of its plugin, then raised into TensorRT."""

    @functools.wraps(callback)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return callback(*args, **kwargs)
        except Exception as error:
            args[0].host.record(callback.__name__, error)  # type: ignore[attr-defined]
            raise

    return call


class AttentionCallbacks:
    """What TensorRT asks a plugin, without the classes that it wants it to inherit.

    Args:
        trt: the module.
        building: whether an engine is being built. TensorRT may then time a plugin on memory with anything
            in it, block tables included, so nothing is launched.
    """

    def __init__(self, trt: Any, node: AttentionNode, host: PluginHost, building: bool) -> None:
        self.trt, self.node, self.host, self.building = trt, node, host, building
        self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        self.num_outputs = len(node.aliased_inputs)
        # TensorRT reads through pointers into what is returned: it must live as long as the plugin.
        self._fields, self._field_data = _field_collection(trt, dict(node.fields))
        self._dtypes = [getattr(trt, _TYPES[kind]) for kind in node.types]

    def get_capability_interface(self, kind: Any) -> AttentionCallbacks:
        return self

    # Building

    @_recorded
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        expected = self._dtypes[: len(self.node.inputs)]
        if list(input_types) != expected:
            raise ValueError(f"the inputs have the types {list(input_types)}, expected {expected}")
        return self._dtypes[len(expected) :]

    @_recorded
    def get_output_shapes(
        self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any
    ) -> list[Any]:
        self.node.check_ranks([len(dims) for dims in inputs])
        attended = self.trt.DimsExprs([inputs[0][0], builder.constant(self.node.output_width)])
        return [attended, *(inputs[index] for index in self.node.aliased_inputs[1:])]

    def get_aliased_input(self, output_index: int) -> int:
        return self.node.aliased_inputs[output_index]

    @_recorded
    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        described = in_out[pos].desc
        linear: bool = described.format == self.trt.TensorFormat.LINEAR
        return linear and described.type == self._dtypes[pos]

    @_recorded
    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._most_workspace(inputs)

    @_recorded
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return self._most_workspace(inputs)

    def _most_workspace(self, inputs: Sequence[Any]) -> int:
        most = self.node.shapes(lambda index: inputs[index].max)
        return workspace_bytes(self.node.variant, most.tokens, most.sequences, most.table_width)

    def get_fields_to_serialize(self) -> Any:
        return self._fields

    # Running

    def attach_to_context(self, context: Any) -> AttentionCallbacks:
        return self.clone()

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Nothing: shapes are read at each step."""

    def set_tactic(self, tactic: int) -> None:
        """There is but one: which kernel runs follows from the shapes."""

    @_recorded
    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        if self.building:
            return
        if self.host.library is None:
            raise PluginError("the engine was loaded without its kernels")
        node = self.node
        tensors = dict(zip(node.inputs, inputs, strict=True))
        tensors["output"] = outputs[0]
        shapes = node.shapes(lambda index: input_desc[index].dims)
        self.host.library.run(node.variant, shapes, tensors, workspace, stream)

    def clone(self) -> AttentionCallbacks:
        raise NotImplementedError  # the class that `AttentionPlugins` makes has it


class AttentionPlugins:
    """The plugin's classes for one module, and their registration with TensorRT.

    A process has one plugin of a name, but may build and load any number of engines, each with kernels of
    its own: a plugin belongs to the host in whose `hosting` block TensorRT created it, that is, parsed the
    network or loaded the engine.

    Attributes:
        plugin_class: the `IPluginV3`.
        creator: the `IPluginCreatorV3One`.
    """

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.plugin_class = _plugin_class(trt)
        self._lock = threading.Lock()
        self._host = PluginHost()  # of what is created outside of `hosting`: it can be looked at, not run
        self.creator = _creator(trt, self._create)
        self._registered = False

    def register(self) -> None:
        """Makes the plugin known to every parser and runtime of this process; again is harmless.

        Raises:
            PluginError: another plugin of this name is registered.
        """
        if self._registered:
            return
        if not self.trt.get_plugin_registry().register_creator(self.creator, NAMESPACE):
            raise PluginError(
                f"TensorRT did not take the plugin {NAMESPACE}.{NAME}: another copy of it is registered"
            )
        self._registered = True

    @contextmanager
    def hosting(self, host: PluginHost) -> Iterator[None]:
        """Plugins that TensorRT creates within the block belong to the host; others wait for its end.

        Raises:
            PluginError: at the end of the block, if one could not be created; also in place of an error that
                the block raised because of that.
        """
        with self._lock:
            self._host = host
            try:
                yield
            except Exception:
                host.check()
                raise
            finally:
                self._host = PluginHost()
        host.check()

    def _create(self, collection: Any, phase: Any) -> Any:
        host = self._host
        try:
            node = AttentionNode.from_fields(read_fields(collection))
            building = phase == self.trt.TensorRTPhase.BUILD
            if host.library is not None and not building:
                host.library.load(node.variant)
            return self.plugin_class(node, host, building)
        except Exception as error:
            host.record("create_plugin", error)
            raise


@functools.lru_cache
def attention_plugins(trt: Any) -> AttentionPlugins:
    """The registered plugin of a module: one for the process, as TensorRT has one registry.

    Raises:
        PluginError: another plugin of this name is registered.
    """
    plugins = AttentionPlugins(trt)
    plugins.register()
    return plugins


def read_fields(collection: Any) -> dict[str, Field]:
    """Of a plugin field collection; a parser ends strings with a zero byte, and passes numbers as arrays."""
    values: dict[str, Field] = {}
    for field in collection:
        if (kind := FIELDS.get(field.name)) is None:
            continue  # an attribute that parsers add
        data = np.asarray(field.data)
        values[field.name] = (
            data.tobytes().rstrip(b"\0").decode() if kind is str else kind(data.reshape(-1)[0])
        )
    return values


def _field_collection(trt: Any, values: Mapping[str, Field]) -> tuple[Any, list[Any]]:
    """A collection of all fields (a creator declares them without values), and what it points into."""
    kinds = {
        str: trt.PluginFieldType.CHAR,
        int: trt.PluginFieldType.INT32,
        float: trt.PluginFieldType.FLOAT32,
    }
    fields = []
    for name, kind in FIELDS.items():
        value = values.get(name, kind())
        if isinstance(value, str):
            data: Any = np.frombuffer(value.encode() + b"\0", np.int8)
        else:
            data = np.array([value], np.int32 if kind is int else np.float32)
        fields.append(trt.PluginField(name, data, kinds[kind]))
    return trt.PluginFieldCollection(fields), fields


def _plugin_class(trt: Any) -> Any:
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class PagedAttentionPlugin(AttentionCallbacks, *bases):  # type: ignore[misc]
        def __init__(self, node: AttentionNode, host: PluginHost, building: bool) -> None:
            for base in bases:
                base.__init__(self)
            AttentionCallbacks.__init__(self, trt, node, host, building)

        def clone(self) -> PagedAttentionPlugin:
            return PagedAttentionPlugin(self.node, self.host, self.building)

    return PagedAttentionPlugin


def _creator(trt: Any, create: Callable[[Any, Any], Any]) -> Any:
    class PagedAttentionCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
            self.field_names, self._field_data = _field_collection(trt, {})

        def create_plugin(self, name: str, collection: Any, phase: Any) -> Any:
            return create(collection, phase)

    return PagedAttentionCreator()
