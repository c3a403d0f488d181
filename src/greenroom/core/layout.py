"""Layouts of experts: byte ranges on disk, and tensors in a memory slot.

A *catalog* answers two questions for every expert of a model: which contiguous byte ranges of
which files hold the expert (its *extents*), and how these bytes are laid out in a slot (its
*layout*). This module has no tensors: dtypes are names, as safetensors headers spell torch's
("bfloat16").

A matrix may be stored in its slot in an *encoding*: the quantised bytes of the checkpoint, which
kernels decode. Such a matrix consists of the tensor of its codes and of *companions*, which are
tensors of the same slot called `<matrix>.scale` and the like. runtime/encodings defines the meaning
of the bytes, one file for each family of encodings.

Gate and up projection, which are one matrix to transformers, may have different encodings. The
encoding of such a matrix is called `<gate's>+<up's>`; the codes of up are the tensor `<matrix>.up`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

FLOATS = ("float32", "bfloat16", "float16")  # dtypes of computation
ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
}
PLAIN = "plain"  # the encoding of a tensor of floats
# encoding -> (inputs in a block, bytes of its codes); companions are not counted
BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q5_0": (32, 22),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "q4_1": (32, 20),
    "q5_1": (32, 24),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq2_s": (256, 82),
    "iq3_xxs": (256, 98),
    "iq3_s": (256, 110),
    "iq1_s": (256, 50),
    "iq1_m": (256, 56),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "gguf_mxfp4": (32, 17),
    "gguf_nvfp4": (64, 36),
    "gguf_nvfp4_scaled": (64, 36),
    "mxfp4": (32, 16),
    "nvfp4": (16, 8),
    "ct_nvfp4": (16, 8),
    "fp8": (1, 1),
    "bf12": (2, 3),
    "int8": (1, 1),
    "int4": (2, 1),
    "symmetric4": (8, 4),
    "symmetric8": (1, 1),
    "affine4": (8, 4),
    "affine8": (1, 1),
    "indexed4": (8, 4),
    "indexed8": (1, 1),
}
# in the order of a matrix's parts; others follow
COMPANIONS = ("scale", "zero", "index", "matrix_scale")
MIXED = "+"  # between the encodings of gate and up projection
SECOND = "up"  # the codes of up, if its encoding is another than gate's
ALIGNMENT = 64  # bytes; tensors inside a slot start on a cache line


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The place of one of an expert's tensors in the expert's memory slot.

    The tensor is C-contiguous and begins at byte `offset` of the slot. With `panels`, it has the
    codes of a matrix of that encoding, whose rows lie in the order of panels, 16 at a time
    (native/formats/panel.hpp); the last rows, less than 16, lie as they do otherwise. With
    `fields`, it has the blocks of that encoding, and in a device's slot the fields of all blocks
    lie in arrays of their own (runtime/slots/block_fields.py).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    panels: str = ""
    fields: str = ""

    @property
    def nbytes(self) -> int:
        size = ITEMSIZE[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight matrix of an expert: its encoding, and the tensors that hold it.

    The tensors are in the expert's memory slot.

    shape: the shape of the tensor of a plain matrix, which is [inputs, outputs] if the module has
           `is_transposed`; for an encoded matrix always [outputs, inputs]
    dtype: the dtype of the tensor of a plain matrix; for an encoded matrix, the dtype to which
           kernels decode it
    parts: the tensor of the codes, then its companions (scales)
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[TensorSpec, ...]

    @property
    def halves(self) -> tuple[WeightSpec, ...]:
        """Return gate and up projection as two matrices if their encodings differ, else this."""
        if MIXED not in self.encoding:
            return (self,)
        shape, names = (self.shape[0] // 2, self.shape[1]), self.encoding.split(MIXED)
        return tuple(
            WeightSpec(self.name, name, shape, self.dtype, (codes,))
            for name, codes in zip(names, self.parts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a split expert: a range of its intermediate channels.

    first:  the number of its first channel
    offset: its first byte in the expert's slot
    layout: its tensors, whose offsets count from the segment's first byte
    """

    first: int
    offset: int
    layout: SlotLayout


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of an expert's tensors in its memory slot, and their bytes.

    encodings: encoding of each matrix that is not plain, by the parameter's name
    dtype:     the dtype to which kernels decode encoded matrices
    segments:  the segments of a split expert, one after another; `tensors` then describe the
               unsplit expert, and `nbytes` counts all segments
    """

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    encodings: Mapping[str, str] = field(default_factory=dict, hash=False)
    dtype: str = ""
    segments: tuple[Segment, ...] = ()

    @classmethod
    def pack(
        cls,
        tensors: Sequence[tuple[str, tuple[int, ...], str]],
        encodings: Mapping[str, str] | None = None,
        dtype: str = "",
    ) -> SlotLayout:
        """Build the slot layout of an expert from its tensors' names, shapes and dtypes.

        The tensors lie one after another, each aligned to ALIGNMENT bytes.
        """
        specs, end = [], 0
        for name, shape, tensor_dtype in tensors:
            spec = TensorSpec(name, shape, tensor_dtype, end)
            specs.append(spec)
            end = -(-(end + spec.nbytes) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(specs), end, encodings or {}, dtype)

    def __getitem__(self, name: str) -> TensorSpec:
        return next(spec for spec in self.tensors if spec.name == name)

    @property
    def stored_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors as they lie in a slot: those of all segments of a split expert."""
        if not self.segments:
            return self.tensors
        return tuple(
            replace(spec, offset=segment.offset + spec.offset)
            for segment in self.segments
            for spec in segment.layout.tensors
        )

    def weight(self, name: str) -> WeightSpec:
        """Find an expert's weight matrix by its parameter's name."""
        codes, encoding = self[name], self.encodings.get(name, PLAIN)
        if encoding == PLAIN:
            return WeightSpec(name, PLAIN, codes.shape, codes.dtype, (codes,))
        rows, width = codes.shape
        first, *others = encoding.split(MIXED)
        rows *= 1 + len(others)
        inputs, nbytes = BLOCKS[first]
        columns = width * ITEMSIZE[codes.dtype] // nbytes * inputs
        order = [f"{name}.{kind}" for kind in COMPANIONS]
        companions = [spec for spec in self.tensors if spec.name.startswith(f"{name}.")]
        companions.sort(key=lambda spec: (*order, spec.name).index(spec.name))
        return WeightSpec(name, encoding, (rows, columns), self.dtype, (codes, *companions))


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a two-dimensional strided block from a file's bytes to an expert's slot.

    Element (i, j) is read at byte `source + i * source_strides[0] + j * source_strides[1]` of the
    byte range of the file, and written at byte `target + i * target_strides[0] + j *
    target_strides[1]` of the slot. The dtypes may differ.

    If the file has the elements in a `form` of its own (runtime/slots/forms.py), they are the whole
    of a stored tensor, and `source_strides` are the tensor's bytes and 0. With `panels`, the copy
    is contiguous, and has rows of a matrix of that encoding, a multiple of 16, which it writes in
    the order of panels. With `matrix`, the copy has bytes of that tensor, which has `fields`: a
    device separates them.
    """

    source: int
    target: int
    shape: tuple[int, int]
    source_strides: tuple[int, int]
    target_strides: tuple[int, int]
    source_dtype: str
    target_dtype: str
    form: str = ""
    panels: str = ""
    matrix: TensorSpec | None = None

    @property
    def contiguous(self) -> bool:
        """Tell whether a copy's source and target are contiguous, and of the same dtype."""
        size, n = ITEMSIZE[self.source_dtype], self.shape[1]
        return (
            not self.form
            and self.source_dtype == self.target_dtype
            and self.source_strides == self.target_strides == (n * size, size)
        )

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that the copy reads."""
        if self.form:
            return self.source_strides[0]
        return self.shape[0] * self.shape[1] * ITEMSIZE[self.source_dtype]

    def moved(self, by: int) -> Copy:
        """Return a copy that writes the same bytes some bytes further in the slot."""
        spec = self.matrix
        matrix = None if spec is None else replace(spec, offset=spec.offset + by)
        return replace(self, target=self.target + by, matrix=matrix)


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range of a file, and its copies to an expert's slot.

    If all of its copies are contiguous, an extent may be read in chunks of any size; otherwise it
    is read as a whole.
    """

    file: int
    offset: int
    length: int
    copies: tuple[Copy, ...]

    @property
    def divisible(self) -> bool:
        return all(copy.contiguous for copy in self.copies)


