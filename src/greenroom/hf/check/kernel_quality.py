"""Measure how far the compiled kernels are from exact products, beside ggml's arithmetic.

The exact model has the stored weights in float32 and rounds no inputs: eager kernels in float32.
The default kernels round the inputs of most types of GGUF to 8 bits, `precise` to 15 bits, and both
compute everything else in the model's dtype. ggml's arithmetic is emulated (ggml_inputs.py). The
compiled kernels read the text in passes of 16 tokens, in which they multiply stored dense matrices
as in decoding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from greenroom.config import LoadConfig
from greenroom.core.layout import PLAIN
from greenroom.errors import UsageError
from greenroom.hf.check.ggml_inputs import ggml_arithmetic
from greenroom.hf.check.passes import streamed_model
from greenroom.hf.check.windows import (
    WINDOW,
    LogitDistance,
    check_room,
    compare_windows,
    cut_windows,
    spool_windows,
)
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.memory.slots import slots_for
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.accelerate import FEW
from greenroom.runtime.kernels.matrix import has_precise_format

GGML = "ggml"  # key of the emulation's distance

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KernelQuality:
    """Distances of a GGUF model's kernels, and of ggml's arithmetic, from the exact model.

    dtype:      data type of the hidden states in the compiled kernels; ggml's are float32
    tokens:     number of predicted tokens
    perplexity: that of the exact model
    distances:  distance of `native`, `precise` and `ggml`; without `precise` if no matrix takes
                inputs of 8 bits by default, as in a float32 model
    """

    model: str
    dtype: str
    tokens: int
    perplexity: float
    distances: dict[str, LogitDistance]


def compare_kernels(
    source: str,
    text: str,
    *,
    cache: str | int = "10%",
    dtype: str = "auto",
    tokens: int | None = None,
    config: str | None = None,
    say: Report = lambda line: None,
) -> KernelQuality:
    """Measure the distances of a GGUF model's kernels from the exact model on a text.

    cache:  size of the expert cache
    dtype:  data type in which the model computes with the compiled kernels
    tokens: number of the text's first tokens that are computed; None for all
    config: the config of the GGUF file: a folder, a file or a hub id
    say:    called with a line for each stage

    The dense parts are in memory in float32 for the exact model. Raises UsageError if no matrix is
    quantised, and OutputError if the temporary file for the exact logits cannot be written.
    """
    checkpoint = find_checkpoint(source, config)
    encodings = {stored.encoding for stored in checkpoint.tensors.values()} - {PLAIN}
    if not encodings:
        raise UsageError(
            f"{source} has no quantised matrices, so --quality needs an original to compare it"
            " with: name one by --against"
        )
    exact = ModelSkeleton.of(checkpoint, "float32")
    slots_for(cache, exact.catalog)  # an error comes before the work begins
    windows = cut_windows((source,), (exact,), text, tokens)
    check_room(windows, exact)
    states = ModelSkeleton.of(checkpoint, dtype).dtype
    kernels = ["native"]
    if states is not torch.float32 and any(map(has_precise_format, encodings)):
        kernels.append("precise")
    load = LoadConfig(cache=cache, dtype=dtype, config=config, device="cpu")
    distances: dict[str, LogitDistance] = {}
    with tempfile.TemporaryFile() as spool:
        say(f"computing {sum(map(len, windows))} tokens exactly")
        with streamed_model(source, replace(load, dtype="float32", kernels="eager")) as model:
            spooled = spool_windows(model, windows, WINDOW, spool)
            say("computing the same tokens with ggml's arithmetic")
            with ggml_arithmetic(model, exact):
                rows = compare_windows(model, windows, WINDOW, spool, spooled)
        ggml, perplexity = LogitDistance.of(rows)
        for name in kernels:
            say(f"computing the same tokens with --kernels {name}")
            with streamed_model(source, replace(load, kernels=name)) as model:
                rows = compare_windows(model, windows, FEW, spool, spooled)
            distances[name], _ = LogitDistance.of(rows)
    name = str(states).removeprefix("torch.")
    return KernelQuality(source, name, len(rows), perplexity, {**distances, GGML: ggml})
