"""Reader of greenroom.json, the header of a pack.

Offsets and sizes are computed anew from names, types and shapes; a header with other values is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from greenroom.core.layout import (
    BLOCKS,
    FLOATS,
    ITEMSIZE,
    MIXED,
    PLAIN,
    Segment,
    SlotLayout,
    WeightSpec,
)
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.header import read_errors
from greenroom.hf.checkpoint.pack import format as pack
from greenroom.hf.checkpoint.pack.copies import (
    NESTED,
    PRECISIONS,
    LowPrecisionCopy,
    codes_of,
    nested_copy_layout,
)
from greenroom.hf.checkpoint.pack.format import (
    DenseFile,
    PackHeader,
    PackLayer,
    PackSource,
    as_json,
    lay_out,
)
from greenroom.json_file import JsonObject, Malformed, integer, printable, show_value
from greenroom.json_file import read as read_json
from greenroom.runtime.encodings import companions

MOST_AXES = 4  # of a tensor


def read(folder: Path) -> PackHeader:
    """Read greenroom.json, the header of the pack in a folder.

    Raises UnsupportedModel for another version of the format, CheckpointError if the header is
    damaged or cannot be read.
    """
    path = folder / pack.HEADER
    try:
        with read_errors(path):
            raw = JsonObject(read_json(path))
        kind, version = raw.value("format", None), raw.value("version", None)
        if kind == pack.FORMAT and version not in pack.VERSIONS:
            raise UnsupportedModel(
                f"{path}: this pack has format version {printable(version)}, but this Greenroom"
                f" reads versions {pack.VERSION} to {pack.SUBSET}: make the pack again"
            )
        header = parse(raw)
    except Malformed as error:
        raise CheckpointError(
            f"{path}: this file is not a valid pack header: {error}: make the pack again"
        ) from error
    # Offsets and sizes were not read: they must be what this program would write.
    if raw.values != json.loads(json.dumps(as_json(header))):
        raise CheckpointError(
            f"{path}: damaged: the values in this file do not fit together: make the pack again"
        )
    return header


def parse(raw: JsonObject) -> PackHeader:
    """Make a pack's header from the JSON object of greenroom.json, or raise Malformed."""
    dtype = _one_of(raw.text("dtype"), FLOATS)
    layers = raw.list_of("layers", lambda value, where: _layer(JsonObject(value, where), dtype))
    header = PackHeader(
        _one_of(raw.text("experts"), pack.KINDS),
        dtype,
        _source(raw.object("source")),
        lay_out(layers),
        raw.list_of("dense", _file),
    )
    if not layers or not header.files or len({layer.name for layer in layers}) < len(layers):
        raise Malformed("the header has no layers, no dense files, or the same layer twice")
    if len({(x.low_copy.precision, x.low_copy.nested) if x.low_copy else None for x in layers}) > 1:
        raise Malformed("the layers have different low-precision copies, or only some have copies")
    if len({bool(layer.subset) for layer in layers}) > 1:
        raise Malformed("only some layers say which experts are packed")
    return header


def _source(raw: JsonObject) -> PackSource:
    source = PackSource(**raw.fields_of(PackSource))
    if not source.model.isprintable():  # messages name it
        raise Malformed(f"source.model is {show_value(source.model)}, but must be in one line")
    return source


def _file(value: Any, where: str) -> DenseFile:
    file = DenseFile(**JsonObject(value, where).fields_of(DenseFile))
    if Path(file.name).name != file.name or not file.name.isprintable():
        raise Malformed(
            f"{where}.name is {show_value(file.name)}, but must be a file name without a folder"
        )
    return file


def _layer(raw: JsonObject, dtype: str) -> PackLayer:
    layout = _layout(raw, dtype)
    if "segments" in raw:
        layout = _with_segments(raw, layout)
    low_copy = _low_copy(raw.object("low"), layout) if "low" in raw else None
    experts = raw.integer("experts", least=1)
    subset, of = _subset(raw.object("subset"), experts) if "subset" in raw else ((), 0)
    crc32 = raw.list_of("crc32", integer)
    layer = PackLayer(raw.text("name"), experts, 0, layout, crc32, low_copy, subset, of)
    if len(layer.crc32) != layer.experts * len(layer.runs):
        raise Malformed(
            f"the layer {printable(layer.name)} has {len(layer.crc32)} checksums, but must have"
            f" {layer.experts * len(layer.runs)}"
        )
    return layer


def _subset(raw: JsonObject, experts: int) -> tuple[tuple[int, ...], int]:
    """Read the numbers of the packed experts in the complete model, and how many that has."""
    subset, of = raw.list_of("experts", integer), raw.integer("of", least=1)
    if len(subset) != experts or list(subset) != sorted({*subset}) or subset[-1] >= of:
        raise Malformed(
            f"the subset of a layer's experts must be {experts} ascending numbers below {of}"
        )
    return subset, of


def _layout(raw: JsonObject, dtype: str) -> SlotLayout:
    """Read the layout of a packed expert or of its low-precision copy."""
    table = raw.object("encodings")
    texts = {name: table.text(name) for name in table}
    encodings = {name: _encoding(text) for name, text in texts.items()}
    layout = SlotLayout.pack(_tensors(raw), encodings, dtype)
    names = {spec.name for spec in layout.tensors}
    others = {f"{n}.{c}" for n, e in encodings.items() for c in companions(e)}
    if not {*encodings} <= names or {n for n in names if "." in n} != others:
        raise Malformed("the tensors of an expert or copy are not those that its encodings need")
    for name, encoding in encodings.items():
        if MIXED in encoding:
            _check_mixed(layout, name, encoding)
        else:
            _check_encoded(layout, name, encoding)
    return layout


