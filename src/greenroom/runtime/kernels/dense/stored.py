"""Dense matrices that stay as their checkpoint stores them: smaller in memory, and read as such.

`StoredMatrix` is one matrix. A module that has one (`stored_matrix`) has no parameter `weight` and
computes by a forward of accelerate.py. `MatrixRecord` tells kernel entries where a matrix lies.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.core.layout import ALIGNMENT, SlotLayout, TensorSpec, WeightSpec
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.codegen.entries import layers
from greenroom.runtime.kernels.codegen.formats.encoded import FRAME_ARGUMENTS
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.matrix import MatrixProduct, unsupported_reason

STORED = "_greenroom_stored"  # attribute of a module: its matrix
EXPANDED = 32 << 20  # bytes of a matrix that are expanded at a time, for many tokens
PIECE = 1 << 20  # weights that are decoded at a time
_DTYPES = {torch.bfloat16, torch.float16}
_local = threading.local()


class StoredMatrix:
    """A matrix [outputs, inputs] as `layout` describes it: `weight`, and what `weight.` begins.

    It looks like the tensor that it expands to: `shape`, `dtype`, `device`.
    """

    def __init__(self, layout: SlotLayout, dtype: torch.dtype) -> None:
        """There is no memory before `fill`."""
        self.layout, self.dtype = layout, dtype
        self.spec = layout.weight("weight")
        self.shape = torch.Size(self.spec.shape)
        self.nbytes = layout.nbytes
        self.device = torch.device("meta")
        self._memory: Tensor | None = None
        self._expanding: MatrixRecord | None = None

    @property
    def unsupported_reason(self) -> str:
        """Why the compiled bodies cannot read it, or ""."""
        if self.dtype not in _DTYPES:
            return f"{self.dtype}"
        return unsupported_reason(self.spec)

    def fill(self, empty: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
        """Take memory from `empty`; returns its parts, to be written: codes, then companions."""
        self._memory = empty(self.nbytes + ALIGNMENT, dtype=torch.uint8)
        self.device = self._memory.device
        return self.parts

    @property
    def address(self) -> int:
        assert self._memory is not None, "it is not loaded"
        return -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT

    @property
    def parts(self) -> list[Tensor]:
        return [self._part(spec) for spec in self.spec.parts]

    def _part(self, spec: TensorSpec) -> Tensor:
        assert self._memory is not None, "it is not loaded"
        start = self.address - self._memory.data_ptr() + spec.offset
        raw = self._memory[start : start + spec.nbytes]
        return raw.view(getattr(torch, spec.dtype)).view(spec.shape)

    def is_contiguous(self) -> bool:
        return True

    def decoded(self) -> Tensor:
        """All of it as its decoder expands it: the parameter that the module would have."""
        (rows, columns), decode = self.shape, ENCODINGS[self.spec.encoding].decode
        codes, *scales = self.parts
        together = rows // len(scales[0]) if scales else 1  # rows that share one of scales
        step = together * max(1, PIECE // (columns * together))
        out = torch.empty(rows, columns, dtype=self.dtype)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            some = [scale[start // together : stop // together] for scale in scales]
            shape = (stop - start, columns)
            out[start:stop] = decode([codes[start:stop], *some], shape, self.dtype)
        return out

    def rows(self, first: int, count: int) -> Tensor:
        """Rows first .. first + count, expanded [count, inputs]."""
        return self._unfold(count, first, None)

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows by their numbers, of any shape -> [*ids.shape, inputs]; IndexError."""
        numbers = ids.reshape(-1).tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.shape[0]:
            raise IndexError("index out of range in self")
        index = array("q", numbers)
        return self._unfold(len(numbers), 0, index).view(*ids.shape, self.shape[1])

    def _unfold(self, count: int, first: int, index: array[int] | None) -> Tensor:
        if self._expanding is None:
            self._expanding = MatrixRecord(self, rounded=True)
        columns = self.shape[1]
        out = torch.empty(count, columns, dtype=self.dtype)
        stride = 4 * layers.FEW * columns + room(columns)
        words = array("q", [0] * (layers.E_STRIDE + 1))
        words[layers.E_MATRIX], words[layers.E_ROWS] = self._expanding.address, count
        words[layers.E_COLUMNS], words[layers.E_FIRST] = columns, first
        words[layers.E_INDEX] = index.buffer_info()[0] if index else 0
        words[layers.E_OUT] = out.data_ptr()
        words[layers.E_SCRATCH], words[layers.E_STRIDE] = scratch(stride), stride
        enter = kernel_entry(layers.expand_rows, self.dtype)
        enter(words.buffer_info()[0], count * columns > 1 << 17)
        return out


