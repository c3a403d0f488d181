"""The catalog of a pack: where its experts lie, whole or cut in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from greenroom.hf.checkpoint.pack.crc import of_run
from greenroom.hf.checkpoint.pack.format import DATA, Header
from greenroom.hf.checkpoint.pack.low import as_it_is


@dataclass(frozen=True)
class PackCatalog(Catalog):
    """The experts of a pack, whole or cut in two.

    cuts: of each layer the segments of the top; there are bottoms where it has more. Pieces are
          then tops, by their experts' ids, and bottoms after them
    """

    header: Header | None = None
    folder: Path = Path()
    cuts: tuple[int, ...] = ()

    @property
    def pieces(self) -> list[int]:
        """The ids of what is read by itself."""
        tops = list(range(self.experts))
        return tops + [self.experts + e for e in tops if self._span(self.experts + e)[1]]

    def cut_at(self, cuts: Sequence[int]) -> PackCatalog:
        """The same with tops of so many segments, by layer."""
        return replace(self, cuts=tuple(cuts))

    def part_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of a top and of a bottom, by layer."""
        tops = tuple(self._span(first)[1] for first in self.offsets[:-1])
        whole = tuple(layout.nbytes for layout in self.layouts)
        return tops, tuple(n - top for n, top in zip(whole, tops, strict=True))

    def _span(self, piece: int) -> tuple[int, int]:
        """(first byte within its expert, bytes) of a piece."""
        part, expert = divmod(piece, self.experts)
        layer = self.layer_of(expert)
        layout = self.layouts[layer]
        if not self.cuts:
            return (0, layout.nbytes) if part == 0 else (layout.nbytes, 0)
        ends = [segment.offset for segment in layout.segments] + [layout.nbytes]
        at = ends[self.cuts[layer]]
        return (0, at) if part == 0 else (at, layout.nbytes - at)

    def extents(self, expert_id: int) -> tuple[Extent, ...]:
        """Of an expert, or of a piece where experts are cut."""
        (whole,) = super().extents(expert_id % self.experts)
        if not self.cuts:
            return (whole,)
        begin, n = self._span(expert_id)
        return (Extent(whole.file, whole.offset + begin, n, (as_it_is(0, 0, n),)),)

    def checksum(self, piece: int) -> int:
        """The CRC-32 of a piece's bytes."""
        assert self.header is not None
        layer, expert = self.header.layer_of(piece % self.experts)
        begin, n = self._span(piece)
        return of_run(layer.runs, layer.checksums(expert), begin, begin + n)

    @property
    def kind(self) -> str:
        """What the experts were packed to, and of which model."""
        assert self.header is not None
        return f"{self.header.kind} from {self.header.source.model}"

    def damaged(self, expert_id: int) -> str:
        """What to say of an expert whose checksum is wrong."""
        assert self.header is not None
        layer, expert = self.header.layer_of(expert_id)
        return (
            f"{self.folder / DATA}: expert {expert} of {layer.name} is damaged (its checksum is"
            f" wrong): `{self.header.command(self.folder, '--repair')}` makes it anew"
        )


def catalog_of(header: Header, folder: Path, dtypes: Sequence[Mapping[str, str]]) -> PackCatalog:
    """The catalog of a pack for a model whose expert parameters have these dtypes, by layer.

    They are the pack's own unless a user asks for another one: then plain tensors are cast on their
    way into the slot.
    """
    layouts, copies = [], []
    for layer, wanted in zip(header.layers, dtypes, strict=True):
        layout, plan = _slot(layer.layout, wanted)
        if layer.layout.segments and layout is not layer.layout:
            raise UsageError(
                f"{folder}: a pack in segments computes in {header.dtype}: leave out --dtype"
            )
        layouts.append(layout)
        copies.append(plan)

    def locate(layer: int, expert: int) -> tuple[Extent, ...]:
        own = header.layers[layer]
        return (Extent(0, own.place(expert), own.layout.nbytes, copies[layer]),)

    return PackCatalog(
        files=(str(folder / DATA),),
        layers=tuple(layer.name for layer in header.layers),
        offsets=header.offsets,
        layouts=tuple(layouts),
        locate=locate,
        header=header,
        folder=folder,
    )


def _slot(stored: SlotLayout, dtypes: Mapping[str, str]) -> tuple[SlotLayout, tuple[Copy, ...]]:
    """The layout in slots of what is stored, and the copies that fill it."""
    made = []
    for spec in stored.tensors:
        plain = spec.name in dtypes and stored.encodings.get(spec.name, PLAIN) == PLAIN
        made.append((spec.name, spec.shape, dtypes[spec.name] if plain else spec.dtype))
    dtype = next(iter(dtypes.values()))
    layout = SlotLayout.pack(made, stored.encodings, dtype)
    if layout.tensors == stored.tensors:
        n = stored.nbytes
        if stored.segments and dtype == stored.dtype:
            layout = stored
        return layout, (as_it_is(0, 0, n),)
    return layout, tuple(_cast(a, b) for a, b in zip(stored.tensors, layout.tensors, strict=True))


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
