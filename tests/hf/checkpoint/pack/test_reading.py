"""What can be wrong with a pack: each has its own line, and nothing is computed with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.errors import CheckpointError, NotAModel, StoreError, UnsupportedModel
from greenroom.hf.check.one_layer import compare_layers
from greenroom.hf.check.verify import verify
from greenroom.hf.checkpoint.pack.checked import CheckedStore, combine_crc32
from greenroom.hf.checkpoint.resolve import find_checkpoint, open_checkpoint
from greenroom.hf.load.load import load
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.packing import pack
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import Chunk, Staging
from tests.hf.check.test_parity import ids, streamed
from tests.hf.conftest import one_line
from tests.hf.pack.rig import header, packed, source

DATA = "experts.greenroom"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pack to damage."""
    return Path(shutil.copytree(packed("int8"), tmp_path / "pack"))


def change(folder: Path, name: str, at: int) -> None:
    """Flip a bit of a file."""
    with open(folder / name, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = header(folder)
    change(raw)
    (folder / "greenroom.json").write_text(json.dumps(raw))


def test_another_version(folder: Path) -> None:
    edit(folder, lambda raw: raw.update(version=5))
    with pytest.raises(UnsupportedModel) as error:
        find_checkpoint(folder)
    assert "format version 5, but this Greenroom reads versions 1 to 4" in one_line(error)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw.pop("layers"),
        lambda raw: raw.update(layers=[]),
        lambda raw: raw.update(format="something"),
        lambda raw: raw["layers"][0].update(offset=8192),
        lambda raw: raw["layers"][0]["crc32"].pop(),
        lambda raw: raw["layers"][0]["tensors"][0].update(dtype="int3"),
        lambda raw: raw["layers"][0]["encodings"].update(down_proj="int9"),
        lambda raw: raw["layers"][0]["encodings"].update(down_proj="q8_0+q4_0+q8_0"),
        lambda raw: raw["layers"][0]["encodings"].update(down_proj="q8_0+int8"),
        lambda raw: raw["layers"][0]["encodings"].update(down_proj="q8_0+q4_0"),
        lambda raw: raw["dense"][0].update(name="../dense.safetensors"),
        lambda raw: raw["source"].update(model=3, other=4),
        lambda raw: raw["source"].update(model="two\u2028lines"),
    ],
)
def test_a_damaged_header(folder: Path, spoil: Callable[[dict[str, Any]], None]) -> None:
    edit(folder, spoil)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert str(folder / "greenroom.json") in one_line(error)
    assert "damaged" in one_line(error) or "not a valid pack header" in one_line(error)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\0\0"])
def test_a_header_that_is_none(folder: Path, text: str) -> None:
    (folder / "greenroom.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a valid pack header"):
        open_checkpoint(folder)


def test_data_of_another_pack(folder: Path) -> None:
    shutil.copy(packed("int4") / DATA, folder / DATA)
    with pytest.raises(CheckpointError, match="does not belong to the pack of"):
        open_checkpoint(folder)


def test_experts_of_another_checkpoint(folder: Path) -> None:
    """A whole pack's experts beside another model's config."""
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        load(str(folder), cache="25%")
    assert "do not belong to its experts" in one_line(error)
    assert str(source()) in one_line(error)


@pytest.mark.parametrize("name", [DATA, "dense-00001-of-00001.safetensors"])
def test_a_file_is_cut_or_gone(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"bytes, but greenroom\.json says"):
        open_checkpoint(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"missing|cannot be read"):
        open_checkpoint(folder)