class MatrixRecord:
    """What compiled bodies know of a matrix: the words at `address` (see layers.py)."""

    def __init__(self, weight: Tensor | StoredMatrix, rounded: bool = False) -> None:
        """`rounded` as for `MatrixProduct`."""
        spec = weight.spec if isinstance(weight, StoredMatrix) else _plain(weight)
        self._matrix = MatrixProduct(spec, weight.dtype, rounded)
        base = weight.address if isinstance(weight, StoredMatrix) else weight.data_ptr()
        self._words = array("q", [*self._matrix.arguments, base])
        self.address = self._words.buffer_info()[0]


def _plain(weight: Tensor) -> WeightSpec:
    name = str(weight.dtype).removeprefix("torch.")
    return SlotLayout.pack([("weight", tuple(weight.shape), name)]).weight("weight")


def stored_matrix(module: nn.Module) -> StoredMatrix | None:
    """The stored matrix that a module has in the place of its weight."""
    return module.__dict__.get(STORED)


def weight_matrix(module: nn.Module) -> Any:
    """A linear module's matrix: its weight, or what it has in its place."""
    return stored_matrix(module) or module._parameters["weight"]


def attach_matrix(module: nn.Module, stored: StoredMatrix) -> None:
    """Take a module's weight out of it; the attribute stays, as None."""
    module.register_parameter("weight", None)
    module.__dict__[STORED] = stored


def restore_weights(model: nn.Module) -> None:
    """Give every module its weight, expanded; those that shared a matrix share a parameter."""
    made: dict[StoredMatrix, nn.Parameter] = {}
    for module in model.modules():
        stored = module.__dict__.pop(STORED, None)
        if stored is None:
            continue
        if stored not in made:
            made[stored] = nn.Parameter(stored.decoded(), requires_grad=False)
        module.register_parameter("weight", made[stored])


def dense_bytes(model: nn.Module) -> int:
    """Bytes of memory that parameters, buffers and stored matrices of a model take.

    A tensor that several modules share counts once.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sizes: dict[object, int] = {
        (t.data_ptr(), t.nbytes): t.nbytes for t in tensors if t.device.type != "meta"
    }
    for matrix in filter(None, map(stored_matrix, model.modules())):
        sizes[matrix] = matrix.nbytes
    return sum(sizes.values())


def coded(weights: Sequence[Tensor | StoredMatrix]) -> bool:
    """Must these be read by records? All are where any is stored."""
    return any(isinstance(weight, StoredMatrix) for weight in weights)


def readable(weights: Sequence[Tensor | StoredMatrix]) -> bool:
    """Can compiled bodies read them, all in the same way?"""
    if not coded(weights):
        return True
    specs = (w.spec if isinstance(w, StoredMatrix) else _plain(w) for w in weights)
    return not any(unsupported_reason(spec) for spec in specs)


def expanded_bytes(model: nn.Module) -> int:
    """The most that is expanded at a time in a pass of many tokens."""
    matrices = filter(None, map(stored_matrix, model.modules()))
    sizes = (m.shape.numel() * m.dtype.itemsize for m in matrices)
    return max((min(size, EXPANDED) for size in sizes), default=0)


def room(columns: int) -> int:
    """Bytes that a product with rows of so many inputs needs for itself."""
    return 8 * FRAME_ARGUMENTS + 12 * columns + 4096


def scratch(stride: int) -> int:
    """The address of `stride` bytes for each of torch's threads, kept for this thread's calls."""
    size = stride * torch.get_num_threads()
    memory: Tensor | None = getattr(_local, "memory", None)
    if memory is None or memory.numel() < size:
        memory = _local.memory = torch.empty(size, dtype=torch.uint8)
    return memory.data_ptr()
