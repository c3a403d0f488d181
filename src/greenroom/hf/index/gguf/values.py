"""Operations that undo what llama.cpp's converter does to values, by tensor name and architecture.

Most tensors of a GGUF file have the values of the original checkpoint. The others are listed here.
An operation takes dequantised float32 values. Routed experts need none: their values are unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import Concatenate, ConversionOps
from transformers.integrations.gguf.gguf_conversion_mapping import (
    SubtractOne,
    TiledToGroupedInputs,
    TiledToGroupedRows,
)

Operations = Callable[[PreTrainedConfig], list[ConversionOps]]

# Architectures whose rows of queries and keys llama.cpp's converter permutes for RoPE.
PERMUTED = (
    "llama", "deepseek", "granitemoe", "granitehybrid", "granite_swa", "nemotron_h_moe",
)  # fmt: skip
ROUNDING = 2**-22  # relative: two or more float32 numbers, since libraries' exponentials differ
NORMS_PLUS_ONE = ("minimax-m3", "qwen3next", "qwen35moe", "qwen4exp", "step35")


class _OneTensor(ConversionOps):
    """Base class of operations that make one tensor from one tensor of a GGUF file."""

    def change(self, tensor: Tensor, config: Any) -> Tensor:
        """Return the tensor of the original checkpoint, given the one of the GGUF file."""
        raise NotImplementedError

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        (tensor,) = _tensors(input_dict, source_patterns)
        return {target_patterns[0]: self.change(tensor, kwargs["config"])}


class UnpermuteRows(_OneTensor):
    """Operation that restores the order of the rows of a query or key projection.

    llama.cpp's converter interleaves the two halves of each head's rows, since its RoPE rotates
    neighbouring rows.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def change(self, tensor: Tensor, config: Any) -> Tensor:
        rows = tensor.unflatten(0, (self.heads, -1, 2))
        return rows.transpose(1, 2).reshape(tensor.shape)


class Flatten(_OneTensor):
    """Operation that makes a vector of a matrix, row after row."""

    def change(self, tensor: Tensor, config: Any) -> Tensor:
        return tensor.flatten()


class LogMagnitude(_OneTensor):
    """Operation that takes the logarithm of magnitudes: A of linear attention is exp or -exp."""

    def change(self, tensor: Tensor, config: Any) -> Tensor:
        return _restored(tensor.abs(), torch.log, torch.exp)


class ScaleDown(_OneTensor):
    """Operation that divides a norm by sqrt(hidden size / its length), as dots3 scales latents."""

    def change(self, tensor: Tensor, config: Any) -> Tensor:
        factor = (config.get_text_config().hidden_size / len(tensor)) ** 0.5
        return _restored(tensor, lambda values: values / factor, lambda values: values * factor)


class JoinKeysAndValues(ConversionOps):
    """Operation that joins the two up-projections of latent attention (MLA) to `kv_b_proj`.

    llama.cpp's converter stores that of the keys transposed, [heads, latent, key], and that of the
    values as it is, [heads, value, latent].
    """

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        keys, values = _tensors(input_dict, source_patterns)
        return {target_patterns[0]: torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)}


class JoinConvolutions(ConversionOps):
    """Operation that joins the convolutions of queries, keys and values of linear attention.

    llama.cpp's converter stores each as [1, channels, 1, kernel].
    """

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        parts = _tensors(input_dict, source_patterns)
        return {target_patterns[0]: torch.cat([part.flatten(0, -2) for part in parts]).unsqueeze(1)}


class JoinByKeyHead(ConversionOps):
    """Operation that joins projections of linear attention, group by group of each key head.

    Qwen3-Next stores queries, keys, values and gates of one key head after another; llama.cpp's
    converter stores those of all heads after one another.
    """

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        config = kwargs["config"].get_text_config()
        keys = config.linear_num_key_heads
        qkv, z = _tensors(input_dict, source_patterns)
        rows = keys * config.linear_key_head_dim
        q, k, v = qkv.split([rows, rows, qkv.shape[0] - 2 * rows])
        parts = [part.unflatten(0, (keys, -1)) for part in (q, k, v, z)]
        return {target_patterns[0]: torch.cat(parts, 1).flatten(0, 1)}


