"""Loading of a checkpoint's tokenizer, by transformers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.gguf import reader

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.gguf_file import ARRAY, SIZE, TEXT
from greenroom.hf.checkpoint.library_errors import wrap_library_errors


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer.

    Raises CheckpointError if the tokenizer's files are missing or damaged.
    """
    with (
        wrap_library_errors(f"{checkpoint.folder}: the model's tokenizer cannot be loaded"),
        _fast_header_reader(),
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            **checkpoint.tokenizer_arguments, trust_remote_code=False
        )
        checkpoint.adapt_tokenizer(tokenizer)
    if not len(tokenizer) > len(
        tokenizer.all_special_tokens
    ):  # transformers makes an empty one where files are missing
        raise CheckpointError(
            f"{checkpoint.folder}: the model's tokenizer cannot be loaded: its files are missing:"
            " download the model again"
        )
    return tokenizer


@contextmanager
def _fast_header_reader() -> Iterator[None]:
    """Context manager in which transformers reads GGUF headers faster.

    A vocabulary and its merges are 300,000 strings. transformers slices a NumPy array for each of
    them, which takes ten times as long as a slice of a buffer, and calls a function for each, which
    takes three times as long as a loop.
    """
    mapped, read_value = reader._mapped, reader._read_value

    def buffer(path: str) -> Any:
        return mapped(path).data

    def value(blob: Any, pos: int, kind: int, keep_strings: bool = False) -> tuple[Any, int]:
        if kind == ARRAY and keep_strings:
            element, count = struct.unpack_from("<IQ", blob, pos)
            if element == TEXT:
                return _strings(blob, pos + 12, count)
        return read_value(blob, pos, kind, keep_strings)

    reader._mapped, reader._read_value = buffer, value
    try:
        yield
    finally:
        reader._mapped, reader._read_value = mapped, read_value


def _strings(blob: memoryview, pos: int, count: int) -> tuple[list[str], int]:
    """Read an array of strings of a GGUF header; return them and the offset after them."""
    strings, unpack = [], SIZE.unpack_from
    for _ in range(count):
        begin = pos + SIZE.size
        pos = begin + unpack(blob, pos)[0]
        strings.append(str(blob[begin:pos], "utf-8"))
    return strings, pos
