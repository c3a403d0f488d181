"""Dense matrices that stay in memory as their checkpoint encodes them.

A module that has such a matrix (`stored_matrix`) has no parameter `weight` and computes by a
compiled forward (accelerate.py). `MatrixRecord` describes a matrix to compiled kernels.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.core.layout import ALIGNMENT, SlotLayout, TensorSpec
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.matrix import PANEL, MatrixProduct, unsupported_reason
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.panel_order import Panels, has_panels

STORED = "_greenroom_stored"  # name of a module's attribute
EXPANDED = 32 << 20  # bytes expanded at a time, for many tokens
CHUNK = 1 << 20  # weights decoded at a time
ARRANGED = 1 << 20  # bytes that are moved to the order of panels at a time
FEW = 8  # rows that a thread expands at a time (native/layers.cpp)
_DTYPES = {torch.bfloat16, torch.float16}
_local = threading.local()


class StoredMatrix:
    """A dense weight matrix [outputs, inputs] in its checkpoint's encoding.

    It has the attributes of the tensor that it decodes to: `shape`, `dtype` and `device`. `layout`
    has the sizes of the encoded tensor `weight` and of its companions, such as scales.
    """

    def __init__(self, layout: SlotLayout, dtype: torch.dtype) -> None:
        """Describe an encoded matrix that decodes to `dtype`.

        It has no memory before `allocate` is called.
        """
        self.layout, self.dtype = layout, dtype
        self.spec = layout.weight("weight")
        self.shape = torch.Size(self.spec.shape)
        self.nbytes = layout.nbytes
        self.device = torch.device("meta")
        self._memory: Tensor | None = None
        self._expanding: MatrixRecord | None = None

    @property
    def unsupported_reason(self) -> str:
        """Return why no compiled product reads an encoded matrix, or "" if one does."""
        if self.dtype not in _DTYPES:
            return f"{self.dtype}"
        return unsupported_reason(self.spec)

    def allocate(self, empty: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
        """Allocate an encoded matrix's memory with `empty`, and return the tensors to fill.

        The tensors are the codes, then companions such as scales.
        """
        self._memory, self._expanding = empty(self.nbytes + ALIGNMENT, dtype=torch.uint8), None
        self.spec = self.layout.weight("weight")
        self.device = self._memory.device
        return self.parts

    @property
    def address(self) -> int:
        """Return the address of an encoded matrix's memory; `allocate` must have been called."""
        assert self._memory is not None, "the matrix has no memory: call allocate first"
        return -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT

    @property
    def parts(self) -> list[Tensor]:
        """Return an encoded matrix's tensors: the codes, then companions such as scales.

        Codes that were arranged in panels are a copy.
        """
        return [self._part(spec) for spec in self.spec.parts]

    def _bytes(self, spec: TensorSpec) -> Tensor:
        assert self._memory is not None, "the matrix has no memory: call allocate first"
        start = self.address - self._memory.data_ptr() + spec.offset
        return self._memory[start : start + spec.nbytes]

    def _part(self, spec: TensorSpec) -> Tensor:
        raw = self._bytes(spec)
        if spec.panels:
            row_bytes = spec.nbytes // spec.shape[0]
            raw = torch.from_numpy(Panels().restore(spec.panels, raw.numpy(), row_bytes))
        return raw.view(getattr(torch, spec.dtype)).view(spec.shape)

    def arrange(self) -> None:
        """Move a matrix in memory to the order of panels.

        A matrix whose encoding has no panels stays as it is. Records of the matrix that were made
        before describe it wrongly from then on.
        """
        codes, *companions = self.spec.parts
        if codes.panels or self._memory is None or not has_panels(self.spec.encoding):
            return
        data, row_bytes = self._bytes(codes).numpy(), codes.nbytes // codes.shape[0]
        step = max(1, ARRANGED // (PANEL * row_bytes)) * PANEL * row_bytes
        for first in range(0, data.size, step):
            part = data[first : first + step].copy()
            Panels().arrange(self.spec.encoding, part, first, data, row_bytes)
        parts = replace(codes, panels=self.spec.encoding), *companions
        self.spec, self._expanding = replace(self.spec, parts=parts), None

    def is_contiguous(self) -> bool:
        """Return True, as a contiguous tensor does."""
        return True

    def decode(self) -> Tensor:
        """Decode an encoded matrix completely, to the weight that the module would have."""
        (rows, columns), decode = self.shape, ENCODINGS[self.spec.encoding].decode
        codes, *scales = self.parts
        # Weight rows that share a row of scales: a block's, or all rows.
        units = [rows // len(scale) for scale in scales]
        unit = max((each for each in units if each < rows), default=1)
        step = unit * max(1, CHUNK // (columns * unit))
        out = torch.empty(rows, columns, dtype=self.dtype)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            some = [s[start // n : -(-stop // n)] for s, n in zip(scales, units, strict=True)]
            shape = (stop - start, columns)
            out[start:stop] = decode([codes[start:stop], *some], shape, self.dtype)
        return out

    def rows(self, first: int, count: int) -> Tensor:
        """Decode the `count` consecutive rows from row `first` on: [count, inputs]."""
        return self._expand(count, first, None)

    def look_up(self, ids: Tensor) -> Tensor:
        """Decode the rows of an encoded matrix whose numbers are in `ids`, of any shape.

        Return [*ids.shape, inputs]. Raises IndexError for numbers out of range.
        """
        numbers = ids.reshape(-1).tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.shape[0]:
            first, last = min(numbers), max(numbers)
            raise IndexError(
                f"row numbers {first} to {last}, but the matrix has {self.shape[0]} rows"
            )
        index = array("q", numbers)
        return self._expand(len(numbers), 0, index).view(*ids.shape, self.shape[1])

    def _expand(self, count: int, first: int, index: array[int] | None) -> Tensor:
        if self._expanding is None:
            self._expanding = MatrixRecord(self, kernels="rounded")
        columns = self.shape[1]
        out = torch.empty(count, columns, dtype=self.dtype)
        stride = 4 * FEW * columns + product_scratch(columns)
        call = library().structure("ExpandCall")(
            matrix=self._expanding.address,
            rows=count,
            columns=columns,
            first=first,
            index=index.buffer_info()[0] if index else None,
            out=out.data_ptr(),
            scratch=thread_scratch(stride),
            stride=stride,
        )
        kernel_entry("expand_rows", self.dtype)(addressof(call), count * columns > 1 << 17)
        return out


class JoinedMatrix:
    """A dense weight matrix [outputs, inputs] whose rows are in several matrices.

    It has the attributes of the tensor that it decodes to: `shape`, `dtype` and `device`.

    parts:  the matrices, encoded or plain
    places: for each part, the row in the weight matrix of each of its rows
    """

    def __init__(self, parts: Sequence[StoredMatrix | Tensor], places: Sequence[Tensor]) -> None:
        """Describe a matrix in parts; plain ones are on the meta device until they are loaded."""
        self.parts, self.places = list(parts), tuple(places)
        self.dtype = parts[0].dtype
        self.shape = torch.Size((sum(map(len, places)), parts[0].shape[1]))
        self.nbytes = sum(part.nbytes for part in parts)

    @property
    def device(self) -> torch.device:
        """Return the device of the parts: meta before they are loaded."""
        return self.parts[0].device

    def is_contiguous(self) -> bool:
        """Return False: compiled kernels read the parts, not the matrix."""
        return False

    def decode(self) -> Tensor:
        """Decode the parts, and join them to the weight that the module would have."""
        out = torch.empty(self.shape, dtype=self.dtype)
        for part, places in zip(self.parts, self.places, strict=True):
            out[places] = part if isinstance(part, Tensor) else part.decode()
        return out


class MatrixRecord:
    """The description of a weight matrix that compiled kernels read, at `address`."""

    def __init__(self, weight: Tensor | StoredMatrix, kernels: str = "native") -> None:
        """Describe a weight matrix, encoded or plain, for compiled kernels.

        kernels: products with an encoded one: native, precise or rounded (matrix.py)
        """
        self._record = library().structure("Matrix")()
        self.address = addressof(self._record)
        if isinstance(weight, StoredMatrix):
            self._product = MatrixProduct(weight.spec, weight.dtype, kernels)
            self._record.format, self._record.layout = self._product.arguments
        self.point_to(weight)

    def point_to(self, weight: Tensor | StoredMatrix) -> None:
        """Describe a matrix of the same form in other memory."""
        self._record.base = (
            weight.address if isinstance(weight, StoredMatrix) else weight.data_ptr()
        )


def stored_matrix(module: nn.Module) -> StoredMatrix | JoinedMatrix | None:
    """Return the encoded matrix that a module has in place of its weight, or None."""
    return module.__dict__.get(STORED)


def weight_matrix(module: nn.Module) -> Any:
    """Return a linear module's weight, or the encoded matrix in its place."""
    return stored_matrix(module) or module._parameters["weight"]


def attach_matrix(module: nn.Module, stored: StoredMatrix | JoinedMatrix) -> None:
    """Replace a module's weight by a matrix in its checkpoint's encoding.

    The parameter `weight` becomes None.
    """
    module.register_parameter("weight", None)
    module.__dict__[STORED] = stored


def restore_weights(model: nn.Module) -> None:
    """Replace all encoded matrices of a model by decoded weight parameters.

    Modules that shared an encoded matrix share the parameter.
    """
    parameters: dict[StoredMatrix | JoinedMatrix, nn.Parameter] = {}
    for module in model.modules():
        stored = module.__dict__.pop(STORED, None)
        if stored is None:
            continue
        if stored not in parameters:
            parameters[stored] = nn.Parameter(stored.decode(), requires_grad=False)
        module.register_parameter("weight", parameters[stored])


def dense_bytes(model: nn.Module) -> int:
    """Return the size in bytes of a model's parameters, buffers and encoded matrices.

    A tensor that several modules share counts once. Tensors on the meta device do not count.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sizes: dict[object, int] = {
        (t.data_ptr(), t.nbytes): t.nbytes for t in tensors if t.device.type != "meta"
    }
    for matrix in _matrices(model):
        sizes[matrix] = matrix.nbytes
    return sum(sizes.values())


def _matrices(model: nn.Module) -> Iterator[StoredMatrix | JoinedMatrix]:
    for module in model.modules():
        if (matrix := stored_matrix(module)) is not None:
            yield matrix


def encoded_matrices(model: nn.Module) -> list[StoredMatrix]:
    """List a model's matrices in their checkpoint's encoding, parts of joined ones too."""
    matrices = dict[StoredMatrix, None]()
    for matrix in _matrices(model):
        parts = matrix.parts if isinstance(matrix, JoinedMatrix) else [matrix]
        matrices.update((part, None) for part in parts if isinstance(part, StoredMatrix))
    return list(matrices)


def any_stored(weights: Sequence[Tensor | StoredMatrix]) -> bool:
    """Check whether any of some weight matrices is in its checkpoint's encoding."""
    return any(isinstance(weight, StoredMatrix) for weight in weights)


def all_readable(weights: Sequence[Tensor | StoredMatrix]) -> bool:
    """Check that compiled kernels can read all of some weight matrices."""
    stored = (weight for weight in weights if isinstance(weight, StoredMatrix))
    return not any(unsupported_reason(weight.spec) for weight in stored)


def expanded_bytes(model: nn.Module) -> int:
    """Return the largest number of weight bytes that are decoded at once for many tokens."""
    sizes = (m.shape.numel() * m.dtype.itemsize for m in _matrices(model))
    return max((min(size, EXPANDED) for size in sizes), default=0)


def product_scratch(columns: int) -> int:
    """Return how many bytes of scratch memory a product with an encoded matrix needs."""
    return 26 * columns + 4096


def thread_scratch(stride: int) -> int:
    """Return the address of the calling thread's scratch memory for compiled dense layers.

    Each of torch's OpenMP threads uses `stride` bytes from the address on. The calling thread's
    later calls reuse the memory, which moves when it grows.
    """
    size = stride * torch.get_num_threads()
    memory: Tensor | None = getattr(_local, "memory", None)
    if memory is None or memory.numel() < size:
        memory = _local.memory = torch.empty(size, dtype=torch.uint8)
    return memory.data_ptr()
