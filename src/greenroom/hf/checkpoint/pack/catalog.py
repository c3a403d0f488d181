"""The catalog of a pack: where its experts lie, whole, cut in two, or beside copies of them."""

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
from greenroom.hf.checkpoint.pack.copies import contiguous_copy, nesting_of
from greenroom.hf.checkpoint.pack.crc import combine_crc32
from greenroom.hf.checkpoint.pack.format import DATA, PackHeader, PackLayer
from greenroom.runtime.slots.nested_planes import NestedLayout

Span = tuple[int, int, tuple[Copy, ...]]  # (first byte in an expert's run, bytes, where they go)


@dataclass(frozen=True)
class PackCatalog(Catalog):
    """The experts of a pack, whole or cut in two.

    spans: of each layer, the kinds of pieces that are read by themselves. The id of a piece is that
           of its expert, plus the number of all experts for each kind before its own
    cuts:  of each layer the segments of the top; there are bottoms where it has more. Pieces are
           then tops and bottoms
    """

    header: PackHeader
    folder: Path
    spans: tuple[tuple[Span, ...], ...]
    cuts: tuple[int, ...] = ()

    @property
    def pieces(self) -> list[int]:
        """The ids of what is read by itself."""
        kinds = range(len(self.spans[0]) * self.experts)
        return [piece for piece in kinds if self._at(piece)[2][1]]

    def piece_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of a piece of each kind, by layer."""
        return tuple(zip(*([n for _, n, _ in layer] for layer in self.spans), strict=True))

    def cut_at(self, cuts: Sequence[int]) -> PackCatalog:
        """The same with tops of so many segments, by layer."""
        spans = []
        for layout, cut in zip(self.layouts, cuts, strict=True):
            ends = [segment.offset for segment in layout.segments] + [layout.nbytes]
            spans.append((_run(0, ends[cut]), _run(ends[cut], layout.nbytes - ends[cut])))
        return replace(self, spans=tuple(spans), cuts=tuple(cuts))

    def _at(self, piece: int) -> tuple[PackLayer, int, Span]:
        """(the layer, the expert's number in it, the span) of a piece."""
        kind, expert_id = divmod(piece, self.experts)
        layer = self.layer_of(expert_id)
        return self.header.layers[layer], expert_id - self.offsets[layer], self.spans[layer][kind]

    def extents(self, expert_id: int) -> tuple[Extent, ...]:
        """Of a piece."""
        layer, expert, (begin, n, copies) = self._at(expert_id)
        return (Extent(0, layer.place(expert) + begin, n, copies),)

    def checksum(self, piece: int) -> int:
        """The CRC-32 of a piece's bytes."""
        layer, expert, (begin, n, _) = self._at(piece)
        whole = 0
        for (at, length), crc in zip(layer.runs, layer.checksums(expert), strict=True):
            if begin <= at < begin + n:
                whole = combine_crc32(whole, crc, length)
        return whole

    @property
    def kind(self) -> str:
        """What the experts were packed to, and of which model."""
        return f"{self.header.kind} from {self.header.source.model}"

    def damage_message(self, piece: int) -> str:
        """What to say of a piece whose checksum is wrong."""
        layer, expert, _ = self._at(piece)
        return (
            f"{self.folder / DATA}: expert {expert} of {layer.name} is damaged (its checksum is"
            f" wrong): `{self.header.command(self.folder, '--repair')}` makes it anew"
        )


@dataclass(frozen=True)
class CopiesCatalog(PackCatalog):
    """The catalog of a pack with low-precision copies. Pieces are exact experts, then a copy of
    each, then, where they are nested, what each copy lacks."""

    nestings: tuple[NestedLayout, ...] = ()

    @property
    def layers_with_copies(self) -> tuple[PackLayer, ...]:
        """The header's layers, whose `low_copy` says what copies are."""
        return self.header.layers

    def copy_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of an exact expert, a copy, and what it lacks (nothing where they are not nested),
        by layer."""
        made = self.piece_bytes()
        return made if len(made) == 3 else (*made, ())


def catalog_of(
    header: PackHeader, folder: Path, dtypes: Sequence[Mapping[str, str]] | None = None
) -> PackCatalog:
    """The catalog of a pack for a model whose expert parameters have these dtypes, by layer.

    They are the pack's own unless a user asks for another one: then plain tensors are cast on their
    way into the slot.
    """
    layouts: list[SlotLayout] = []
    spans: list[tuple[Span, ...]] = []
    nestings: list[NestedLayout] = []
    for number, layer in enumerate(header.layers):
        layout, copies = _slot(layer.layout, dtypes[number] if dtypes is not None else {})
        if layer.layout.segments and layout is not layer.layout:
            raise UsageError(
                f"{folder}: a pack in segments computes in {header.dtype}: leave out --dtype"
            )
        layouts.append(layout)
        low_copy = layer.low_copy
        if low_copy is None:
            spans.append(((0, layer.layout.nbytes, copies),))
            continue
        at, n = low_copy.stride, low_copy.remainder_bytes(layer.layout)
        if low_copy.nested:
            nesting, both, rest = nesting_of(low_copy, layer.layout)
            nestings.append(nesting)
            spans.append(((0, at + n, both), _run(0, at), (at, n, rest)))
        else:
            spans.append((_run(at, n), _run(0, at)))
    kind = partial(CopiesCatalog, nestings=tuple(nestings)) if header.precision else PackCatalog
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
    """Bytes that fill a slot as they are."""
    return begin, nbytes, (contiguous_copy(0, 0, nbytes),)


def _slot(stored: SlotLayout, dtypes: Mapping[str, str]) -> tuple[SlotLayout, tuple[Copy, ...]]:
    """The layout in slots of what is stored, and the copies that fill it."""
    made = []
    for spec in stored.tensors:
        plain = stored.encodings.get(spec.name, PLAIN) == PLAIN
        made.append(
            (spec.name, spec.shape, dtypes.get(spec.name, spec.dtype) if plain else spec.dtype)
        )
    dtype = next(iter(dtypes.values()), stored.dtype)
    layout = SlotLayout.pack(made, stored.encodings, dtype)
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
