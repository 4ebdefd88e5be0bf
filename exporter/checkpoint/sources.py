"""Where the numbers of each role lie in a checkpoint's tensors.

Most roles are a tensor of their own. Others are rows of one (a fused q, k and v), every third stretch of rows
(GPT-NeoX keeps a head's q, k and v together), every second row, one expert's slab, or columns of a tensor
that stands the other way round.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError
from pagelet.models.names import Names, Part
from pagelet.models.spec import ModelSpec
from pagelet.models.weight_shapes import Role, weight_shapes

Shape = tuple[int, ...]
# Norm and head of an inner layer: see `exporter/early_exit.py`.
_EXIT_TENSOR = re.compile(r"early_exit\.\d{1,4}\.(norm|head)\.weight")
# So many faults are named in one error; the rest are counted.
_NAMED = 5


@dataclass(frozen=True)
class Source:
    """A role's rows in a tensor, or in the slab of one that an expert has.

    Attributes:
        info: the tensor, or the slab as if it were one.
        shape: of the role.
        rows: which rows (elements, of a vector) of the tensor, or columns if `transposed`; ascending.
        expert: whose slab it is; -1: the tensor is no experts'.
    """

    info: TensorInfo
    shape: Shape
    rows: range | NDArray[np.intp]
    transposed: bool = False
    expert: int = -1

    def span(self, start: int, stop: int) -> tuple[int, int, NDArray[np.intp] | None]:
        """(first, behind the last) row of the tensor to read for rows [start:stop], and which of these."""
        rows = self.rows[start:stop]
        low, high = int(rows[0]), int(rows[-1]) + 1
        return low, high, None if high - low == len(rows) else np.asarray(rows) - low

    @property
    def logical(self) -> TensorInfo:
        """The role as a tensor of its own, to be named and counted."""
        share = self.info.nbytes * int(np.prod(self.shape)) // max(int(np.prod(self.info.shape)), 1)
        return replace(self.info, shape=self.shape, nbytes=share)


class Sources:
    """All roles of a model, found among a checkpoint's tensors.

    Attributes:
        found: by role, those whose tensor is there and has the right shape.
        faults: what is missing or of another shape, in words.
        used: names of all tensors that the model is made of.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, TensorInfo], names: Names) -> None:
        self.found: dict[str, Source] = {}
        self.faults: list[str] = []
        self._tensors, self._names = tensors, names
        self._shapes = dict(weight_shapes(spec))
        self._spec = spec
        self.used: dict[str, None] = {}
        for name, shape in self._shapes.items():
            self._find(name, shape)

    def _find(self, role_name: str, shape: Shape) -> None:
        role = Role.parse(role_name)
        source = self._names[role.stem]
        part = source if isinstance(source, Part) else None
        name = role.tensor_name(source)
        whole = self._whole_shape(role, part, shape) if part else shape
        info = self._tensors.get(name)
        if name not in self.used:
            self.used[name] = None
            if info is None:
                self.faults.append(f"{name} is missing")
            elif info.shape != whole:
                self.faults.append(f"{name} has shape {list(info.shape)}, expected {list(whole)}")
        if info is not None and info.shape == whole:
            self.found[role_name] = self._source(info, role, part, shape)

    def _whole_shape(self, role: Role, part: Part, shape: Shape) -> Shape:
        """Of the tensor that holds the role and others."""
        rows = sum(self._shapes[role.sibling(stem)][0] for stem in part.roles)
        whole = (rows, *shape[1:])
        if part.transposed:
            whole = whole[::-1]
        if part.experts:
            assert self._spec.experts is not None
            whole = (self._spec.experts.count, *whole)
        return whole

    def _source(self, info: TensorInfo, role: Role, part: Part | None, shape: Shape) -> Source:
        if part is None:
            return Source(info, shape, range(shape[0]))
        if part.experts:
            size = info.nbytes // info.shape[0]
            info = replace(info, shape=info.shape[1:], nbytes=size, offset=info.offset + role.expert * size)
        transposed, expert = part.transposed and len(shape) == 2, role.expert if part.experts else -1
        return Source(info, shape, self._rows(role, part), transposed, expert)

    def _rows(self, role: Role, part: Part) -> range | NDArray[np.intp]:
        sizes = [self._shapes[role.sibling(stem)][0] for stem in part.roles]
        index = part.roles.index(role.stem)
        if part.pairs:
            return range(index, sum(sizes), len(sizes))
        first = sum(sizes[:index])
        if not part.by_head:
            return range(first, first + sizes[index])
        head_dim = self._spec.layers[role.layer].head_dim
        heads = np.arange(sizes[index] // head_dim, dtype=np.intp)
        begins = heads * (len(sizes) * head_dim) + index * head_dim
        rows: NDArray[np.intp] = (begins[:, None] + np.arange(head_dim)).reshape(-1)
        return rows


def match_weights(
    spec: ModelSpec,
    tensors: Mapping[str, TensorInfo],
    names: Names,
    ignored: Iterable[str],
    readable: Iterable[str],
    where: str,
) -> dict[str, Source]:
    """Role to source for every weight of the model.

    `names` is the naming table, `ignored` the endings of tensors that may be left over, `readable`
    the dtypes that can be read.

    Raises:
        CheckpointError: names the tensors that are missing, unexpected, or of a wrong shape or dtype.
    """
    endings, dtypes = tuple(ignored), tuple(readable)
    sources = Sources(spec, tensors, names)
    exits = [info for name, info in tensors.items() if _EXIT_TENSOR.fullmatch(name)]
    known = {*sources.used, *(info.name for info in exits)}
    faults = sources.faults + [
        f"{name} is unexpected" for name in tensors if name not in known and not name.endswith(endings)
    ]
    needed = {source.info.name: source.info for source in sources.found.values()}
    faults += [
        f"{info.name} has dtype {info.dtype}, which cannot be read (known: {', '.join(dtypes)})"
        for info in (*needed.values(), *exits)
        if info.dtype not in dtypes
    ]
    if faults:
        rest = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise CheckpointError(
            f"{where} does not hold the weights of its configuration: {'; '.join(faults[:_NAMED])}{rest}."
        )
    return sources.found
