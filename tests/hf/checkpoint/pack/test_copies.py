"""Packs with low-precision copies: what lies where, and that nothing of it changes exact runs."""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from greenroom.errors import CheckpointError, StoreError, UnknownName, UsageError
from greenroom.hf.checkpoint.pack.catalog import CopiesCatalog
from greenroom.hf.checkpoint.resolve import open_checkpoint
from greenroom.hf.model.reference import expand_packed_experts, load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.packing import pack
from greenroom.hf.pack.target import ExpertPacker
from greenroom.runtime.encodings import ENCODINGS
from tests.hf.check.test_parity import assert_same, ids, streamed
from tests.hf.pack.rig import header, source

_KEEP: list[TemporaryDirectory[str]] = []
KINDS = [("int8", "int4"), ("same", "int4"), ("same", "int8"), ("fp8", "int4"), ("bf12", "int4")]


@cache
def with_copies(kind: str, precision: str, name: str = "qwen3_moe") -> Path:
    """A tiny pack that tests do not change."""
    _KEEP.append(TemporaryDirectory(prefix="copies-"))
    folder = Path(_KEEP[-1].name) / kind
    pack(str(source(name)), folder, kind, precision=precision)
    return folder


def whole_of(folder: Path, name: str = "qwen3_moe"):
    """A model in memory with the pack's exact experts, read without stores and kernels."""
    skeleton = ModelSkeleton.of(folder)
    whole = load_reference_model(ModelSkeleton.of(source(name)))
    for number, layer in enumerate(skeleton.catalog.layers):
        for key, value in expand_packed_experts(skeleton, skeleton.checkpoint.pack, number).items():
            whole.get_submodule(layer).get_parameter(key).data.copy_(value)
    return whole


@pytest.mark.parametrize(("kind", "precision"), KINDS)
@pytest.mark.parametrize("kernels", ["eager", "native"])
def test_runs_without_the_option_are_exact(kind, precision, kernels):
    folder = with_copies(kind, precision)
    with (
        streamed(folder, capacity=3, kernels=kernels) as model,
        streamed(folder, capacity=3, kernels=kernels, fake=True, readers=3) as other,
        torch.inference_mode(),
    ):
        if kernels == "eager":
            assert_same(model, whole_of(folder), ids(2, 9))
        batch = ids(2, 9)
        mine, theirs = (m(input_ids=batch, use_cache=False).logits for m in (model, other))
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, theirs)


