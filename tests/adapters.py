"""Adapters of tiny models, and the complete checkpoints that they stand for.

adapter = make_adapter(folder, tmp_path / "math", {0: [1, 3], 2: [0]})
merged = merge(folder, adapter, tmp_path / "merged")     # the same model without an adapter
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Experts = Mapping[int, Sequence[int]]  # numbers of experts by the number of their layer
NAME = re.compile(r"\.layers\.(\d+)\..*\.experts\.(\d+)\.")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder's safetensors files."""
    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def changed_experts(folder: Path, experts: Experts, seed: int = 1) -> dict[str, Tensor]:
    """The tensors of some of a checkpoint's experts, with other values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (0.2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in tensors_of(folder).items()
        if (match := NAME.search(name)) and int(match[2]) in experts.get(int(match[1]), ())
    }


def make_adapter(folder: Path, to: Path, experts: Experts, seed: int = 1, prefix: str = "") -> Path:
    """Write an adapter of a checkpoint; names lose `prefix`, as ESFT's lose `model.`."""
    to.mkdir()
    changed = changed_experts(folder, experts, seed)
    assert changed
    save_file({k.removeprefix(prefix): v for k, v in changed.items()}, to / "adapter.safetensors")
    return to


def merge(folder: Path, adapter: Path, to: Path) -> Path:
    """Write the complete checkpoint in which an adapter's experts replace the model's."""
    shutil.copytree(folder, to)
    changed = tensors_of(adapter)
    for path in sorted(to.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = {name: changed.get(name, tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata)
    return to
