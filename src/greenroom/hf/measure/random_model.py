"""Write a small Qwen3-MoE model with random weights to a folder, to measure a machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from greenroom.errors import OutputError
from greenroom.interrupts import undo_on_interrupt


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the small random Qwen3-MoE model with which a machine is measured."""

    hidden: int = 1024
    inner: int = 512
    layers: int = 4
    experts: int = 24
    top_k: int = 8
    vocabulary: int = 512

    @property
    def expert_bytes(self) -> int:
        return 6 * self.hidden * self.inner

    @property
    def nbytes(self) -> int:
        return self.layers * self.experts * self.expert_bytes

    @property
    def heads(self) -> int:
        return max(4, self.hidden // 64)


@contextmanager
def small_model(folder: Path, shape: Shape) -> Iterator[Path]:
    """Context manager that writes a random Qwen3-MoE model to a temporary folder.

    Its value is the model's folder, which is made in `folder` and removed at the end. Raises
    OutputError if the model cannot be written.
    """
    try:
        with (
            TemporaryDirectory(prefix=".greenroom-", dir=folder) as name,
            undo_on_interrupt(partial(shutil.rmtree, name, ignore_errors=True)),
        ):
            write(Path(name), shape)
            yield Path(name)
    except OSError as error:
        raise OutputError(
            f"cannot write a small test model to {folder}: {error.strerror}"
        ) from error


def write(folder: Path, shape: Shape) -> None:
    """Write the config, a word-level tokenizer and the weights of a random Qwen3-MoE model.

    All experts of a layer have equal weights.
    """
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=shape.inner,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        vocab_size=shape.vocabulary,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        size = parameter.shape[-2:]
        matrix = parameter.ndim > 1
        drawn = torch.randn(size, generator=random) / size[-1] ** 0.5 if matrix else 1.0
        parameter.data[:] = drawn
    model.save_pretrained(folder)
    vocabulary = {"<unk>": 0, **{f"w{i}": i for i in range(1, shape.vocabulary)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
