"""What tells a model from another, and what does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.resolve import demo_folder, open_checkpoint
from tests.models import cached_tiny


def of(folder: Path) -> str:
    return fingerprint(open_checkpoint(folder))


def changed(folder: Path, to: Path, **values: Any) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **values}, indent=7))
    return to


def test_is_64_digits_that_do_not_change() -> None:
    assert of(demo_folder()) == of(demo_folder())
    assert len(of(demo_folder())) == 64
    assert int(of(demo_folder()), 16)


def test_where_a_model_lies_and_how_its_files_are_cut_does_not_matter(tmp_path: Path) -> None:
    folder = cached_tiny("qwen3_moe")
    copy = changed(folder, tmp_path / "copy", transformers_version="9.9", _name_or_path="/home")
    assert of(copy) == of(folder)
    assert of(cached_tiny("qwen3_moe", shards=1)) == of(folder)


def test_another_config_type_or_size_is_another_model(tmp_path: Path) -> None:
    folder = cached_tiny("qwen3_moe")
    others = [
        changed(folder, tmp_path / "copy", num_experts_per_tok=3),
        cached_tiny("qwen3_moe", dtype="bfloat16"),
        cached_tiny("qwen3_moe", moe_intermediate_size=16),
        cached_tiny("mixtral"),
    ]
    assert len({of(folder), *map(of, others)}) == 5