def test_a_half_made_pack(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(str(source()), tmp_path / "pack", "int4", progress=stop)
    for name in ("pack", "pack.unfinished"):
        with pytest.raises(NotAModel) as error:
            load(str(tmp_path / name))
        assert f"greenroom pack {source()} -o {tmp_path / 'pack'} --experts int4" in one_line(error)


# Checksums


def test_a_damaged_expert_is_named_when_it_is_read(folder: Path) -> None:
    layer = header(folder)["layers"][1]
    change(folder, DATA, layer["offset"] + 3 * layer["stride"] + 77)
    with streamed(folder, capacity=2, kernels="eager") as model, torch.inference_mode():
        with pytest.raises(StoreError) as error:
            model(input_ids=ids(2, 40))
        line = one_line(error)
        assert f"expert 3 of {layer['name']} is damaged" in line
        assert f"`greenroom pack {source()} -o {folder} --experts int8 --repair`" in line


def test_verify_and_repair(folder: Path) -> None:
    layer = header(folder)["layers"][0]
    change(folder, DATA, layer["offset"] + 5 * layer["stride"])
    change(folder, "dense-00001-of-00001.safetensors", 60_000)
    right = (packed("int8") / DATA).read_bytes()
    with pytest.raises(CheckpointError, match=r"dense-00001.* damaged.*--repair`"):
        verify(str(folder), "25%", tokens=2)
    made = pack(str(source()), folder, "int8", repair=True)
    assert (made.experts, made.unchanged) == (16, 15)
    assert (folder / DATA).read_bytes() == right
    assert header(folder) == header(packed("int8"))
    change(folder, DATA, layer["offset"] + 5 * layer["stride"])
    with pytest.raises(CheckpointError, match=r"expert 5 of .* is damaged"):
        verify(str(folder), "25%", tokens=2)
    assert pack(str(source()), folder, "int8", repair=True).unchanged == 15
    open_checkpoint(folder).pack.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "same"])
def test_verify_finds_nothing_wrong(kind: str) -> None:
    verdict = verify(str(packed(kind)), "25%", tokens=2)
    assert not verdict.entire_model
    assert verdict.identical
    assert verdict.near


def test_verify_s_reference_is_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not come from what is being checked: store, slots and kernels."""
    real = HostSlots.write
    with streamed(packed("int8"), capacity=3, kernels="eager") as model:
        skeleton = ModelSkeleton.of(packed("int8"))
        assert all(each.equal for each in compare_layers(skeleton, model, [ids(1, 9)]))

    def wrong(self: HostSlots, slot: int, copies: Any, data: Any, start: int) -> None:
        real(self, slot, copies, data, start)
        self.bytes(slot)[100] ^= 64  # a weight by half of its range, which rounding cannot hide

    monkeypatch.setattr(HostSlots, "write", wrong)
    with streamed(packed("int8"), capacity=3, kernels="eager") as model:
        found = list(compare_layers(skeleton, model, [ids(1, 9)]))
    assert len(found) == 2
    assert not any(each.equal for each in found)


def test_chunks_in_any_order_are_checked_together(folder: Path) -> None:
    catalog = ModelSkeleton.of(folder).catalog
    (extent,) = catalog.extents(7)
    cuts = [0, 1000, 4096, 9000, extent.length]
    chunks = [Chunk(extent, a, b - a) for a, b in pairwise(cuts)]
    staging = Staging()
    store = CheckedStore(catalog)
    for chunk in [chunks[2], chunks[2], chunks[0], chunks[3], chunks[1]]:
        assert store.read(chunk, staging).size == chunk.length
    store.close()
    change(folder, DATA, extent.offset + 4096)
    store = CheckedStore(catalog)
    for chunk in chunks[:-1]:
        store.read(chunk, staging)
    with pytest.raises(StoreError, match="expert 7 of"):
        store.read(chunks[-1], staging)
    for chunk in chunks[1:]:
        store.read(chunk, staging)
    with pytest.raises(StoreError, match="expert 7 of"):  # nor later
        store.read(chunks[0], staging)
    store.close()


def test_each_expert_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from greenroom.hf.checkpoint.pack import checked

    counted: list[int] = []
    real = checked.zlib.crc32
    monkeypatch.setattr(
        checked, "zlib", type("Z", (), {"crc32": lambda data: counted.append(1) or real(data)})
    )
    catalog = ModelSkeleton.of(packed("int8")).catalog
    store = CheckedStore(catalog)
    staging = Staging()
    for _ in range(3):
        for chunk in store.chunks(4):
            store.read(chunk, staging)
    store.close()
    assert len(counted) == len(store.chunks(4)) == 1


@pytest.mark.parametrize("length", [0, 1, 63, 4096, 70_001])
def test_joined_checksums(length: int) -> None:
    import random
    import zlib

    draw = random.Random(length)
    first, second = draw.randbytes(1234), draw.randbytes(length)
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(
        first + second
    )
