"""`greenroom verify` as its user sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from greenroom.hf.check.verify import _Trial
from greenroom.runtime.kernels.eager import EagerKernel
from tests.cli.conftest import Run
from tests.gguf_models import DATA

FEW = ("--cache", "25%", "--max-new-tokens", 3, "--prompt", "The green room")
KEYS = {"identical", "max_logit_difference", "grouped_mm_difference", "tokens_compared"}


@pytest.mark.parametrize("layers", [(), ("--layers",)])
def test_success(cli: Run, folder: Path, layers: tuple[str, ...]) -> None:
    ran = cli("verify", folder, *FEW, *layers)
    assert ran.code == 0, ran.out + ran.err
    assert ran.err == ""
    lines = ran.out.splitlines()
    assert lines[-1].startswith("identical over ")
    assert "native kernels to themselves with any cache" in lines[-1]
    assert "transformers' grouped_mm" in lines[-2]
    assert sum(line.startswith("ok  ") for line in lines) >= 4
    assert "FAIL" not in ran.out


def test_json(cli: Run, folder: Path) -> None:
    ran = cli("verify", folder, *FEW, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert set(ran.json) >= KEYS
    assert ran.json["identical"] is True
    assert ran.json["max_logit_difference"] <= 2 * ran.json["grouped_mm_difference"]
    assert ran.json["tokens_compared"] > 3
    assert ran.json["failed"] == []


@pytest.fixture
def no_other_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the comparisons of the kernels with themselves, by other caches and orders."""
    monkeypatch.setattr(_Trial, "_cases", lambda trial, reference: [])


@pytest.mark.usefixtures("no_other_caches")
def test_other_kernels_are_judged(cli: Run, folder: Path) -> None:
    ran = cli("verify", folder, *FEW, "--layers", "--kernels", "eager")
    assert ran.code == 0, ran.out + ran.err
    said = next(line for line in ran.out.splitlines() if "largest difference" in line)
    assert said.startswith("eager kernels")
    assert ": 0 in a layer's output" in said


@pytest.mark.usefixtures("no_other_caches")
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_failure(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, json: tuple[str, ...]
) -> None:
    right = EagerKernel.combine

    def wrong(self: EagerKernel, step: Any) -> Any:
        real = isinstance(step.layer.module, nn.Module)  # not the toy that a class is tried on
        return right(self, step) * (1.01 if real else 1)

    monkeypatch.setattr(EagerKernel, "combine", wrong)
    ran = cli("verify", folder, *FEW, *json)
    assert ran.code == 1
    assert "comparisons failed" in ran.line
    if json:
        assert ran.json["identical"] is False
        assert ran.json["failed"]
    else:
        assert "FAIL eager kernels" in ran.out
        assert "identical" not in ran.out


def test_distances_of_a_gguf_file_s_kernels(cli: Run, tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("The green room is where the performers wait. " * 4)
    arguments = ("verify", DATA / "Q4_K_M.gguf", "--quality", text, "--cache", "50%")
    ran = cli(*arguments, "--tokens", 60)
    assert (ran.code, ran.err) == (0, "")
    *_, title, header, _, exact, native, precise, ggml, meaning, states = ran.out.splitlines()
    assert title.startswith("distance from exact products, 59 tokens")
    assert header.split() == ["KL", "mean", "KL", "p99", "same", "top", "token", "perplexity"]
    rows = [exact, native, precise, ggml]
    assert [row.split("  ")[0] for row in rows] == [
        "exact products", "default kernels", "--kernels precise", "ggml's arithmetic, emulated"
    ]  # fmt: skip
    assert "beside that of ggml's arithmetic: default kernels " in meaning
    assert states == "the kernels also round hidden states to bfloat16, ggml does not"
    ran = cli(*arguments, "--tokens", 9, "--json")
    assert (ran.json["tokens"], ran.json["dtype"]) == (8, "bfloat16")
    assert list(ran.json["distances"]) == ["native", "precise", "ggml"]
    assert set(ran.json["distances"]["ggml"]) == {"kl_mean", "kl_p99", "perplexity", "same_top"}
    assert "no effect with --quality" in cli(*arguments, "--layers").mistake
