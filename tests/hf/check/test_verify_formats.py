"""`verify` accepts a tiny model of every format: architectures and types of GGUF, safetensors."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from greenroom.config import LoadConfig
from greenroom.hf.adapters import ADAPTERS
from greenroom.hf.check import verify as checks
from greenroom.hf.check.verify import verify
from greenroom.hf.checkpoint.gguf.architectures import SERVED
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.encodings import ENCODINGS
from tests.ggml_blocks import GGML
from tests.gguf_architectures import FOLDER, names
from tests.gguf_models import DATA
from tests.hf.checkpoint.test_integers import FORMATS
from tests.hf.pack.rig import packed
from tests.quantised import compressed, fp8, mxfp4
from tests.quantised_floats import CASES, floats, fp8_with_fp4_experts

# Checkpoints in safetensors; test_ggml_types.py has files of every ggml type.
SAFETENSORS: dict[str, Callable[[Path], Path]] = {
    "fp8": fp8,
    "fp8, fp4 experts": fp8_with_fp4_experts,
    "mxfp4, stacked": mxfp4,
    "compressed-tensors, integers": compressed,
    **{f"{method}, {form}": partial(floats, method=method, form=form) for method, form in CASES},
    **{
        f"integers: {name}": partial(make, **options)
        for name, (_, make, options) in FORMATS.items()
    },
}
# One checkpoint of each encoding, and one of each adapter of GGUF files, are in `make check`.
QUICK = {
    "fp8",
    "fp8, fp4 experts",
    "mxfp4, stacked",
    "compressed-tensors, integers",
    "compressed-tensors, nvfp4",
    "modelopt, nvfp4",
    "integers: awq",
    "integers: gptq, act order",
    "integers: int8",
}
ADAPTED = {"dbrx", "llama4", "qwen3_omni_moe", "step3p7"}
PACKED = {"bf12", "int4", "int8"}  # of packs
SCALED = "gguf_nvfp4_scaled"  # the encoding of the files in MODELOPT
MODELOPT = sorted((DATA / "modelopt").glob("*.gguf"))


def marked(all_names: Iterable[str], quick: set[str]) -> list[Any]:
    """Names as parameters; only the quick ones are in `make check`, the others in `make soak`."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in all_names
    ]


@pytest.fixture(autouse=True)
def _few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache besides the reference: what caches there are does not depend on the format."""
    cases = checks._Trial._cases

    def last(self: Any, reference: Any) -> list[LoadConfig]:
        return [case for case in cases(self, reference) if case.device == "fake"][1:2]

    monkeypatch.setattr(checks._Trial, "_cases", last)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 64 tokens, as many as the architectures' tiny models have."""
    letters = ["</s>", "\u0120", *string.ascii_letters, *string.digits][:64]
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>").save_pretrained(folder)
    return folder


def assert_verified(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    verdict = verify(str(source), "50%", tokens=2, prompt="The green room")
    assert verdict.identical, verdict.checks
    assert verdict.near, verdict.layer_differences
    assert len(verdict.checks) >= 3
    assert "no expert is prefetched any more" not in caplog.text


@pytest.mark.parametrize("name", marked(names(), ADAPTED))
def test_gguf_architectures(
    name: str, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layer by layer where an adapter of ours computes the experts."""
    for path in (*(FOLDER / name).iterdir(), *tokenizer.iterdir()):
        (tmp_path / path.name).symlink_to(path)
    assert_verified(tmp_path / "model.gguf", caplog)


@pytest.mark.parametrize("path", MODELOPT, ids=lambda path: path.stem)
def test_gguf_with_scales_of_matrices(
    path: Path, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for each in (path, *tokenizer.iterdir()):
        (tmp_path / each.name).symlink_to(each)
    assert {*ModelSkeleton.of(path).catalog.layouts[0].encodings.values()} == {SCALED}
    assert_verified(tmp_path / path.name, caplog)


@pytest.mark.parametrize("name", marked(SAFETENSORS, QUICK))
def test_safetensors(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_verified(SAFETENSORS[name](tmp_path), caplog)


def test_a_pack_in_12_bits(caplog: pytest.LogCaptureFixture) -> None:
    assert_verified(packed("bf12"), caplog)


def test_every_encoding_is_in_a_checkpoint(tmp_path: Path) -> None:
    """Types of GGUF files are in test_ggml_types.py."""
    encodings = {*GGML, *PACKED, SCALED, *(encoding for encoding, _, _ in FORMATS.values())}
    for name in sorted(QUICK):
        layouts = ModelSkeleton.of(SAFETENSORS[name](tmp_path / name)).catalog.layouts
        encodings |= {encoding for layout in layouts for encoding in layout.encodings.values()}
    assert encodings == {*ENCODINGS}


def test_every_adapter_of_gguf_files_is_among_the_quick_ones() -> None:
    assert {*SERVED} & {*ADAPTERS} == ADAPTED
