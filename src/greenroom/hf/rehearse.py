"""A rehearsal: a small random model that is run here, to learn what its matrices alone do not tell.

A layer takes more than its weights (attention, norms, router, Python between kernels), an expert
that is fetched takes time of the cores that compute, and these are slower after a wait. All of it
is measured with the code that runs any other model, and goes into the machine's profile.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from greenroom.config import LoadConfig
from greenroom.core.cost import COOLED
from greenroom.core.machine import Machine, Processor
from greenroom.errors import OutputError
from greenroom.hf.stage import Session, Stage
from greenroom.interrupts import undone_by
from greenroom.trace.prompts import Prompt

SHARE = 0.5  # of the experts, in memory in the second part
TOKENS, SETTLE = 40, 8
WAIT = 2e-3  # seconds that an expert of the smallest model comes in, where waits are measured


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the small model: in the middle of what is measured of kernels."""

    hidden: int = 1024
    inner: int = 512
    layers: int = 4
    experts: int = 24
    top_k: int = 8
    words: int = 512

    @property
    def expert_bytes(self) -> int:
        return 6 * self.hidden * self.inner

    @property
    def nbytes(self) -> int:
        return self.layers * self.experts * self.expert_bytes


SHAPE = Shape()
SMALLEST = Shape(hidden=128, inner=64, layers=8, experts=32, top_k=4)  # it does little but wait


DEVICES = {"host": "cpu", "device": "cuda"}  # who computes from a memory, as a run calls it


def rehearsed(
    machine: Machine,
    folder: Path,
    shape: Shape | None = None,
    devices: Mapping[str, str] | None = None,
) -> Machine:
    """The profile with what runs beside `folder`'s disk take beyond it, on every processor."""
    shape, devices = shape or SHAPE, devices or DEVICES
    with small_model(folder, shape) as model, small_model(folder, SMALLEST) as smallest:
        judged = [
            _judged(machine, each, devices[each.memory], str(model), str(smallest), shape)
            for each in machine.processors
        ]
    return replace(machine, processors=tuple(judged))


def _judged(
    machine: Machine, processor: Processor, device: str, model: str, smallest: str, shape: Shape
) -> Processor:
    whole, part, ahead = sessions(model, shape, device)
    wake = waiting(*waits(smallest, SMALLEST, device))
    matrices = shape.layers * (
        shape.top_k * processor.expert.at(shape.expert_bytes).seconds(1)
        + processor.dense.at(_dense_bytes(shape)).seconds(1)
    )
    base, fetched = computed(whole), part.misses / len(part.gaps)
    busy = computed(part) - wake * waited(part)
    handling = max(0.0, (busy - base) / fetched) if fetched >= 1 else 0.0
    more = ahead.bytes_read / len(ahead.gaps) / shape.expert_bytes - fetched
    predicted = computed(ahead) - wake * waited(ahead) - busy - handling * max(0.0, more)
    copied = min(handling, shape.expert_bytes / _copies(machine))
    # What runs is the judge: matrices alone cannot take longer than all of a token.
    factor = min(1.0, base / matrices)
    return replace(
        processor,
        expert=processor.expert.scaled(factor),
        dense=processor.dense.scaled(factor),
        layer=max(0.0, base - matrices) / shape.layers,
        fetch=handling - copied,
        copy=copied / shape.expert_bytes,
        ahead=max(0.0, predicted / shape.layers),
        wake=wake,
    )


def computed(session: Session) -> float:
    """Seconds a token that are no stall."""
    return session.tpot_s - session.stall_s / len(session.gaps)


def waited(session: Session) -> float:
    """Seconds a token of its waits, of each no more than counts (see `Costs.wake`)."""
    return min(session.stall_s, COOLED * session.misses) / len(session.gaps)


def waiting(short: Session, long: Session) -> float:
    """`Costs.wake`, from two runs that waited for about as many experts."""
    more = waited(long) - waited(short)
    return max(0.0, (computed(long) - computed(short)) / more) if more > 0 else 0.0


def _copies(machine: Machine) -> float:
    """Bytes a second that one thread copies: it reads and writes each of them."""
    return float(machine.measured["memory"]["1"]) / 2


