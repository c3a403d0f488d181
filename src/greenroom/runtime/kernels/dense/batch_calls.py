"""Kernel calls of a decoder layer for several tokens.

Each token has a KV cache. Tokens of one sequence share one: each attends to those before it. The
result for each token has the bits of a pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from greenroom.runtime.kernels.dense.attention import KeyValueView, Positions
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry

if TYPE_CHECKING:
    from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer


class BatchCalls(NamedTuple):
    """Kernel calls for total = x + attention(norm(x)), out = norm(total), of several tokens.

    stages: the kernel calls to run; the memory of `of_tokens` must stay alive until they have ended
    of_tokens: for each token, the calls of the kernels for one token, which `stages` refers to
    """

    stages: Sequence[sequence.Stage]
    of_tokens: Sequence[Sequence[sequence.Arguments]]


class BatchMemory:
    """Memory of a decoder layer's kernel calls for several tokens.

    works: each token's memory for its attention
    wide:  float32 inputs and results of products for all tokens
    """

    def __init__(self, layers: Sequence[FusedDecoderLayer], contexts: Sequence[int]) -> None:
        """Allocate memory that is enough for each of some decoder layers.

        `contexts` has for each token the number of tokens in its KV cache.
        """
        self.works = [
            max((layer.workspace(context) for layer in layers), key=Tensor.numel)
            for context in contexts
        ]
        widest = max(layer.attention.widest for layer in layers)
        self.wide = torch.empty(4, len(contexts), widest)


def batch_calls(
    layer: FusedDecoderLayer,
    x: Tensor,
    positions: Sequence[Positions],
    views: Sequence[KeyValueView],
    total: Tensor,
    out: Tensor,
    memory: BatchMemory,
    wide_out: int = 0,
) -> BatchCalls:
    """Make a decoder layer's kernel calls for tokens x [1, T, hidden].

    total, out: [1, T, hidden]
    wide_out:   address of float32 memory [T, hidden] for `out` in float32; 0: none
    """
    rows = zip(
        x.split(1, 1),
        positions,
        views,
        total.split(1, 1),
        out.split(1, 1),
        memory.works,
        strict=True,
    )
    each = [layer.stages(*row) for row in rows]
    input_norm, project, attend, post_norm = zip(*each, strict=True)
    norms = kernel_entry("add_and_norm_rows", layer.attention.dtype)
    normed = memory.wide.data_ptr()
    stages = (
        sequence.batch_stage(norms, [call for _, call in input_norm], normed),
        *layer.attention.batched_stages(list(zip(project, attend, strict=True)), memory.wide),
        sequence.batch_stage(norms, [call for _, call in post_norm], wide_out),
    )
    return BatchCalls(stages, [[call for _, call in token] for token in each])
