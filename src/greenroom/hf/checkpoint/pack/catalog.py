"""The catalog of a pack: the byte ranges of its experts, and their layouts in memory.

A pack is a model in Greenroom's own file format. What is read as a unit is called a piece: an
expert, one of the two segments of a split expert, or a low-precision copy of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from greenroom.core.layout import (
    ITEMSIZE,
    PLAIN,
    Catalog,
    Conversion,
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
    """The catalog of a pack's experts: their byte ranges, and their layouts in memory.

    Experts may be split into a top and a bottom segment, which are read separately. A piece is an
    expert, or the top or bottom segment of a split expert. A piece's id is the expert's id plus,
    for bottom segments, the number of all experts.

    spans: the place of each kind of piece in an expert's bytes, by [layer][kind]
    cuts:  for each layer, how many of an expert's stored segments make up the top segment; empty if
           experts are not split. If that is all of them, the layer's bottom segments are empty
    """

    header: PackHeader
    folder: Path
    spans: tuple[tuple[Span, ...], ...]
    cuts: tuple[int, ...] = ()

    @property
    def pieces(self) -> list[int]:
        """Ids of a pack's experts, expert segments and copies that are not empty."""
        kinds = range(len(self.spans[0]) * self.experts)
        return [piece for piece in kinds if self._position_of(piece)[2][1]]

    def piece_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of an expert, expert segment or copy, by [kind][layer].

        The kinds are top and bottom segments if experts are split; experts and copies (and
        remainders, if copies are nested) if the pack has low-precision copies; else only experts.
        """
        return tuple(zip(*([n for _, n, _ in layer] for layer in self.spans), strict=True))

    def cut_at(self, cuts: Sequence[int]) -> PackCatalog:
        """Return a pack's catalog with every expert split into a top and a bottom segment.

        `cuts` gives, for each layer, how many of an expert's stored segments form its top segment.
        """
        spans = []
        for layout, cut in zip(self.layouts, cuts, strict=True):
            ends = [segment.offset for segment in layout.segments] + [layout.nbytes]
            spans.append((_run(0, ends[cut]), _run(ends[cut], layout.nbytes - ends[cut])))
        return replace(self, spans=tuple(spans), cuts=tuple(cuts))

    def converted(self, layouts: Sequence[SlotLayout], convert: Conversion) -> PackCatalog:
        spans = tuple(
            tuple(
                (begin, n, self._converted(layer, kind, convert))
                for kind, (begin, n, _) in enumerate(kinds)
            )
            for layer, kinds in enumerate(self.spans)
        )
        return replace(self, layouts=tuple(layouts), spans=spans)

    def _converted(self, layer: int, kind: int, convert: Conversion) -> tuple[Copy, ...]:
        """Return a piece's copies, converted at their places in an unsplit expert."""
        begin, _, copies = self.spans[layer][kind]
        start = begin if self.cuts else 0  # of the slot, in the unsplit expert's
        placed = convert(layer, tuple(copy.moved(start) for copy in copies))
        return tuple(copy.moved(-start) for copy in placed)

    def _position_of(self, piece: int) -> tuple[PackLayer, int, Span]:
        """Return a piece's layer, its expert's index in that layer, and its span."""
        kind, expert_id = divmod(piece, self.experts)
        layer = self.layer_of(expert_id)
        return self.header.layers[layer], expert_id - self.offsets[layer], self.spans[layer][kind]

    def extents(self, expert_id: int) -> tuple[Extent, ...]:
        """Return the byte ranges to read for an expert, expert segment or low-precision copy.

        `expert_id` is its id; segments and copies have ids of their own.
        """
        layer, expert, (begin, n, copies) = self._position_of(expert_id)
        return (Extent(0, layer.place(expert) + begin, n, copies),)

    def checksum(self, piece: int) -> int:
        """Return the CRC-32 that a pack's header has for an expert, segment or copy.

        `piece` is its id; segments and copies have ids of their own.
        """
        layer, expert, (begin, n, _) = self._position_of(piece)
        combined = 0
        for (at, length), crc in zip(layer.runs, layer.checksums(expert), strict=True):
            if begin <= at < begin + n:
                combined = combine_crc32(combined, crc, length)
        return combined

    @property
    def kind(self) -> str:
        """The encoding of a pack's experts and its source model, as in "int4 from owner/name"."""
        return f"{self.header.kind} from {self.header.source.model}"

    def damage_message(self, piece: int) -> str:
        """Return the error message for a damaged expert, with the command that repairs it.

        `piece` is the id of the expert, of one of its segments, or of its low-precision copy.
        """
        layer, expert, _ = self._position_of(piece)
        return (
            f"{self.folder / DATA}: expert {expert} of {layer.name} is damaged (its checksum is"
            f" wrong): to repair the pack, run `{self.header.command(self.folder, '--repair')}`"
        )


@dataclass(frozen=True)
class CopiesCatalog(PackCatalog):
    """The catalog of a pack that has low-precision copies of its experts.

    A read transfers an exact expert, its copy, or, if copies are nested, the remainder. A nested
    copy contains some bits of the exact expert's codes; the remainder is the other bits.
    `nested_layouts` has an entry for each layer if copies are nested, else it is empty.
    """

    nested_layouts: tuple[NestedLayout, ...] = ()

    def _converted(self, layer: int, kind: int, convert: Conversion) -> tuple[Copy, ...]:
        """Return a piece's copies; those of low-precision copies are as they were."""
        copies = self.spans[layer][kind][2]
        return copies if kind else convert(layer, copies)

    @property
    def layers_with_copies(self) -> tuple[PackLayer, ...]:
        """The layers of a pack with low-precision copies; each one's `low_copy` describes them."""
        return self.header.layers

    def copy_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Return the sizes in bytes of exact experts, low-precision copies and remainders.

        Each is a tuple with an entry for each layer. A nested copy contains some bits of the exact
        expert, and the remainder is the other bits; its tuple is empty if copies are not nested.
        """
        sizes = self.piece_bytes()
        return sizes if len(sizes) == 3 else (*sizes, ())


def catalog_of(
    header: PackHeader, folder: Path, dtypes: Sequence[Mapping[str, str]] | None = None
) -> PackCatalog:
    """Make the catalog of a pack from the pack's header.

    `dtypes` maps, for each layer, the names of expert parameters to dtypes in memory: unquantised
    tensors of another dtype are cast when they are loaded. None keeps the pack's dtypes. Raises
    UsageError for another dtype if the pack's experts are stored in segments.
    """
    layouts: list[SlotLayout] = []
    spans: list[tuple[Span, ...]] = []
    nested_layouts: list[NestedLayout] = []
    for number, layer in enumerate(header.layers):
        layout, copies = _slot(layer.layout, dtypes[number] if dtypes is not None else {})
        if layer.layout.segments and layout is not layer.layout:
            raise UsageError(
                f"{folder}: this pack was made with --segments, so its model computes only in"
                f" {header.dtype}: leave out --dtype"
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
    """Make a span of a packed expert's bytes that is copied to a memory slot unchanged."""
    return begin, nbytes, (contiguous_copy(0, 0, nbytes),)


def _slot(stored: SlotLayout, dtypes: Mapping[str, str]) -> tuple[SlotLayout, tuple[Copy, ...]]:
    """Return a packed expert's layout in a memory slot, and the copies that fill the slot."""
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