def _encoding(value: str) -> str:
    """Return an encoding's name; that of a matrix may have two, for gate and up projection."""
    names = value.split(MIXED)
    mixed = len(names) == 2 and not any(companions(_one_of(name, BLOCKS)) for name in names)
    return value if mixed else _one_of(value, BLOCKS)


def _check_mixed(layout: SlotLayout, name: str, encoding: str) -> None:
    """Raise Malformed if gate and up projection of different encodings do not fit together."""
    sizes = set()
    parts = (layout[name], layout[f"{name}.{companions(encoding)[0]}"])
    for part, each in zip(parts, encoding.split(MIXED), strict=True):
        inputs, nbytes = BLOCKS[each]
        if len(part.shape) != 2 or part.dtype != "uint8" or part.shape[1] % nbytes:
            raise Malformed(f"the codes of {printable(name)} do not fit their encoding {each}")
        sizes.add((part.shape[0], part.shape[1] // nbytes * inputs))
    if len(sizes) > 1:
        raise Malformed(f"gate and up projection of {printable(name)} have different shapes")


def _tensors(raw: JsonObject) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Read the (name, shape, dtype) of each tensor of a packed expert's layout."""
    tensors = raw.list_of("tensors", _tensor)
    if not tensors or len({name for name, *_ in tensors}) < len(tensors):
        raise Malformed("the list of an expert's tensors is empty, or has the same tensor twice")
    return tensors


def _tensor(value: Any, where: str) -> tuple[str, tuple[int, ...], str]:
    entry = JsonObject(value, where)
    shape = entry.list_of("shape", integer)
    if not 1 <= len(shape) <= MOST_AXES or 0 in shape:
        raise Malformed(
            f"{where}.shape is {list(shape[:8])}, but must have 1 to {MOST_AXES} axes, none of"
            " length 0"
        )
    return entry.text("name"), shape, _one_of(entry.text("dtype"), ITEMSIZE)


def _check_encoded(layout: SlotLayout, name: str, encoding: str) -> None:
    """Raise Malformed if the shapes of a matrix's codes and scales do not fit together."""
    inputs, nbytes = BLOCKS[encoding]
    parts = [layout[name], *(layout[f"{name}.{c}"] for c in companions(encoding))]
    if any(len(part.shape) != 2 for part in parts):
        raise Malformed(f"the codes and scales of {printable(name)} must have two axes")
    rows, width = parts[0].shape
    width *= ITEMSIZE[parts[0].dtype]
    columns = width // nbytes * inputs
    divided = all(rows % p.shape[0] == 0 and columns % p.shape[1] == 0 for p in parts[1:])
    if width % nbytes or not divided:
        raise Malformed(
            f"the shapes of the codes and scales of {printable(name)} do not fit together"
        )


def _with_segments(raw: JsonObject, layout: SlotLayout) -> SlotLayout:
    segments: list[Segment] = []
    end = 0
    for each in raw.list_of("segments", JsonObject):
        part = SlotLayout.pack(_tensors(each), layout.encodings, layout.dtype)
        segments.append(Segment(each.integer("first"), end, part))
        end += part.nbytes
    starts = [segment.first for segment in segments]
    if starts[:1] != [0] or starts != sorted({*starts}):
        raise Malformed(
            "the segments of an expert must begin at 0, and each after the one before, but begin at"
            f" {starts[:8]}"
        )
    kinds = [(spec.name, spec.dtype) for spec in layout.tensors]
    for segment in segments:
        if [(spec.name, spec.dtype) for spec in segment.layout.tensors] != kinds:
            raise Malformed("a segment must have the same tensors as its expert")
    for spec in layout.tensors:
        if sum(segment.layout[spec.name].nbytes for segment in segments) != spec.nbytes:
            raise Malformed(
                f"the bytes of the segments of {printable(spec.name)} do not add up to"
                f" {spec.nbytes}"
            )
    return SlotLayout(layout.tensors, end, layout.encodings, layout.dtype, tuple(segments))


def _low_copy(raw: JsonObject, exact: SlotLayout) -> LowPrecisionCopy:
    precision, nested = _one_of(raw.text("precision"), PRECISIONS), raw.flag("nested")
    layout = _layout(raw, exact.dtype)
    if nested:
        kinds = {exact.encodings.get(s.name) for s in codes_of(exact)}
        if (kinds, precision) != ({NESTED[0]}, NESTED[1]) or layout != nested_copy_layout(exact):
            raise Malformed(
                "copies that experts contain must be int4 copies in int8 experts, with the same"
                " matrices"
            )
    names = [spec.name for spec in codes_of(exact)]
    copies = [spec.name for spec in codes_of(layout)]
    if sorted(names) != sorted(copies) or exact.segments:
        raise Malformed(
            "low-precision copies must have the same matrices as their experts, and experts with"
            " copies must have no segments"
        )
    for name in names:
        if not _has_shape_of(layout.weight(name), exact.weight(name)):
            raise Malformed(
                f"the low-precision copy of {printable(name)} has another shape than the expert's"
            )
    return LowPrecisionCopy(precision, nested, layout)


def _has_shape_of(copy: WeightSpec, exact: WeightSpec) -> bool:
    """True if a low-precision copy has its matrix's shape; plain matrices may be transposed."""
    transposed = exact.encoding == PLAIN and copy.shape == exact.shape[::-1]
    return transposed or copy.shape == exact.shape


def _one_of(value: str, choices: Container[str]) -> str:
    if value not in choices:
        raise Malformed(f"the type or encoding {printable(value)} is unknown")
    return value