def sessions(model: str, shape: Shape, device: str) -> tuple[Session, Session, Session]:
    """With everything resident, with a part, and with a part and a predictor."""
    stage = Stage(model, LoadConfig(cache="100%", prefetch="off", device=device, context=256))
    prompts = [Prompt(" ".join(f"w{i}" for i in range(4, 24)), "rehearsal")]
    try:
        stage.fill()
        whole = stage.play(prompts, TOKENS, SETTLE)
        slots = max(shape.top_k, int(SHARE * shape.layers * shape.experts))
        stage.attach(LoadConfig(policy="lru", prefetch="off"), slots)
        part = stage.play(prompts, TOKENS, SETTLE)
        stage.attach(LoadConfig(policy="lru", prefetch="next-gate", no_guard=True), slots)
        return whole, part, stage.play(prompts, TOKENS, SETTLE)
    finally:
        stage.close()


def waits(model: str, shape: Shape, device: str) -> tuple[Session, Session]:
    """With a part of the experts in memory: from the disk, and each in WAIT seconds."""
    stage = Stage(model, LoadConfig(cache="100%", prefetch="off", device=device, context=256))
    prompts = [Prompt(" ".join(f"w{i}" for i in range(4, 24)), "rehearsal")]
    slots, found = max(shape.top_k, int(SHARE * shape.layers * shape.experts)), []
    try:
        for limit in (None, int(shape.expert_bytes / WAIT)):
            stage.parts = replace(stage.parts, read_limit=limit)
            stage.attach(LoadConfig(policy="lru", prefetch="off"), slots)
            found.append(stage.play(prompts, TOKENS, SETTLE))
        return found[0], found[1]
    finally:
        stage.close()


def _dense_bytes(shape: Shape) -> int:
    """Of a layer: attention, and its share of the head."""
    attention = 2 * shape.hidden * (2 * _heads(shape) * 64 + 2 * 4 * 64)
    return attention + 2 * shape.words * shape.hidden // shape.layers


def _heads(shape: Shape) -> int:
    return max(4, shape.hidden // 64)


@contextmanager
def small_model(folder: Path, shape: Shape) -> Iterator[Path]:
    """A folder of a random Qwen3-MoE, gone afterwards. OutputError where it cannot be written."""
    try:
        with (
            TemporaryDirectory(prefix=".greenroom-", dir=folder) as name,
            undone_by(partial(shutil.rmtree, name, ignore_errors=True)),
        ):
            write(Path(name), shape)
            yield Path(name)
    except OSError as error:
        raise OutputError(f"cannot write a small model in {folder}: {error.strerror}") from error


def write(folder: Path, shape: Shape) -> None:
    """Config, tokenizer of whole words, weights; all experts of a layer are alike."""
    random = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=random) / size[-1] ** 0.5).bfloat16()

    heads = _heads(shape)
    tensors = {
        "model.embed_tokens.weight": drawn(shape.words, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden).bfloat16(),
        "lm_head.weight": drawn(shape.words, shape.hidden),
    }
    each = {
        "gate_proj": drawn(shape.inner, shape.hidden),
        "up_proj": drawn(shape.inner, shape.hidden),
        "down_proj": drawn(shape.hidden, shape.inner),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(shape.hidden).bfloat16()
        for norm in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{norm}.weight"] = torch.ones(64).bfloat16()
        for name, rows in (("q", heads * 64), ("k", 256), ("v", 256)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = drawn(rows, shape.hidden)
        tensors[f"{at}.self_attn.o_proj.weight"] = drawn(shape.hidden, heads * 64)
        tensors[f"{at}.mlp.gate.weight"] = drawn(shape.experts, shape.hidden)
        for expert in range(shape.experts):
            for name, weight in each.items():
                tensors[f"{at}.mlp.experts.{expert}.{name}.weight"] = weight.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    )


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": _heads(shape),
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": shape.inner,
        "moe_intermediate_size": shape.inner,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": shape.words,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": None,
    }


def _tokenizer(shape: Shape) -> dict[str, Any]:
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, shape.words)}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