Conversion: TypeAlias = Callable[[int, tuple[Copy, ...]], tuple[Copy, ...]]


@dataclass(frozen=True)
class Catalog:
    """The catalog of a checkpoint's experts: byte ranges in files, and layouts in memory.

    files:   the paths of the checkpoint's files
    layers:  the name of each layer's experts module
    offsets: `offsets[layer] + expert` is an expert's dense id, [layers + 1]
    layouts: for each layer, the layout of an expert in its memory slot
    locate:  a function of a layer and an expert's number that returns the expert's extents in file
             order
    """

    files: tuple[str, ...]
    layers: tuple[str, ...]
    offsets: tuple[int, ...]
    layouts: tuple[SlotLayout, ...]
    locate: Callable[[int, int], tuple[Extent, ...]]

    @property
    def experts(self) -> int:
        """Count the experts in all layers of a checkpoint."""
        return self.offsets[-1]

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in pairwise(self.offsets))

    @cached_property
    def slot_bytes(self) -> int:
        """Return the size in bytes of a memory slot that fits any expert."""
        return max(layout.nbytes for layout in self.layouts)

    @cached_property
    def all_experts_bytes(self) -> int:
        """Return the total size in bytes of a checkpoint's experts in their memory slots."""
        each = zip(self.experts_per_layer, self.layouts, strict=True)
        return sum(n * layout.nbytes for n, layout in each)

    def layer_of(self, expert_id: int) -> int:
        return bisect_right(self.offsets, expert_id) - 1

    def extents(self, expert_id: int) -> tuple[Extent, ...]:
        layer = self.layer_of(expert_id)
        return self.locate(layer, expert_id - self.offsets[layer])

    def converted(self, layouts: Sequence[SlotLayout], convert: Conversion) -> Catalog:
        """Return a catalog of the same experts in other layouts.

        convert: a function of a layer and an extent's copies that returns the copies in their place
        """

        def locate(layer: int, expert: int) -> tuple[Extent, ...]:
            extents = self.locate(layer, expert)
            return tuple(replace(each, copies=convert(layer, each.copies)) for each in extents)

        return replace(self, layouts=tuple(layouts), locate=locate)
