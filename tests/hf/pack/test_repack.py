"""`--repack`: a model's copy is made once, used while it is that of the model, or refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import greenroom
from greenroom.errors import GreenroomError, OutputError, StoreError, UsageError
from greenroom.hf.checkpoint.pack.format import DATA
from greenroom.hf.pack import packing, repack
from greenroom.hf.pack.packing import pack
from greenroom.hf.pack.repack import RECORD, repacked
from tests.gguf_models import DATA as GGUF
from tests.hf.pack.rig import source
from tests.models import cached_tiny

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that the test may change."""
    return Path(shutil.copytree(source(), tmp_path / "model"))


def silent(share: float, what: str) -> None: ...


def make(model: Path, folder: Path) -> Path:
    return Path(repacked(str(model), str(folder), None, silent))


def refused(model: Path, folder: Path, error: type[GreenroomError] = UsageError) -> str:
    with pytest.raises(error) as caught:
        make(model, folder)
    return str(caught.value)


def answer(model: Path, **options: Any) -> torch.Tensor:
    loaded, _ = greenroom.load(str(model), cache="40%", **options)
    ids = loaded.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert loaded.greenroom.stats().bytes_read > 0
    loaded.greenroom.detach()
    return ids


@pytest.mark.parametrize("of", ["folder", "gguf"])
def test_a_copy_is_made_once_and_gives_the_same_answer(of: str, tmp_path: Path) -> None:
    origin = cached_tiny("qwen3_moe", tokenizer=True) if of == "folder" else GGUF / "Q8_0.gguf"
    expected = answer(origin)
    assert torch.equal(answer(origin, repack=str(tmp_path / "copy")), expected)
    made = (tmp_path / "copy" / DATA).stat()
    assert torch.equal(answer(origin, repack=str(tmp_path / "copy")), expected)
    assert (tmp_path / "copy" / DATA).stat() == made


def test_the_progress_names_the_folder(model: Path, tmp_path: Path) -> None:
    said: list[tuple[float, str]] = []
    repacked(str(model), str(tmp_path / "copy"), None, lambda *at: said.append(at))
    assert said == sorted(said)
    assert 0.9 < said[-1][0] <= 1
    assert said[-1][1] == f"copying the model to {tmp_path / 'copy'}, 100%"


def test_an_interrupted_copy_is_continued(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(share: float, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repacked(str(model), str(tmp_path / "copy"), None, stop)
    assert not (tmp_path / "copy").exists()
    assert make(model, tmp_path / "copy") == tmp_path / "copy"
    assert not (tmp_path / "copy.unfinished").exists()


def test_a_model_that_changed_is_not_read_from_its_old_copy(model: Path, tmp_path: Path) -> None:
    copy = make(model, tmp_path / "copy")
    weights = min(model.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))  # older than the copy: another file all the same
    assert refused(model, copy) == (
        f"--repack {copy}: {weights.name} has changed since this copy was made: delete the folder,"
        " and the copy is made again"
    )
    shutil.rmtree(copy)
    make(model, copy)
    make(model, copy)


def test_a_pack_of_the_same_experts_is_taken_over_unless_it_is_older(
    model: Path, tmp_path: Path
) -> None:
    pack(str(model), tmp_path / "copy", "same")
    make(model, tmp_path / "copy")
    assert (tmp_path / "copy" / RECORD).exists()
    (tmp_path / "copy" / RECORD).unlink()
    os.utime(min(model.glob("*.safetensors")))
    os.utime(tmp_path / "copy" / "greenroom.json", ns=(1, 1))
    assert "has changed since this copy was made" in refused(model, tmp_path / "copy")


@pytest.mark.parametrize("kind", ["int8", "same"])
def test_other_packs_are_refused(kind: str, model: Path, tmp_path: Path) -> None:
    other = model if kind == "int8" else source("mixtral")
    pack(str(other), tmp_path / "copy", kind)
    assert f"a pack of another model or with other experts ({kind} from {other})" in refused(
        model, tmp_path / "copy"
    )


def test_a_pack_needs_no_copy(model: Path, tmp_path: Path) -> None:
    pack(str(model), tmp_path / "pack", "same")
    assert "is a pack, which is read in this way already" in refused(
        tmp_path / "pack", tmp_path / "copy"
    )


def test_a_folder_with_other_files_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    for path in (tmp_path, model, model / "config.json"):
        assert "this is no copy of the model: name a folder that is empty" in refused(model, path)


def test_a_copy_that_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no folder" in refused(model, tmp_path / "no" / "copy", OutputError)
    free = SimpleNamespace(free=4096)
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: free)
    said = refused(model, tmp_path / "copy", OutputError)
    assert "of disk space, but only" in said
    assert " -o" not in said
    free.free = 1 << 40
    assert "cannot be written" in refused(model, Path("/proc/copy"), OutputError)
    assert not (tmp_path / "copy").exists()


def test_a_damaged_copy_is_never_computed_with(tmp_path: Path) -> None:
    model = cached_tiny("qwen3_moe", tokenizer=True)
    copy = make(model, tmp_path / "copy")
    data = bytearray((copy / DATA).read_bytes())
    for at in range(4096, len(data), 4096):
        data[at] ^= 1
    (copy / DATA).write_bytes(data)
    with pytest.raises(StoreError, match=r"is damaged .* --repair"):
        answer(model, repack=str(copy))


def test_a_damaged_record_is_named(model: Path, tmp_path: Path) -> None:
    copy = make(model, tmp_path / "copy")
    for text in ("", "{}", f'{{"format": "{repack.FORMAT}", "files": 1}}'):
        (copy / RECORD).write_text(text)
        assert str(copy / RECORD) in refused(model, copy)
