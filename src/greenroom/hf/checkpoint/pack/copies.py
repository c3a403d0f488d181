"""The catalog of a pack with low-precision copies: experts, copies, and what these lack of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from greenroom.core.layout import Copy, Extent
from greenroom.hf.checkpoint.pack import catalog as plain
from greenroom.hf.checkpoint.pack.catalog import PackCatalog
from greenroom.hf.checkpoint.pack.crc import of_run
from greenroom.hf.checkpoint.pack.format import Header, Layer
from greenroom.hf.checkpoint.pack.low import as_it_is, nesting_of
from greenroom.runtime.slots.nested import Nesting

Span = tuple[int, int, tuple[Copy, ...]]  # (first byte, bytes, where they go)


@dataclass(frozen=True)
class CopiesCatalog(PackCatalog):
    """Pieces are exact experts, by their ids, then a copy of each, then, where they are nested,
    what each copy lacks. `spans` of each layer are those of the three."""

    nestings: tuple[Nesting, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()

    @property
    def pieces(self) -> list[int]:
        """The ids of what is read by itself."""
        return list(range(self.experts * len(self.spans[0])))

    @property
    def low_layers(self) -> tuple[Layer, ...]:
        """The header's layers, whose `low` says what copies are."""
        assert self.header is not None
        return self.header.layers

    def copy_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of an exact expert, a copy, and what it lacks (nothing where they are not nested),
        by layer."""
        made = tuple(zip(*([n for _, n, _ in layer] for layer in self.spans), strict=True))
        return made if len(made) == 3 else (*made, ())

    def extents(self, expert_id: int) -> tuple[Extent, ...]:
        """Of a piece."""
        (whole,) = super().extents(expert_id % self.experts)
        begin, n, copies = self._at(expert_id)
        return (Extent(whole.file, whole.offset + begin, n, copies),)

    def checksum(self, piece: int) -> int:
        """The CRC-32 of a piece's bytes."""
        assert self.header is not None
        layer, expert = self.header.layer_of(piece % self.experts)
        begin, n, _ = self._at(piece)
        return of_run(layer.runs, layer.checksums(expert), begin, begin + n)

    def _at(self, piece: int) -> Span:
        kind, expert = divmod(piece, self.experts)
        return self.spans[self.layer_of(expert)][kind]


def catalog_of(header: Header, folder: Path, dtypes: Sequence[Mapping[str, str]]) -> PackCatalog:
    """The catalog of a pack, with or without copies (see `catalog.catalog_of`)."""
    made = plain.catalog_of(header, folder, dtypes)
    if not header.precision:
        return made
    spans: list[tuple[Span, ...]] = []
    nestings: list[Nesting] = []
    for layer in header.layers:
        assert layer.low is not None
        at, n = layer.low.stride, layer.low.beside(layer.layout)
        copy = (0, at, (as_it_is(0, 0, at),))
        if layer.low.nested:
            nesting, both, rest = nesting_of(layer.low, layer.layout)
            nestings.append(nesting)
            spans.append(((0, at + n, both), copy, (at, n, rest)))
        else:
            spans.append(((at, n, (as_it_is(0, 0, n),)), copy))
    return CopiesCatalog(
        made.files, made.layers, made.offsets, made.layouts, made.locate, header, folder, (),
        tuple(nestings), tuple(spans),
    )  # fmt: skip
