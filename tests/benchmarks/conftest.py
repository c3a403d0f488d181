"""Tiny recordings and checkpoints of the smoke tests, made once a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.hf.pack.packing import pack
from tests.benchmarks import data, harness

TEXT = "A wood in the north. The wind is cold, and the first snow falls upon the stage. " * 8


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of the names in braces on command lines, without `{out}` and `{pack}`."""
    folder = tmp_path_factory.mktemp("inputs")
    (traces := folder / "traces").mkdir()
    data.write_recordings(traces)
    data.write_inputs(folder / "inputs.trace")
    data.write_llama_bench(folder / "llama-bench")
    data.write_llama_completion(folder / "llama-completion")
    shape = folder / "shape.gguf"
    small = ["--tiny", "--layers", "2", "--vocabulary", "1024"]
    assert harness.run("shapes.py", ["qwen3-30b-a3b", str(shape), *small]) == 0
    (folder / "text.txt").write_text(TEXT + "\n")
    root = folder / "root"
    args = [str(root), "--tiny", "--variants", "zipf1.0", "zipf1.5", "--gguf", "zipf1.0"]
    assert harness.run("checkpoints.py", args) == 0
    return {
        "traces": traces,
        "recording": traces / f"{data.MODELS[0]}.npz",
        "gate_inputs": folder / "inputs.trace",
        "root": root,
        "model": root / "moe1.7b-zipf1.0",
        "llama": folder / "llama-bench",
        "llama_completion": folder / "llama-completion",
        "shape": shape,
        "text": folder / "text.txt",
    }


@pytest.fixture(scope="session")
def packed(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of the checkpoint whose experts are split into segments."""
    folder = tmp_path_factory.mktemp("packs") / "pack"
    pack(str(inputs["model"]), folder, "same", segments=2)
    return folder
