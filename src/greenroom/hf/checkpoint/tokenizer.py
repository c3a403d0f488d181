"""A checkpoint's tokenizer, by transformers' own loading code."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.library_errors import wrap_library_errors


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer; CheckpointError where there is none that can be used."""
    with (
        wrap_library_errors(f"{checkpoint.folder}: no usable tokenizer"),
        checkpoint.read_by_transformers(),
    ):
        tokenizer = AutoTokenizer.from_pretrained(**checkpoint.source, trust_remote_code=False)
    if not len(tokenizer) > len(tokenizer.all_special_tokens):  # made up where there is no file
        raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: its files are missing")
    return tokenizer
