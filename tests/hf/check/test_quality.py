"""KL divergence and perplexity of a model against its original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from greenroom.errors import NotAModel, OutputError, UsageError
from greenroom.hf.check import windows as module
from greenroom.hf.check.quality import quality
from greenroom.hf.checkpoint.resolve import open_checkpoint
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_models import write
from tests.hf.conftest import one_line
from tests.hf.pack.rig import fill, packed, source

TEXT = "The green room is where the performers wait. An expert waits on disk until its cue. " * 6


@torch.inference_mode()
def quality_in_memory(folder: Path, window: int) -> tuple[float, float, float, float, float, int]:
    """Quality computed by transformers, with all weights in memory."""
    models = [load_reference_model(ModelSkeleton.of(source())) for _ in range(2)]
    fill(models[1], folder)
    ids = tokenizer_of(open_checkpoint(source()))(TEXT)["input_ids"]
    kl, theirs, mine, same = [], [], [], []
    for at in range(0, len(ids) - 1, window):
        part = torch.tensor([ids[at : at + window]])
        if part.shape[1] < 2:
            continue
        p, q = (m(input_ids=part).logits[0, :-1].double().log_softmax(-1) for m in models)
        kl.append((p.exp() * (p - q)).sum(-1))
        right = part[0, 1:, None]
        theirs.append(-p.gather(1, right))
        mine.append(-q.gather(1, right))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
    divergences = torch.cat(kl)
    return (
        divergences.mean().item(),
        divergences.quantile(0.99).item(),
        torch.cat(mine).mean().exp().item(),
        torch.cat(theirs).mean().exp().item(),
        torch.cat(same).mean().item(),
        len(divergences),
    )


def test_figures_equal_those_of_models_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    window = 50
    monkeypatch.setattr(module, "WINDOW", window)
    folder = packed("int4")
    result = quality(str(folder), TEXT, cache="25%")
    kl, p99, mine, theirs, same, count = quality_in_memory(folder, window)
    assert result.tokens == count
    assert result.original == str(source())
    assert result.kl_mean == pytest.approx(kl, rel=0.15)  # compiled kernels round another way
    assert result.kl_p99 == pytest.approx(p99, rel=0.3)
    assert result.perplexity == pytest.approx(mine, rel=0.02)
    assert result.original_perplexity == pytest.approx(theirs, rel=0.02)
    assert result.same_top == pytest.approx(same, abs=0.05)
    assert result.kl_mean > 1e-4


def test_a_pack_with_the_same_experts_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are kept in a file; probabilities are computed for a few positions at a time."""
    row_counts: list[int] = []
    real = torch.Tensor.log_softmax

    def counted(self: torch.Tensor, dim: int) -> torch.Tensor:
        row_counts.append(self.shape[0])
        return real(self, dim)

    monkeypatch.setattr(torch.Tensor, "log_softmax", counted)
    result = quality(str(packed("same")), TEXT, cache="25%")
    assert result.kl_mean == result.kl_p99 == 0
    assert result.perplexity == result.original_perplexity
    assert result.same_top == 1
    assert max(row_counts) == module.ROWS


def test_fewer_bits_have_a_larger_loss() -> None:
    losses = [quality(str(packed(kind)), TEXT, tokens=64).kl_mean for kind in ("int8", "int4")]
    assert 0 < losses[0] < losses[1]


def test_any_two_models_of_one_architecture_are_compared(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", "qwen3_moe", {"_exps": "Q4_0", "": "BF16"})
    plain = write(tmp_path / "plain.gguf", "qwen3_moe", {"": "BF16"})
    result = quality(str(file), TEXT, str(plain), tokens=40)
    assert result.tokens == 39
    assert result.kl_mean > 0


# Mistakes


def test_a_missing_original_is_refused(tmp_path: Path) -> None:
    from greenroom.hf.pack.packing import pack

    origin = Path(shutil.copytree(source(), tmp_path / "source"))
    pack(str(origin), tmp_path / "pack", "int8")
    origin.rename(tmp_path / "moved")
    with pytest.raises(NotAModel) as error:
        quality(str(tmp_path / "pack"), TEXT)
    assert "was not found" in one_line(error)
    result = quality(str(tmp_path / "pack"), TEXT, str(tmp_path / "moved"), tokens=9)
    assert result.tokens == 8


@pytest.mark.parametrize(
    ("model", "against", "text", "message"),
    [
        ("source", None, TEXT, "name one by --against"),
        ("source", "source", TEXT, "are the same model"),
        ("pack", "olmoe", TEXT, "is a Qwen3MoeForCausalLM, and"),
        ("pack", None, "a", "the text of --quality is too short"),
        ("pack", None, "", "the text of --quality is too short"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(
    model: str, against: str | None, text: str, message: str
) -> None:
    named = {"source": source(), "pack": packed("int8"), "olmoe": source("olmoe")}
    other = None if against is None else str(named[against])
    with pytest.raises(UsageError) as error:
        quality(str(named[model]), text, other)
    assert message in one_line(error)


def test_a_full_disk_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = packed("int8")
    full = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OutputError, match="the original's logits need"):
        quality(str(folder), TEXT)


def test_keys_and_values_and_kernels_are_compared_with_the_model_itself() -> None:
    """The original is the same model with the defaults, read in the same passes."""
    name = str(source())
    stages: list[str] = []
    same = quality(name, TEXT, name, cache="25%", tokens=100, kernels="native", say=stages.append)
    assert same.kl_mean == same.kl_p99 == 0
    assert stages[-1].endswith(f"with {name} --kernels native")
    int8 = quality(name, TEXT, cache="25%", tokens=100, kv="int8", say=stages.append)
    assert stages[-1].endswith("--kv int8")
    assert int8.original == int8.model == name
    assert 1e-6 < int8.kl_mean < 1
    assert int8.original_perplexity == pytest.approx(same.original_perplexity, rel=0.01)


def test_a_config_for_the_gguf_files_of_the_two_models(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    folder = tmp_path / "config"
    folder.mkdir()
    ModelSkeleton.of(path).model.config.save_pretrained(folder)
    measured = quality(
        str(path), TEXT, kernels="eager", tokens=30, cache="100%", config=str(folder)
    )
    assert measured.same_top > 0.9
    with pytest.raises(UsageError) as error:
        quality(str(source()), TEXT, str(source()), kv="int4", config=str(folder))
    assert "--config is for GGUF files, but neither" in one_line(error)
