"""The dense parts of a GGUF model as a GGUF file: all of the metadata, without the experts.

Metadata are copied byte by byte, but for those that say how a model is split into files. So config,
tokenizer and names are read from it as from the original.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from greenroom.core.layout import PLAIN
from greenroom.hf.checkpoint.gguf import Gguf
from greenroom.hf.checkpoint.gguf_file import Cursor, ggml_type
from greenroom.hf.checkpoint.header import Stored
from greenroom.hf.pack.dense import NAMES, bytes_of

NAME = "dense.gguf"
SPLIT = "split."  # metadata of a model in parts
ALIGNMENT = 32


def gguf_of(checkpoint: Gguf, names: Sequence[str]) -> Iterator[bytes]:
    """A GGUF file of these tensors and all metadata, piece by piece."""
    version, pairs = _metadata(checkpoint.files[0])
    align = int(checkpoint.config.get("general.alignment", ALIGNMENT))
    tensors = [checkpoint.stored[name] for name in names]
    head = [b"GGUF", struct.pack("<IQQ", version, len(names), len(pairs)), *pairs]
    end = 0
    for name, stored in zip(names, tensors, strict=True):
        head.append(_entry(name, stored, end))
        end += -(-stored.nbytes // align) * align
    data = b"".join(head)
    yield data + b"\0" * (-len(data) % align)
    yield from bytes_of(checkpoint, tensors, align)


def _metadata(path: str) -> tuple[int, list[bytes]]:
    """(version, each key with its value as they lie in a file, but for those of the split)."""
    cursor = Cursor(path)
    return cursor.version, [raw for key, _, raw in cursor.pairs() if not key.startswith(SPLIT)]


def _entry(name: str, stored: Stored, offset: int) -> bytes:
    """A line of the table of tensors; dimensions are in ggml's order, the fastest first."""
    from gguf import GGMLQuantizationType

    plain = stored.encoding == PLAIN
    kind = NAMES[stored.dtype] if plain else ggml_type(stored.encoding)
    key, shape = name.encode(), stored.shape[::-1]
    return (
        struct.pack("<Q", len(key))
        + key
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", GGMLQuantizationType[kind], offset)
    )
