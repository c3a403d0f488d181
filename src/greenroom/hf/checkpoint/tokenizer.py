"""A checkpoint's tokenizer, by transformers' own loading code."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.library_errors import wrap_library_errors


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer; raise CheckpointError where there is no usable one."""
    with (
        wrap_library_errors(f"{checkpoint.folder}: no usable tokenizer"),
        checkpoint.read_by_transformers(),
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            **checkpoint.pretrained_arguments, trust_remote_code=False
        )
    if not len(tokenizer) > len(
        tokenizer.all_special_tokens
    ):  # transformers makes an empty one where files are missing
        raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: its files are missing")
    return tokenizer
