"""Checks of tensors that GPTQ tools write beside matrices, and that Greenroom does not use.

With `desc_act: false` GPTQModel and AutoGPTQ write `g_idx` in the order of the inputs, and for
layers without a bias zeros. A file in which they are not so would be computed wrongly. The checks
read the first file's `g_idx`, and all biases, but of the experts of a layer only one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.header import read_header
from greenroom.hf.checkpoint.quantised.methods import settings_of
from greenroom.hf.checkpoint.read import read_tensor

EXPERT = re.compile(r"\.experts\.\d+\.")


def check_exported_parts(checkpoint: Checkpoint, unused: Iterable[str]) -> None:
    """Check the order of inputs and the unused biases of a GPTQ checkpoint.

    Other checkpoints pass. `unused` are tensors that no parameter of the model needs. Raises
    CheckpointError for inputs in another order than the config says, UnsupportedModel for a bias
    that is not zero.
    """
    settings = settings_of(checkpoint.config) or {}
    if checkpoint.pack is not None or settings.get("quant_method") != "gptq":
        return
    for name in _one_expert(name for name in unused if name.endswith(".bias")):
        matrix = checkpoint.tensors.get(f"{name.removesuffix('.bias')}.weight")
        if matrix is not None and matrix.encoding != PLAIN and checkpoint.read(name).any():
            raise UnsupportedModel(
                f"{checkpoint.folder}: the model has no parameter for the bias {name}, which is not"
                " zero: the config does not fit these weights"
            )
    if not settings.get("desc_act"):
        _check_order(checkpoint)


def _check_order(checkpoint: Checkpoint) -> None:
    header = read_header(Path(checkpoint.files[0]), 0)
    for name in _one_expert(name for name in header if name.endswith(".g_idx")):
        stored, scales = header[name], header.get(f"{name.removesuffix('g_idx')}scales")
        if stored.dtype != "int32" or len(stored.shape) != 1 or scales is None:
            continue
        index, groups = read_tensor(checkpoint.files, name, stored).long(), scales.shape[0]
        size = -(-len(index) // groups)
        if not torch.equal(index, torch.arange(len(index)) // size):
            raise CheckpointError(
                f"{checkpoint.files[0]}: {name} has the inputs in another order, but"
                " quantization_config.desc_act in config.json is false: set it to true if the model"
                " was quantised with act order"
            )


def _one_expert(names: Iterable[str]) -> list[str]:
    """Return names of tensors; of those that differ only in the expert, the first."""
    chosen: dict[str, str] = {}
    for name in names:
        chosen.setdefault(EXPERT.sub(".experts.*.", name), name)
    return [*chosen.values()]
