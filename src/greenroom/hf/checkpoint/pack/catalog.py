"""The catalog of a pack: byte ranges of unsplit experts, split experts, or experts and copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from greenroom.core.layout import (
    ITEMSIZE,
    PLAIN,
    Catalog,
    Copy,
    Extent,
    SlotLayout,
    TensorSpec,
)
from greenroom.errors import UsageError
from greenroom.hf.checkpoint.pack.copies import contiguous_copy, nested_slot_of
from greenroom.hf.checkpoint.pack.crc import combine_crc32
from greenroom.hf.checkpoint.pack.format import DATA, PackHeader, PackLayer
from greenroom.runtime.slots.nested_planes import NestedLayout

Span = tuple[int, int, tuple[Copy, ...]]  # (first byte in an expert's run, bytes, copies to a slot)


@dataclass(frozen=True)
class PackCatalog(Catalog):
    """The catalog of a pack's experts, unsplit or split into top and bottom segments.

    spans: for each layer, one span for each kind of piece. A piece's id is its expert's id plus,
           for each kind before its own, the number of all experts
    cuts:  for each layer, the number of segments of a top, where experts are split; pieces are then
           tops and bottoms, and layers with no more segments than that have no bottoms
    """

    header: PackHeader
    folder: Path
    spans: tuple[tuple[Span, ...], ...]
    cuts: tuple[int, ...] = ()

    @property
    def pieces(self) -> list[int]:
        """The ids of all non-empty pieces (experts, segments or copies) of a pack."""
        kinds = range(len(self.spans[0]) * self.experts)
        return [piece for piece in kinds if self._position_of(piece)[2][1]]

    def piece_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of one piece (expert, segment or copy), by [kind][layer]."""
        return tuple(zip(*([n for _, n, _ in layer] for layer in self.spans), strict=True))

    def cut_at(self, cuts: Sequence[int]) -> PackCatalog:
        """Return the pack's catalog with every expert split into top and bottom segments.

        `cuts` has the number of segments of a top, by layer.
        """
        spans = []
        for layout, cut in zip(self.layouts, cuts, strict=True):
            ends = [segment.offset for segment in layout.segments] + [layout.nbytes]
            spans.append((_run(0, ends[cut]), _run(ends[cut], layout.nbytes - ends[cut])))
        return replace(self, spans=tuple(spans), cuts=tuple(cuts))

    def _position_of(self, piece: int) -> tuple[PackLayer, int, Span]:
        """Return a piece's layer, its expert's index in that layer, and its span."""
        kind, expert_id = divmod(piece, self.experts)
        layer = self.layer_of(expert_id)
        return self.header.layers[layer], expert_id - self.offsets[layer], self.spans[layer][kind]

    def extents(self, expert_id: int) -> tuple[Extent, ...]:
        """Return the byte ranges to read for a piece, given the piece's id."""
        layer, expert, (begin, n, copies) = self._position_of(expert_id)
        return (Extent(0, layer.place(expert) + begin, n, copies),)

    def checksum(self, piece: int) -> int:
        """Return the CRC-32 of the bytes of a piece (expert, segment or copy)."""
        layer, expert, (begin, n, _) = self._position_of(piece)
        combined = 0
        for (at, length), crc in zip(layer.runs, layer.checksums(expert), strict=True):
            if begin <= at < begin + n:
                combined = combine_crc32(combined, crc, length)
        return combined

    @property
    def kind(self) -> str:
        """Text that names the encoding of a pack's experts and the pack's source model."""
        return f"{self.header.kind} from {self.header.source.model}"

    def damage_message(self, piece: int) -> str:
        """Return the error message for a piece (expert, segment or copy) with a wrong checksum."""
        layer, expert, _ = self._position_of(piece)
        return (
            f"{self.folder / DATA}: expert {expert} of {layer.name} is damaged (its checksum is"
            f" wrong): `{self.header.command(self.folder, '--repair')}` repairs it"
        )


