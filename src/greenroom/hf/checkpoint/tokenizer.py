"""Loading of a checkpoint's tokenizer, by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.gguf import reader

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.library_errors import wrap_library_errors


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer.

    Raises CheckpointError if the tokenizer's files are missing or damaged.
    """
    with (
        wrap_library_errors(f"{checkpoint.folder}: the model's tokenizer cannot be loaded"),
        _headers_as_buffers(),
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            **checkpoint.tokenizer_arguments, trust_remote_code=False
        )
    if not len(tokenizer) > len(
        tokenizer.all_special_tokens
    ):  # transformers makes an empty one where files are missing
        raise CheckpointError(
            f"{checkpoint.folder}: the model's tokenizer cannot be loaded: its files are missing:"
            " download the model again"
        )
    return tokenizer


@contextmanager
def _headers_as_buffers() -> Iterator[None]:
    """Context manager in which transformers reads GGUF headers from a plain buffer.

    It slices a NumPy array for each of a vocabulary's 300,000 strings otherwise, which takes ten
    times as long.
    """
    original = reader._mapped

    def mapped(path: str) -> Any:
        return original(path).data

    reader._mapped = mapped
    try:
        yield
    finally:
        reader._mapped = original
