"""Read greenroom.json: every name, number and layout in it is checked before it is used."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from greenroom.core.layout import (
    BLOCKS,
    FLOATS,
    ITEMSIZE,
    PLAIN,
    Segment,
    SlotLayout,
    TensorSpec,
    WeightSpec,
)
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.pack import format as pack
from greenroom.hf.checkpoint.pack.format import File, Header, Layer, Source
from greenroom.hf.checkpoint.pack.low import BLOCK, NESTED, PRECISIONS, Low, codes_of, nested_layout
from greenroom.json_file import INT64, JsonObject, Malformed, plain, whole
from greenroom.json_file import read as read_json
from greenroom.runtime.encodings import ENCODINGS

MOST_EXPERTS = 1 << 16  # of a layer
MOST_AXES = 4  # of a tensor
CRC32 = (1 << 32) - 1


def read(folder: Path) -> Header:
    """The header of a folder. UnsupportedModel where it is of another version, CheckpointError
    where it is damaged."""
    path = folder / pack.HEADER
    try:
        raw = JsonObject(read_json(path))
        kind, version = raw.value("format", None), raw.value("version", None)
        if kind == pack.KIND and version not in pack.VERSIONS:
            raise UnsupportedModel(
                f"{path}: a pack of version {plain(version)}: this greenroom reads {pack.VERSION}"
                f" to {pack.COPIES}"
            )
        header = _header(raw)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except Malformed as error:
        raise CheckpointError(f"{path}: damaged: not the header of a pack: {error}") from error
    if kind != pack.KIND or raw.value("identity", None) != header.identity:
        raise CheckpointError(f"{path}: damaged: its content is not what its identity says")
    return header


def _header(raw: JsonObject) -> Header:
    source, dtype = raw.object("source"), _one_of(raw.text("dtype"), FLOATS)
    layers = tuple(_layer(JsonObject(x, "a layer"), dtype) for x in _list(raw, "layers"))
    header = Header(
        _one_of(raw.text("experts"), pack.KINDS),
        dtype,
        Source(source.text("model"), source.text("fingerprint"), source.text("dense")),
        layers,
        raw.each("dense", _file),
    )
    if not layers or not header.files or len({layer.name for layer in layers}) < len(layers):
        raise Malformed("it has no layers or no dense files, or a layer twice")
    if len({(x.low.precision, x.low.nested) if x.low else None for x in layers}) > 1:
        raise Malformed("only some layers have copies")
    due = BLOCK
    for layer in layers:
        if layer.offset != due or layer.nbytes > INT64 // MOST_EXPERTS:
            raise Malformed(f"{layer.name} does not begin where the layer before it ends")
        due = layer.place(layer.experts)
    return header


def _file(value: Any, where: str) -> File:
    entry = JsonObject(value, where)
    name = entry.text("name")
    if Path(name).name != name or "\0" in name:
        raise Malformed(f"{where} is no file of this folder")
    return File(name, entry.whole("nbytes"), entry.whole("crc32", most=CRC32))


def _layer(raw: JsonObject, dtype: str) -> Layer:
    whole_layout = _layout(raw, dtype, "segments" in raw)
    if "segments" in raw:
        whole_layout = _with_segments(raw, whole_layout)
    low = None
    if "low" in raw:
        low = _low(raw.object("low"), whole_layout)
    layer = Layer(
        raw.text("name"),
        raw.whole("experts", least=1, most=MOST_EXPERTS),
        raw.whole("offset"),
        whole_layout,
        raw.each("crc32", _crc32),
        low,
    )
    if len(layer.crc32) != layer.experts * len(layer.runs):
        raise Malformed(f"{layer.name} has {len(layer.crc32)} checksums")
    return layer


def _crc32(value: Any, where: str) -> int:
    return whole(value, where, 0, CRC32)


def _layout(raw: JsonObject, dtype: str, cut: bool = False) -> SlotLayout:
    """The layout of an expert or of its copy; where it is `cut`, no byte is at its tensors."""
    given = raw.object("encodings")
    encodings = {name: _one_of(given.text(name), BLOCKS) for name in given}
    layout = _packed(raw, encodings, dtype)
    if not cut:
        _check_packed(layout, raw.whole("bytes"))
    names = {spec.name for spec in layout.tensors}
    companions = {f"{n}.{c}" for n, e in encodings.items() for c in ENCODINGS[e].companions}
    if not {*encodings} <= names or {n for n in names if "." in n} != companions:
        raise Malformed("its tensors are not those that its encodings need")
    for name, encoding in encodings.items():
        _check_encoded(layout, name, encoding)
    return layout


def _packed(raw: JsonObject, encodings: dict[str, str], dtype: str) -> SlotLayout:
    specs = tuple(_spec(JsonObject(each, "a tensor")) for each in _list(raw, "tensors"))
    if not specs or len({spec.name for spec in specs}) < len(specs):
        raise Malformed("it has no tensors, or one twice")
    return SlotLayout(specs, raw.whole("bytes"), encodings, dtype)


def _spec(entry: JsonObject) -> TensorSpec:
    shape = entry.each("shape", whole)
    dtype = _one_of(entry.text("dtype"), ITEMSIZE)
    if not 1 <= len(shape) <= MOST_AXES or 0 in shape or prod(shape) > INT64 // MOST_EXPERTS:
        raise Malformed(f"a tensor has the shape {list(shape[:8])}")
    return TensorSpec(entry.text("name"), shape, dtype, entry.whole("offset"))


def _check_packed(layout: SlotLayout, nbytes: int) -> None:
    """Malformed where tensors do not lie one after another, each aligned."""
    made = SlotLayout.pack([(s.name, s.shape, s.dtype) for s in layout.tensors])
    if made.tensors != layout.tensors or made.nbytes != nbytes:
        raise Malformed("its tensors do not lie one after another")


def _check_encoded(layout: SlotLayout, name: str, encoding: str) -> None:
    """Malformed where codes and scales of a matrix do not go together."""
    inputs, nbytes = BLOCKS[encoding]
    parts = [layout[name], *(layout[f"{name}.{c}"] for c in ENCODINGS[encoding].companions)]
    if any(len(part.shape) != 2 for part in parts):
        raise Malformed(f"{name} is no matrix")
    rows, width = parts[0].shape
    width *= ITEMSIZE[parts[0].dtype]
    columns = width // nbytes * inputs
    divided = all(rows % p.shape[0] == 0 and columns % p.shape[1] == 0 for p in parts[1:])
    if width % nbytes or not divided:
        raise Malformed(f"{name}: its codes and scales do not go together")


def _with_segments(raw: JsonObject, layout: SlotLayout) -> SlotLayout:
    segments, due, first = list[Segment](), 0, -1
    for value in _list(raw, "segments"):
        each = JsonObject(value, "a segment")
        own = _packed(each, dict(layout.encodings), layout.dtype)
        _check_packed(own, own.nbytes)
        segment = Segment(each.whole("first"), each.whole("offset"), own)
        if segment.offset != due or segment.first <= first or (first < 0 and segment.first):
            raise Malformed("its segments do not follow one another")
        segments.append(segment)
        due, first = due + own.nbytes, segment.first
    for spec in layout.tensors:
        cuts = [{s.name: s for s in segment.layout.tensors} for segment in segments]
        own_specs = [cut[spec.name] for cut in cuts if spec.name in cut]
        same = all(s.dtype == spec.dtype for s in own_specs) and len(own_specs) == len(cuts)
        if not same or sum(s.nbytes for s in own_specs) != spec.nbytes:
            raise Malformed(f"its segments are not {spec.name}")
    if due != layout.nbytes or any(len(s.layout.tensors) > len(layout.tensors) for s in segments):
        raise Malformed("its segments are not the expert")
    return SlotLayout(layout.tensors, due, layout.encodings, layout.dtype, tuple(segments))


def _low(raw: JsonObject, exact: SlotLayout) -> Low:
    precision, nested = _one_of(raw.text("precision"), PRECISIONS), raw.flag("nested")
    layout = _layout(raw, exact.dtype)
    if nested:
        kinds = {exact.encodings.get(s.name) for s in codes_of(exact)}
        if (kinds, precision) != ({NESTED[0]}, NESTED[1]) or layout != nested_layout(exact):
            raise Malformed("its nested copies are not those of its experts")
    names = [spec.name for spec in codes_of(exact)]
    copies = [spec.name for spec in codes_of(layout)]
    if sorted(names) != sorted(copies) or exact.segments:
        raise Malformed("its copies are not those of its experts")
    for name in names:
        if not _alike(layout.weight(name), exact.weight(name)):
            raise Malformed(f"the copy of {name} has another shape")
    return Low(precision, nested, layout)


def _alike(copy: WeightSpec, exact: WeightSpec) -> bool:
    """Whether a copy is of a matrix of this shape; a plain one may be transposed."""
    turned = exact.encoding == PLAIN and copy.shape == exact.shape[::-1]
    return turned or copy.shape == exact.shape


def _list(raw: JsonObject, name: str) -> list[Any]:
    return list(raw.each(name, lambda value, where: value))


def _one_of(value: str, choices: Any) -> str:
    if value not in choices:
        raise Malformed(f"there is no {plain(value)}")
    return value