def test_a_nested_copy_is_the_expert_s_upper_half():
    """By the page docs/pack-format.md alone: h is the nearest sixteenth of each code."""
    folder = with_copies("int8", "int4")
    head = header(folder)
    assert head["version"] == 3
    data = (folder / "experts.greenroom").read_bytes()
    layer, low = head["layers"][0], head["layers"][0]["low"]
    assert (low["precision"], low["nested"]) == ("int4", True)
    at = -(-low["bytes"] // 4096) * 4096
    start = layer["offset"] + 2 * layer["stride"]
    exact = expand_packed_experts(ModelSkeleton.of(folder), open_checkpoint(folder).pack, 0)
    for spec in [t for t in low["tensors"] if "." not in t["name"]]:
        scale = next(t for t in low["tensors"] if t["name"] == f"{spec['name']}.scale")
        parts = [tensor(data, start, spec, torch.uint8), tensor(data, start, scale, torch.float16)]
        rows, half = spec["shape"]
        copy = ENCODINGS["int4"].decode(parts, (rows, 2 * half), torch.float32)
        fine = exact[spec["name"]][2].float()
        step = parts[1].float().repeat_interleave(2 * half // parts[1].shape[1], 1)
        assert ((copy - fine).abs() <= step / 2 + 2**-8 * fine.abs()).all()
        assert not torch.equal(copy, fine)
    checks = layer["crc32"][4:6]
    assert checks[0] == zlib.crc32(data[start : start + at])


def tensor(data: bytes, start: int, spec: dict, dtype: torch.dtype) -> torch.Tensor:
    n = torch.Size(spec["shape"]).numel() * dtype.itemsize
    raw = torch.frombuffer(bytearray(data[start + spec["offset"] :][:n]), dtype=torch.uint8)
    return raw.view(dtype).view(spec["shape"])


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_pieces_are_experts_copies_and_what_these_lack(kind, precision):
    catalog = ModelSkeleton.of(with_copies(kind, precision)).catalog
    assert isinstance(catalog, CopiesCatalog)
    nested = (kind, precision) == ("int8", "int4")
    n = catalog.experts
    assert catalog.pieces == list(range((3 if nested else 2) * n))
    exact, low, rest = catalog.copy_bytes()
    ((whole,), (copy,)) = (catalog.extents(piece) for piece in (1, n + 1))
    assert (whole.length, copy.length) == (exact[0], low[0])
    assert copy.offset % 4096 == 0
    if nested:
        assert whole.offset == copy.offset
        assert catalog.extents(2 * n + 1)[0].offset == copy.offset + copy.length
        assert exact[0] == low[0] + rest[0]
    else:
        assert whole.offset == copy.offset + copy.length
        assert rest == ()


def test_what_was_damaged_is_made_anew(tmp_path):
    folder = tmp_path / "pack"
    pack(str(source()), folder, "int8", precision="int4")
    good = (folder / "experts.greenroom").read_bytes()
    layer = header(folder)["layers"][0]
    bad = bytearray(good)
    bad[layer["offset"]] ^= 1  # a copy
    bad[layer["offset"] + layer["stride"] + 8192] ^= 1  # what another one lacks
    (folder / "experts.greenroom").write_bytes(bad)
    pack_of = open_checkpoint(folder).pack
    assert pack_of is not None
    assert len(list(pack_of.find_damaged())) == 2
    with pytest.raises(CheckpointError, match=r"is damaged .*--miss-precision int4 --repair"):
        pack_of.check()
    with (
        pytest.raises(StoreError, match="is damaged"),
        streamed(folder, capacity=64) as model,
        torch.inference_mode(),
    ):
        model(input_ids=ids(4, 40))
    done = pack(str(source()), folder, "int8", precision="int4", repair=True)
    assert done.unchanged == done.experts - 2
    open_checkpoint(folder).pack.check()
    assert (folder / "experts.greenroom").read_bytes() == good


def test_an_interrupted_pack_is_gone_on_with(tmp_path, monkeypatch):
    real = ExpertPacker.__call__

    def broken(self, *args):
        if args[-1] == 5:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(ExpertPacker, "__call__", broken)
    with pytest.raises(KeyboardInterrupt):
        pack(str(source()), tmp_path / "pack", "same", precision="int4")
    monkeypatch.undo()
    done = pack(str(source()), tmp_path / "pack", "same", precision="int4")
    assert done.unchanged > 0
    assert done.copy_bytes > 0
    open_checkpoint(tmp_path / "pack").pack.check()


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "int8",
            {"precision": "int8"},
            "--miss-precision int8: a low-precision copy of .* smaller",
        ),
        ("int4", {"precision": "int8"}, "must be smaller"),
        (
            "same",
            {"precision": "int4", "segments": 2},
            "--segments 2 and --miss-precision int4 exclude",
        ),
    ],
)
def test_what_cannot_be(kind, options, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        pack(str(source()), tmp_path / "pack", kind, **options)
    with pytest.raises(UnknownName, match="miss precision"):
        pack(str(source()), tmp_path / "pack", kind, precision="int2")


def test_packs_of_packs_and_other_types(tmp_path):
    folder = with_copies("same", "int4")
    with pytest.raises(
        UsageError, match="is a pack with low-precision copies, which cannot be packed again"
    ):
        pack(str(folder), tmp_path / "pack", "int4")
    with pytest.raises(
        UsageError, match="low-precision copies, so its model computes only in bfloat16"
    ):
        ModelSkeleton.of(open_checkpoint(folder), "float32")
