"""Distances of the kernels, and of ggml's arithmetic, from exact products."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.errors import UsageError
from greenroom.hf.check.kernel_quality import compare_kernels
from tests.gguf_models import DATA, write
from tests.hf.conftest import one_line

TEXT = "The green room is where the performers wait. An expert waits on disk until its cue. " * 6


@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K"])
def test_precise_kernels_are_nearer_than_the_default_and_ggml(name: str) -> None:
    """The default is as near as ggml: its inputs share a scale with fewer neighbours."""
    stages: list[str] = []
    path = DATA / f"{name}.gguf"
    measured = compare_kernels(str(path), TEXT, cache="50%", tokens=128, say=stages.append)
    distances = {key: each.kl_mean for key, each in measured.distances.items()}
    assert list(distances) == ["native", "precise", "ggml"]
    assert 0 < distances["precise"] < distances["native"] / 2
    assert distances["precise"] < distances["ggml"] / 2
    assert distances["native"] < 2 * distances["ggml"]
    assert measured.tokens == 127
    assert measured.distances["precise"].perplexity == pytest.approx(measured.perplexity, rel=0.02)
    assert [stage.split(" with ")[-1] for stage in stages] == [
        "computing 128 tokens exactly", "ggml's arithmetic", "--kernels native", "--kernels precise"
    ]  # fmt: skip


def test_types_without_inputs_of_8_bits_have_no_precise_kernels(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"_exps": "IQ2_S", "": "BF16"})
    measured = compare_kernels(str(path), TEXT, cache="50%", tokens=60)
    assert list(measured.distances) == ["native", "ggml"]


def test_float32_models_round_no_inputs() -> None:
    path = DATA / "Q4_K_M.gguf"
    measured = compare_kernels(str(path), TEXT, cache="50%", tokens=60, dtype="float32")
    assert measured.dtype == "float32"
    assert list(measured.distances) == ["native", "ggml"]
    assert measured.distances["native"].kl_mean < 1e-8 < measured.distances["ggml"].kl_mean


def test_a_file_without_quantised_matrices_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "BF16"})
    with pytest.raises(UsageError) as error:
        compare_kernels(str(path), TEXT)
    assert "has no quantised matrices, so --quality needs an original" in one_line(error)
