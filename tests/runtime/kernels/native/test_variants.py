"""A whole model computes the same bits by the library of every processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.native.library import CHOICE, FOLDER, Library, library
from tests.gguf_models import write
from tests.hf.attach.test_one_token import tokens
from tests.models import cached_tiny

VARIANTS = [
    each.variant for path in FOLDER.glob("greenroom-*.so") if (each := Library(path)).runs_here
]
MIX = {"ffn_up": "Q8_0", "ffn_down": "Q8_0", "attn_v": "Q8_0", "": "Q4_K"}
SOME, ALL = 9, 24  # slots: misses are computed in groups; all layers are one parallel region


@torch.no_grad()
def save_logits(variant: str, out: str, *paths: str) -> None:
    """Save logits of prompts of 7 and 20 tokens and of 8 tokens after the first, by each kernel."""
    assert library().variant == variant
    found = {}
    for path in paths:
        for kernels in ("rounded", "native"):
            for capacity in (SOME, ALL):
                skeleton = ModelSkeleton.of(Path(path))
                skeleton.keep_dense_encoded()
                model = skeleton.load()
                setup = ModelSetup(
                    skeleton.catalog, capacity=capacity, kernels=kernels, policy="lru"
                )
                model.greenroom = Greenroom(model, setup)
                prompt = torch.arange(3, 23)[None]
                found[path, kernels, capacity] = tokens(model, 8), model(prompt).logits
                model.greenroom.detach()
    torch.save(found, out)


@pytest.mark.process
@pytest.mark.skipif(len(VARIANTS) < 2, reason="one library runs on this processor")
def test_a_model_computes_the_same_bits_by_every_library(tmp_path: Path) -> None:
    plain = cached_tiny("qwen3_moe", dtype="bfloat16", hidden_size=64, head_dim=16)
    mixed, results = write(tmp_path / "mixed.gguf", "qwen3_moe", MIX), []
    for variant in VARIANTS:
        out = str(tmp_path / f"{variant}.pt")
        code = f"import sys; from {__name__} import save_logits; save_logits(*sys.argv[1:])"
        subprocess.run(
            [sys.executable, "-c", code, variant, out, str(plain), str(mixed)],
            cwd=Path(__file__).parents[4],
            env={**os.environ, CHOICE: variant},
            check=True,
        )
        results.append(torch.load(out))
    first, *others = results
    assert len(first) == 8
    for other in others:
        for case, logits in first.items():
            assert all(map(torch.equal, logits, other[case])), case
        assert all(part.isfinite().all() for each in other.values() for part in each)