def _restored(
    stored: Tensor, undo: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Undo a function that rounds in float32, such as exp.

    The result is not always the number to which `change` was applied. If that was a bfloat16
    number, it is found again: `change` makes the stored number of it, but for rounding.
    """
    exact = undo(stored)
    short = exact.bfloat16().float()
    return torch.where(torch.isclose(change(short), stored, ROUNDING, 0), short, exact)


def _tensors(input_dict: dict[str, Any], patterns: list[str]) -> list[Tensor]:
    values = (input_dict[pattern] for pattern in patterns)
    return [value[0] if isinstance(value, list) else value for value in values]


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A kind of tensor whose values llama.cpp's converter changes.

    architectures: GGUF's names of the architectures; () stands for all
    pattern:       regular expression that is found in GGUF's names of the tensors
    undo:          operations that undo the change, for a config
    """

    architectures: tuple[str, ...]
    pattern: str
    undo: Operations


@dataclass(frozen=True, slots=True)
class SplitParameter:
    """A kind of parameter that llama.cpp's converter divides into several tensors.

    pattern: regular expression that is found in the names of the parameters
    parts:   GGUF's names of the tensors inside a layer
    join:    operation that joins them
    """

    pattern: str
    parts: tuple[str, ...]
    join: ConversionOps


def _heads(config: PreTrainedConfig) -> list[ConversionOps]:
    return [UnpermuteRows(config.num_attention_heads)]


def _key_heads(config: PreTrainedConfig) -> list[ConversionOps]:
    return [UnpermuteRows(config.num_key_value_heads)]


def _untile(operation: type[ConversionOps], per_head: bool = False, values_only: bool = False
) -> Operations:  # fmt: skip
    """Return the operations that group tiled value heads of Qwen3.5's linear attention again.

    per_head:    the tensor has one row for each head, not one for each element of a head
    values_only: rows of queries and keys come first, and are as they were
    """

    def operations(config: PreTrainedConfig) -> list[ConversionOps]:
        text: Any = config.get_text_config()
        heads = text.linear_num_key_heads
        arguments = [heads, text.linear_num_value_heads // heads]
        if not per_head:
            arguments.append(text.linear_value_head_dim)
        if values_only:
            return [operation(*arguments, offset=2 * text.linear_key_head_dim * heads)]
        return [operation(*arguments)]

    return operations


CHANGED = (
    ChangedValue(PERMUTED, r"\.attn_q\.", _heads),
    ChangedValue(PERMUTED, r"\.attn_k\.", _key_heads),
    ChangedValue((), r"\.ssm_a$", lambda config: [LogMagnitude()]),
    ChangedValue((), r"\.ssm_norm\.weight$", lambda config: [Flatten()]),
    ChangedValue(NORMS_PLUS_ONE, r"(?<!ssm_)norm\.weight$", lambda config: [SubtractOne()]),
    ChangedValue(("qwen4exp",), r"\.ple_norm_\w+\.weight$", lambda config: [SubtractOne()]),
    ChangedValue(("dots3note",), r"\.attn_(q|kv)_a_norm\.", lambda config: [ScaleDown()]),
    *(
        ChangedValue(("qwen35moe", "qwen4exp"), pattern, undo)
        for pattern, undo in (
            (r"\.(ssm_a|ssm_dt\.bias|ssm_alpha\.weight|ssm_beta\.weight)$",
             _untile(TiledToGroupedRows, per_head=True)),
            (r"\.attn_gate\.weight$", _untile(TiledToGroupedRows)),
            (r"\.(attn_qkv|ssm_conv1d)\.weight$", _untile(TiledToGroupedRows, values_only=True)),
            (r"\.ssm_out\.weight$", _untile(TiledToGroupedInputs)),
        )
    ),
)  # fmt: skip

SPLIT = (
    SplitParameter(
        r"\.kv_b_proj\.weight$", ("attn_k_b.weight", "attn_v_b.weight"), JoinKeysAndValues()
    ),
    SplitParameter(
        r"\.conv1d\.weight$",
        ("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),
        JoinConvolutions(),
    ),
    SplitParameter(
        r"\.(shared_mlp\.input_linear|shared_experts\.gate_up_proj)\.weight$",
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        Concatenate(dim=0),
    ),
    SplitParameter(
        r"\.mlp\.gate_up_proj\.weight$",
        ("ffn_gate.weight", "ffn_up.weight"),
        Concatenate(dim=0),
    ),
    SplitParameter(
        r"\.index_qk_proj\.weight$",
        ("indexer.q_proj.weight", "indexer.k_proj.weight"),
        Concatenate(dim=0),
    ),
    SplitParameter(
        r"\.in_proj_qkvz\.weight$", ("attn_qkv.weight", "attn_gate.weight"), JoinByKeyHead()
    ),
)


def operations_for(
    architecture: str, name: str, config: PreTrainedConfig
) -> Iterator[ConversionOps]:
    """Yield the operations that restore a GGUF tensor's original values, in their order.

    `name` is GGUF's name of the tensor, and `architecture` that of the file.
    """
    for change in CHANGED:
        if architecture in (change.architectures or (architecture,)) and re.search(
            change.pattern, name
        ):
            yield from change.undo(config)
