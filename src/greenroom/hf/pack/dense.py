"""Write a pack's dense files: the tensors outside the experts, copied unchanged.

If the source is GGUF, the dense file is a GGUF file too. Its metadata are copied byte by byte,
except keys about split files, so config and tokenizer can be read from it. Otherwise the files are
safetensors. They are not called `model.safetensors`, so that no other program takes a pack for a
complete checkpoint and initialises the experts at random.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.checkpoint import INDEX, Checkpoint
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.gguf.origin import CONFIG
from greenroom.hf.checkpoint.gguf_file import Cursor, ggml_type
from greenroom.hf.checkpoint.header import NAMES, StoredTensor, read_errors
from greenroom.hf.checkpoint.pack.format import HEADER, DenseFile
from greenroom.hf.checkpoint.pack.journal import RESUME_HINT, write_errors

SHARD = 4 << 30  # bytes; an unfinished file is copied again from its beginning
CHUNK = 4 << 20
SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*")  # config, tokenizer and the like
TOKENIZER = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "*.jinja")
GGUF = "dense.gguf"
SPLIT = "split."  # prefix of metadata about split files
FACTORS = frozenset({"rope_freqs.weight"})  # of GGUF files
ALIGNMENT = 32  # default of a GGUF file

Advance = Callable[[int], None]


def dense_names(checkpoint: Checkpoint, used: Sequence[str]) -> list[str]:
    """Return the stored names of the tensors that a pack copies unchanged, in file order.

    `used` are the names of the checkpoint's tensors outside the experts. Their scales and other
    tensors of the same modules are added, and factors of RoPE, from which a config may be made.
    """
    names = {*used, *FACTORS.intersection(checkpoint.stored)}
    stems = {name.rpartition(".")[0] for name in names}
    experts = {
        _position(part)
        for name, stored in checkpoint.tensors.items()
        if name not in names
        for part in stored.parts
    }
    chosen = [
        name
        for name, stored in checkpoint.stored.items()
        if name in names
        or (
            name not in checkpoint.tensors
            and name.rpartition(".")[0] in stems
            and _position(stored) not in experts
        )
    ]
    return sorted(chosen, key=lambda name: _position(checkpoint.stored[name]))


def _position(stored: StoredTensor) -> tuple[int, int]:
    return stored.file, stored.offset


def shards(checkpoint: Checkpoint, names: list[str]) -> dict[str, list[str]]:
    """Divide tensors among a pack's dense files; return the tensor names by file name.

    A GGUF model has one file, `dense.gguf`. Safetensors files have at most 4 GiB, unless a single
    tensor is larger.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return {GGUF: names}
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = checkpoint.stored[name].nbytes
        if size and size + nbytes > SHARD:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return {
        f"dense-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def file_chunks(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the bytes of a file that holds some of a checkpoint's tensors.

    It is a GGUF file if the checkpoint is, else a safetensors file. `names` are the stored names of
    the tensors.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return _gguf_of(checkpoint, names)
    return _safetensors_of(checkpoint, names)


def _safetensors_of(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the bytes of a safetensors file of the given tensors, in chunks."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    tensors, end = [checkpoint.stored[name] for name in names], 0
    for name, stored in zip(names, tensors, strict=True):
        begin, end = end, end + stored.nbytes
        entries[name] = {
            "dtype": NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from _bytes_of(checkpoint, tensors)


def _gguf_of(checkpoint: GgufCheckpoint, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the bytes of a GGUF file of the given tensors and all metadata, in chunks."""
    cursor = Cursor(checkpoint.files[0])
    pairs = [raw for key, _, raw in cursor.pairs() if not key.startswith(SPLIT)]
    align = int(checkpoint.config.get("general.alignment", ALIGNMENT))
    tensors = [checkpoint.stored[name] for name in names]
    head = [b"GGUF", struct.pack("<IQQ", cursor.version, len(names), len(pairs)), *pairs]
    end = 0
    for name, stored in zip(names, tensors, strict=True):
        head.append(_entry(name, stored, end))
        end += -(-stored.nbytes // align) * align
    data = b"".join(head)
    yield data + b"\0" * (-len(data) % align)
    yield from _bytes_of(checkpoint, tensors, align)


def _entry(name: str, stored: StoredTensor, offset: int) -> bytes:
    """Encode an entry of GGUF's table of tensors, with dimensions in ggml's order."""
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


def _bytes_of(
    checkpoint: Checkpoint, tensors: Sequence[StoredTensor], align: int = 1
) -> Iterator[bytes]:
    """Yield the bytes of stored tensors in chunks, each tensor padded to an alignment."""
    gap = 0
    for stored in tensors:
        yield b"\0" * gap
        path, left = checkpoint.files[stored.file], stored.nbytes
        with read_errors(path), open(path, "rb", buffering=0) as stream:
            stream.seek(stored.offset)
            while left:
                chunk = stream.read(min(CHUNK, left))
                if not chunk:
                    raise CheckpointError(
                        f"{path}: truncated: the file ends inside a tensor: download the file again"
                    )
                yield chunk
                left -= len(chunk)
            os.posix_fadvise(stream.fileno(), stored.offset, stored.nbytes, os.POSIX_FADV_DONTNEED)
        gap = -stored.nbytes % align


def write(path: Path, chunks: Iterable[bytes], advance: Advance) -> DenseFile:
    """Write one of a pack's files from chunks of bytes, and sync the file.

    `advance` is called with the bytes of each chunk. Returns the file's name, size and CRC-32.
    Raises OutputError if the file cannot be written.
    """
    nbytes = crc32 = 0
    with write_errors(path, RESUME_HINT), open(path, "wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            nbytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
            advance(len(chunk))
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return DenseFile(path.name, nbytes, crc32)


def copy_small(checkpoint: Checkpoint, target: Path) -> None:
    """Copy a model's config, tokenizer and other small files to a pack's folder.

    The index of safetensors files is not copied. Of the folders that have the config and the
    tokenizer of a GGUF file, no other files are copied.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        origin = checkpoint.origin
        paths = {CONFIG: origin.config} if origin.config is not None else {}
        if origin.tokenizer is not None:
            paths |= {path.name: path for path in _small_files(origin.tokenizer, TOKENIZER)}
    else:
        paths = {path.name: path for path in _small_files(checkpoint.folder, SMALL)}
    for name, path in sorted(paths.items()):
        with read_errors(path):
            data = path.read_bytes()
        write(target / name, [data], lambda nbytes: None)


def _small_files(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield the files of a folder whose names fit one of some patterns."""
    for path in folder.iterdir():
        fits = any(fnmatch(path.name, pattern) for pattern in patterns)
        if fits and path.name not in (INDEX, HEADER) and path.is_file():
            yield path
