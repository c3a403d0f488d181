"""Set up the prompt cache on disk for a loaded model: sizes, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from greenroom.config import Amount, ServeConfig
from greenroom.errors import UnsupportedModel
from greenroom.hf.kv.stored import refusal_reason, window_lengths
from greenroom.hf.mtp.layer import mtp_layer_of
from greenroom.runtime.store.disk import CHUNK_BYTES
from greenroom.runtime.store.disk_turns import DiskTurns
from greenroom.server.engine.prompts.folder import MOST_FILES, PromptFolder
from greenroom.server.engine.prompts.model_key import model_key
from greenroom.server.engine.prompts.store import PromptStore

SEGMENT_BYTES = 32 << 20  # most bytes of a segment, unless it has the fewest tokens
MOST_TOKENS, FEWEST_TOKENS = 256, 16  # of a complete segment
ENTRY_BYTES = 2048  # of the index for each segment, besides 4 for each token


def open_prompt_store(
    model: Any, config: ServeConfig, wake: Callable[[], None]
) -> PromptStore | None:
    """Open the prompt cache of `--prompt-cache` for a loaded model; None without the option.

    `wake` is called, in another thread, when keys and values were read. Raises UnsupportedModel if
    the model's KV cache cannot be stored, UsageError if the folder cannot be used, BudgetError if
    `--memory` has no room for the buffer.
    """
    if config.prompt_cache is None:
        return None
    if reason := refusal_reason(model):
        raise UnsupportedModel(f"--prompt-cache cannot be used: {reason}")
    greenroom = model.greenroom
    setup = greenroom.setup
    windows = window_lengths(model, setup.context)
    sizes = [layer.token for layer in setup.keys_values.layers]
    if mtp_layer_of(model) is not None:  # its keys and values are not stored
        sizes.pop()
    if len(sizes) != len(windows):
        raise UnsupportedModel(
            f"--prompt-cache cannot be used: layers of {type(model).__name__} share keys and values"
        )
    tokens = segment_tokens(sum(sizes))
    states = sum(size * window for size, window in zip(sizes, windows, strict=True))
    buffer_bytes = sum(sizes) * tokens + states
    limit = Amount.parse(config.prompt_cache_size, "--prompt-cache-size").nbytes or 0
    if (slot_budget := greenroom.slot_budget) is not None:
        files = min(MOST_FILES, limit // (max(1, sum(sizes)) * tokens))
        index_bytes = files * (4 * tokens + ENTRY_BYTES)
        slot_budget.set_aside(buffer_bytes + CHUNK_BYTES + index_bytes)
    key = model_key(model, config, tokens)
    folder = PromptFolder(Path(config.prompt_cache), limit, key, tokens, windows)
    turns = DiskTurns(greenroom.driver.scheduler.view)
    return PromptStore(folder, turns, buffer_bytes, wake, only_exact=config.batch_invariant)


def segment_tokens(token_bytes: int) -> int:
    """Return how many tokens a complete segment has: a power of two from 16 to 256."""
    tokens = MOST_TOKENS
    while tokens > FEWEST_TOKENS and tokens * token_bytes > SEGMENT_BYTES:
        tokens //= 2
    return tokens
