"""Loading of a checkpoint's tokenizer, by transformers."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.library_errors import wrap_library_errors


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer.

    Raises CheckpointError if the tokenizer's files are missing or damaged.
    """
    with wrap_library_errors(f"{checkpoint.folder}: the model's tokenizer cannot be loaded"):
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