@dataclass(frozen=True)
class CopiesCatalog(PackCatalog):
    """The catalog of a pack that has low-precision copies of its experts.

    Kinds of pieces: exact experts, copies, and the remainders of nested copies.
    """

    nested_layouts: tuple[NestedLayout, ...] = ()

    @property
    def layers_with_copies(self) -> tuple[PackLayer, ...]:
        """The layers of a pack with low-precision copies.

        Their `low_copy` describes the copies.
        """
        return self.header.layers

    def copy_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of exact experts, low-precision copies and remainders, by [kind][layer].

        The remainders are an empty tuple where copies are not nested.
        """
        sizes = self.piece_bytes()
        return sizes if len(sizes) == 3 else (*sizes, ())


def catalog_of(
    header: PackHeader, folder: Path, dtypes: Sequence[Mapping[str, str]] | None = None
) -> PackCatalog:
    """Make the catalog of a pack from the pack's header.

    `dtypes` are those of the expert parameters, by layer.

    They are the pack's unless the user sets another dtype: then plain tensors are cast on their way
    into the slot.
    """
    layouts: list[SlotLayout] = []
    spans: list[tuple[Span, ...]] = []
    nested_layouts: list[NestedLayout] = []
    for number, layer in enumerate(header.layers):
        layout, copies = _slot(layer.layout, dtypes[number] if dtypes is not None else {})
        if layer.layout.segments and layout is not layer.layout:
            raise UsageError(
                f"{folder}: a pack with segments computes in {header.dtype}: leave out --dtype"
            )
        layouts.append(layout)
        low_copy = layer.low_copy
        if low_copy is None:
            spans.append(((0, layer.layout.nbytes, copies),))
            continue
        at, n = low_copy.stride, low_copy.remainder_bytes(layer.layout)
        if low_copy.nested:
            nested, both, remainder = nested_slot_of(low_copy, layer.layout)
            nested_layouts.append(nested)
            spans.append(((0, at + n, both), _run(0, at), (at, n, remainder)))
        else:
            spans.append((_run(at, n), _run(0, at)))
    kind = (
        partial(CopiesCatalog, nested_layouts=tuple(nested_layouts))
        if header.precision
        else PackCatalog
    )
    return kind(
        files=(str(folder / DATA),),
        layers=tuple(layer.name for layer in header.layers),
        offsets=header.offsets,
        layouts=tuple(layouts),
        locate=lambda layer, expert: (),
        header=header,
        folder=folder,
        spans=tuple(spans),
    )


def _run(begin: int, nbytes: int) -> Span:
    """Make a span of a packed expert's bytes that is copied to a slot unchanged."""
    return begin, nbytes, (contiguous_copy(0, 0, nbytes),)


def _slot(stored: SlotLayout, dtypes: Mapping[str, str]) -> tuple[SlotLayout, tuple[Copy, ...]]:
    """Return a packed expert's layout in a slot, and the copies that fill the slot."""
    tensors = []
    for spec in stored.tensors:
        plain = stored.encodings.get(spec.name, PLAIN) == PLAIN
        tensors.append(
            (spec.name, spec.shape, dtypes.get(spec.name, spec.dtype) if plain else spec.dtype)
        )
    dtype = next(iter(dtypes.values()), stored.dtype)
    layout = SlotLayout.pack(tensors, stored.encodings, dtype)
    if layout.tensors == stored.tensors:
        return stored if dtype == stored.dtype else layout, (contiguous_copy(0, 0, stored.nbytes),)
    return layout, tuple(map(_cast, stored.tensors, layout.tensors))


def _cast(source: TensorSpec, target: TensorSpec) -> Copy:
    a, b = ITEMSIZE[source.dtype], ITEMSIZE[target.dtype]
    n = source.nbytes // a
    return Copy(
        source.offset,
        target.offset,
        (1, n),
        (n * a, a),
        (n * b, b),
        source.dtype,
        target.dtype,
    )
