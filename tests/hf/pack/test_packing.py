"""A pack computes what its experts decode to, bit for bit, whatever it was made from."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.errors import (
    CheckpointError,
    OutputError,
    UnknownName,
    UnsupportedModel,
    UsageError,
)
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.header import read_header
from greenroom.hf.checkpoint.pack.format import HEADER
from greenroom.hf.checkpoint.resolve import find_checkpoint, open_checkpoint
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack import packing, workers
from greenroom.hf.pack.packing import pack
from greenroom.runtime.slots.host import HostSlots
from tests.gguf_models import write
from tests.hf.check.test_parity import assert_same, ids, streamed
from tests.hf.conftest import one_line
from tests.hf.pack.rig import experts, fill, header, packed, source
from tests.models import cached_tiny
from tests.quantised import compressed, fp8, mxfp4
from tests.quantised_floats import floats

KINDS = ("int8", "int4", "fp8", "bf12", "same")
# Distances, relative to the weights.
FAR = {"int8": 0.02, "int4": 0.15, "fp8": 0.06, "bf12": 0.0, "same": 0.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_the_decoded_experts(kind: str, name: str) -> None:
    folder = packed(kind, name)
    whole = load_reference_model(ModelSkeleton.of(source(name)))
    before = {
        layer: dict(whole.get_submodule(layer).named_parameters()) for layer in experts(folder)
    }
    before = {k: {n: p.data.clone() for n, p in v.items()} for k, v in before.items()}
    fill(whole, folder)
    for layer, parameters in before.items():
        for key in experts(folder)[layer]:
            after = whole.get_submodule(layer).get_parameter(key).data.float()
            gap = (after - parameters[key].float()).pow(2).mean().sqrt()
            assert gap <= FAR[kind] * parameters[key].float().pow(2).mean().sqrt()
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(key)), key


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_kernels_give_the_bits_of_plain_decoded_experts(kind: str, tmp_path: Path) -> None:
    folder, batch = packed(kind), ids(2, 9)
    whole = load_reference_model(ModelSkeleton.of(source()))
    fill(whole, folder)
    whole.save_pretrained(tmp_path)
    outputs = []
    for where in (folder, tmp_path):
        for capacity in (2, 16):
            with (
                streamed(where, capacity=capacity, kernels="rounded") as model,
                torch.inference_mode(),
            ):
                assert not any(layer.fallback_reason for layer in _layers(model))
                outputs.append(model(input_ids=batch, use_cache=False).logits)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_bf12_gives_the_bits_of_bfloat16(name: str) -> None:
    """With the default kernels, for one token, for several and for a prompt."""
    outputs = []
    for folder in (source(name), packed("bf12", name)):
        with streamed(folder, capacity=3, kernels="native") as model, torch.inference_mode():
            assert not any(layer.fallback_reason for layer in _layers(model))
            outputs.append([model(input_ids=ids(*of)).logits for of in ((1, 1), (2, 3), (1, 41))])
    for got, want in zip(*outputs, strict=True):
        assert torch.equal(got, want)


def test_bf12_of_other_weights(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="has weights in float16, but bf12 stores bfloat16"):
        pack(str(source(dtype="float16")), tmp_path / "half", "bf12")
    with pytest.raises(UnsupportedModel, match="has weights in q4_k, but bf12 stores bfloat16"):
        pack(str(gguf(tmp_path)), tmp_path / "gguf", "bf12")
    odd = cached_tiny("qwen3_moe", dtype="bfloat16", moe_intermediate_size=48)
    with pytest.raises(UnsupportedModel, match="has 48 inputs, but bf12 needs a multiple of 32"):
        pack(str(odd), tmp_path / "odd", "bf12")
    with pytest.raises(UsageError, match="bf12 and --segments exclude each other"):
        pack(str(source()), tmp_path / "cut", "bf12", segments=2)


def test_bf12_of_weights_of_every_size(tmp_path: Path) -> None:
    """A matrix with many exponents has no bf12; an infinite weight and a NaN have."""
    from safetensors.torch import load_file, save_file

    origin = Path(shutil.copytree(source(), tmp_path / "source"))
    path = next(p for p in sorted(origin.glob("*.safetensors")) if _experts_in(p))
    tensors = load_file(path)
    weights = tensors[_experts_in(path)[0]].view(-1)
    weights[3], weights[4] = torch.nan, torch.inf
    save_file(tensors, path, {"format": "pt"})
    pack(str(origin), tmp_path / "pack", "bf12")
    weights[:] = torch.exp2(-torch.arange(len(weights)) % 100.0)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="too many weights with rare exponents for bf12"):
        pack(str(origin), tmp_path / "other", "bf12")


def _layers(model: Any) -> list[Any]:
    from greenroom.runtime.forward import BINDING

    modules = [model.get_submodule(name) for name in model.greenroom.setup.catalog.layers]
    return [getattr(module, BINDING).experts for module in modules]


def gguf(folder: Path) -> Path:
    return write(
        folder / "tiny.gguf", "qwen3_moe", {"down_exps": "Q6_K", "_exps": "Q4_K", "": "Q8_0"}
    )


def mixed_gguf(folder: Path) -> Path:
    """With gate and up projections of different types."""
    types = {"gate_exps": "Q4_K", "up_exps": "Q6_K", "": "Q8_0"}
    return write(folder / "tiny.gguf", "qwen3_moe", types)


SOURCES: dict[str, Callable[[Path], Path]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "compressed": compressed,
    "gguf": gguf,
    "mixed gguf": mixed_gguf,
    "nvfp4": lambda folder: floats(folder, "compressed-tensors", "nvfp4"),
}


@pytest.mark.parametrize("made", SOURCES)
@pytest.mark.parametrize("kind", ["int8", "same"])
def test_from_every_format(made: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    origin = SOURCES[made](tmp_path / "source")
    pack(str(origin), tmp_path / "pack", kind)
    mine, theirs = ModelSkeleton.of(tmp_path / "pack"), ModelSkeleton.of(origin)
    whole = load_reference_model(theirs)
    if kind == "same":
        assert [x.encodings for x in mine.catalog.layouts] == [
            x.encodings for x in theirs.catalog.layouts
        ]
        assert mine.catalog.all_experts_bytes == theirs.catalog.all_experts_bytes
    else:
        fill(whole, tmp_path / "pack")
    with streamed(tmp_path / "pack", capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    assert fingerprint(open_checkpoint(tmp_path / "pack")) == fingerprint(open_checkpoint(origin))


def test_gate_and_up_of_different_types_in_segments(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    origin = mixed_gguf(tmp_path / "source")
    pack(str(origin), tmp_path / "pack", "same", segments=2)
    layout = ModelSkeleton.of(tmp_path / "pack").catalog.layouts[0]
    assert layout.encodings["gate_up_proj"] == "q4_k+q6_k"
    assert len(layout.segments) == 2
    whole = load_reference_model(ModelSkeleton.of(origin))
    with streamed(tmp_path / "pack", capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
    raw = header(tmp_path / "pack")
    (up,) = (t for t in raw["layers"][0]["tensors"] if t["name"] == "gate_up_proj.up")
    rows, width = up["shape"]
    raw["layers"][0].pop("segments")
    for shape, words in (
        ([rows, width + 1], "the codes of gate_up_proj do not fit their encoding q6_k"),
        ([2 * rows, width], "gate and up projection of gate_up_proj have different shapes"),
    ):
        up["shape"] = shape
        (tmp_path / "pack" / HEADER).write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match=words):
            ModelSkeleton.of(tmp_path / "pack")


def test_a_gguf_in_parts_becomes_one(tmp_path: Path) -> None:
    import gguf as library

    (tmp_path / "source").mkdir()
    whole = write(tmp_path / "source" / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    reader = library.GGUFReader(whole)
    split = max(
        range(len(reader.tensors)), key=lambda i: reader.tensors[i].name == "blk.1.attn_q.weight"
    )
    for number, tensors in enumerate((reader.tensors[:split], reader.tensors[split:])):
        _part(library, reader, tensors, number, tmp_path / f"tiny-{number + 1:05}-of-00002.gguf")
    pack(str(tmp_path / "tiny-00002-of-00002.gguf"), tmp_path / "pack", "int8")
    with streamed(tmp_path / "pack", capacity=3, kernels="eager") as model:
        reference = load_reference_model(ModelSkeleton.of(whole))
        fill(reference, tmp_path / "pack")
        assert_same(model, reference, ids(1, 9))


def _part(library: Any, reader: Any, tensors: Any, number: int, path: Path) -> None:
    writer = library.GGUFWriter(path, "qwen3moe")
    skip = ("GGUF.", "general.architecture")
    for key, one in reader.fields.items():
        if number == 0 and not key.startswith(skip):
            kinds = one.types
            sub = kinds[1] if len(kinds) > 1 else None
            writer.add_key_value(key, one.contents(), kinds[0], sub)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 2)
    writer.add_int32("split.tensors.count", len(reader.tensors))
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_layout_on_disk() -> None:
    """One aligned read an expert, checksums of all of them, dense tensors as they were."""
    folder = packed("int8")
    head, data = header(folder), (folder / "experts.greenroom").read_bytes()
    assert head["version"] == 1
    assert len(data) == head["data"]["bytes"]
    assert data[:4096].rstrip(b"\0").decode() == f"greenroom-pack 1 {head['identity']}\n"
    for layer in head["layers"]:
        for expert in range(layer["experts"]):
            start = layer["offset"] + expert * layer["stride"]
            assert start % 4096 == 0
            own = data[start : start + layer["stride"]]
            assert zlib.crc32(own[: layer["bytes"]]) == layer["crc32"][expert]
            assert not any(own[layer["bytes"] :])
    catalog = ModelSkeleton.of(folder).catalog
    for expert_id in range(catalog.experts):
        (extent,) = catalog.extents(expert_id)
        assert extent.offset % 4096 == 0
        (copy,) = extent.copies
        assert copy.contiguous
        assert copy.nbytes == extent.length == catalog.layouts[0].nbytes
    before = open_checkpoint(source())
    (name,) = [file["name"] for file in head["dense"]]
    for key in read_header(folder / name, 0):
        assert torch.equal(before.read(key), open_checkpoint(folder).read(key))
    assert not any(".experts." in key for key in read_header(folder / name, 0))
    for small in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (folder / small).read_bytes() == (source() / small).read_bytes()


def test_dense_parts_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = packed("int8")  # made before the limit is lowered
    monkeypatch.setattr(packing.dense, "SHARD", 40_000)
    pack(str(source()), tmp_path / "pack", "int8")
    assert len(header(tmp_path / "pack")["dense"]) > 2
    with (
        streamed(tmp_path / "pack", capacity=3) as mine,
        streamed(whole, capacity=3) as theirs,
        torch.inference_mode(),
    ):
        assert_same(mine, theirs, ids(1, 9))


@pytest.mark.parametrize("kind", ["same", "int4"])
def test_another_type_to_compute_in(kind: str) -> None:
    skeleton = ModelSkeleton.of(packed(kind), "float32")
    whole = load_reference_model(ModelSkeleton.of(source(), "float32"))
    if kind == "int4":
        fill(whole, packed(kind), "float32")
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, capacity=3, kernels="eager"))
    try:
        assert_same(model, whole, ids(1, 9))
    finally:
        model.greenroom.detach()


def test_inputs_that_the_groups_do_not_divide(tmp_path: Path) -> None:
    """Groups become as short as they must be."""
    from tests.models import tiny

    origin = tiny("qwen3_moe", tmp_path / "source", dtype="bfloat16", moe_intermediate_size=24)
    for kind in ("int8", "int4", "fp8"):
        pack(str(origin), tmp_path / kind, kind)
        whole = load_reference_model(ModelSkeleton.of(origin))
        fill(whole, tmp_path / kind)
        with streamed(tmp_path / kind, capacity=3, kernels="eager") as model:
            assert_same(model, whole, ids(1, 9))


def test_a_pack_of_a_pack(tmp_path: Path) -> None:
    pack(str(packed("same")), tmp_path / "pack", "int8")
    mine, theirs = experts(tmp_path / "pack"), experts(packed("int8"))
    for layer, matrices in theirs.items():
        assert all(torch.equal(mine[layer][name], full) for name, full in matrices.items())
    assert header(tmp_path / "pack")["source"]["model"] == str(packed("same"))


# Memory


def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many experts are in memory as there are threads, and no more than the buffers allow."""
    slots: list[int] = []

    class Counted(HostSlots):
        def __init__(self, capacity: int, stride: int, reserve: int | None = None) -> None:
            slots.append(capacity * stride)
            super().__init__(capacity, stride, reserve)

    monkeypatch.setattr(workers, "HostSlots", Counted)
    sizes = {}
    for limit in (1, 200_000):
        monkeypatch.setattr(workers, "BUFFERS", limit)
        slots.clear()
        pack(str(source()), tmp_path / str(limit), "int8")
        sizes[limit] = sum(slots)
    stride = header(tmp_path / "1")["layers"][0]["stride"]
    assert sizes[1] == stride + ModelSkeleton.of(source()).catalog.slot_bytes  # one at a time
    assert sizes[1] < sizes[200_000] <= 200_000
    assert experts(tmp_path / "1").keys() == experts(tmp_path / "200000").keys()


# Going on


class Stop(Exception):
    pass


def stopping(at: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= at * total:
            raise Stop

    return progress


@pytest.mark.parametrize("at", [0.05, 0.5, 0.99])
def test_finished_experts_are_not_packed_again(
    at: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pack"
    with pytest.raises(Stop):
        pack(str(source()), out, "int8", progress=stopping(at))
    assert not out.exists()
    assert (tmp_path / "pack.unfinished" / "unfinished").is_file()
    made = pack(str(source()), out, "int8")
    assert (made.unchanged > 0) == (at > 0.4)
    assert not (tmp_path / "pack.unfinished").exists()
    for name in ("greenroom.json", "experts.greenroom", "dense-00001-of-00001.safetensors"):
        assert (out / name).read_bytes() == (packed("int8") / name).read_bytes()


def test_a_line_that_was_being_written_is_ignored(tmp_path: Path) -> None:
    out = tmp_path / "pack"
    with pytest.raises(Stop):
        pack(str(source()), out, "int8", progress=stopping(0.9))
    journal = tmp_path / "pack.unfinished" / "unfinished"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b"expert 15 12")
    assert pack(str(source()), out, "int8").unchanged == whole.count(b"\nexpert ")
    assert (out / "greenroom.json").read_bytes() == (packed("int8") / "greenroom.json").read_bytes()


def test_data_that_is_gone_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "pack"
    with pytest.raises(Stop):
        pack(str(source()), out, "int8", progress=stopping(0.9))
    (tmp_path / "pack.unfinished" / "experts.greenroom").unlink()
    assert pack(str(source()), out, "int8").unchanged == 0
    assert (out / "greenroom.json").read_bytes() == (packed("int8") / "greenroom.json").read_bytes()


def test_all_but_its_name_was_done(tmp_path: Path) -> None:
    shutil.copytree(packed("int8"), tmp_path / "pack.unfinished")
    made = pack(str(source()), tmp_path / "pack", "int8")
    assert made.unchanged == made.experts
    shutil.copytree(packed("int8"), tmp_path / "other.unfinished")
    with pytest.raises(OutputError, match="holds another pack: with int8 experts"):
        pack(str(source()), tmp_path / "other", "int4")


def test_a_finished_pack_has_no_journal_whatever_a_power_cut_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are certain once their folder is synced: the header's, then the journal's end."""
    events, unlink, rename, sync = [], os.unlink, os.rename, packing._sync_folder

    def step(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            events.append((name, Path(args[0]).name))
            call(*args, **options)

        return run

    monkeypatch.setattr(os, "unlink", step("remove", unlink))
    monkeypatch.setattr(os, "rename", step("rename", rename))
    monkeypatch.setattr(packing, "_sync_folder", step("sync", sync))
    pack(str(source()), tmp_path / "pack", "int8")
    assert events[-5:] == [
        ("sync", "pack.unfinished"), ("remove", "unfinished"), ("sync", "pack.unfinished"),
        ("rename", "pack.unfinished"), ("sync", tmp_path.name),
    ]  # fmt: skip


def test_another_pack_was_begun_there(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        pack(str(source()), tmp_path / "pack", "int8", progress=stopping(0.5))
    with pytest.raises(OutputError) as error:
        pack(str(source()), tmp_path / "pack", "int4")
    assert "another unfinished pack: run `greenroom pack" in one_line(error)
    assert "--experts int8`" in one_line(error)


def test_a_first_block_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is closed while the error is on its way; so is the file."""
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        full = lambda _: os.open("/dev/full", os.O_RDWR)  # noqa: E731
        patched.setattr(workers.ExpertsFile, "_open", full)
        with pytest.raises(OutputError) as error:
            pack(str(source()), tmp_path / "pack", "int4")
    assert "No space left on device" in one_line(error)
    del error
    assert len(os.listdir("/proc/self/fd")) == len(before)
    pack(str(source()), tmp_path / "pack", "int4")
    assert find_checkpoint(tmp_path / "pack").pack is not None


def test_a_source_whose_name_has_two_lines(tmp_path: Path) -> None:
    """Messages about the pack name its source, so the header has the name in one line."""
    model = tmp_path / "two\nlines"
    model.symlink_to(source())
    pack(str(model), tmp_path / "pack", "int8")
    assert header(tmp_path / "pack")["source"]["model"] == str(tmp_path / "twolines")
    assert find_checkpoint(tmp_path / "pack").pack is not None


def test_the_source_has_changed_meanwhile(tmp_path: Path) -> None:
    origin = Path(shutil.copytree(source(), tmp_path / "source"))
    with pytest.raises(Stop):
        pack(str(origin), tmp_path / "pack", "int8", progress=stopping(0.5))
    shard = next(origin.glob("*.safetensors"))
    shard.touch()
    with pytest.raises(OutputError, match="holds another unfinished pack"):
        pack(str(origin), tmp_path / "pack", "int8")


def test_two_at_once(tmp_path: Path) -> None:
    import fcntl

    with pytest.raises(Stop):
        pack(str(source()), tmp_path / "pack", "int8", progress=stopping(0.5))
    with open(tmp_path / "pack.unfinished" / "unfinished", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process is making this pack"):
            pack(str(source()), tmp_path / "pack", "int8")


# Mistakes


def test_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="int8, int4, fp8, bf12, same"):
        pack(str(source()), tmp_path / "pack", "int2")


def test_the_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty"):
        pack(str(source()), tmp_path / "pack", "int8")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="this is not a folder"):
        pack(str(source()), tmp_path / "file", "int8")
    with pytest.raises(UsageError, match="cannot go to the model's own folder"):
        pack(str(source()), source(), "int8")
    with pytest.raises(OutputError, match="there is no folder"):
        pack(str(source()), tmp_path / "none" / "pack", "int8")
    (tmp_path / "other.unfinished").mkdir()
    (tmp_path / "other.unfinished" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty and holds no unfinished pack"):
        pack(str(source()), tmp_path / "other", "int8")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    pack(str(source()), tmp_path / "pack", "int8")
    assert (tmp_path / "pack" / "greenroom.json").is_file()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OutputError) as error:
        pack(str(source()), tmp_path / "pack", "int8")
    assert "the pack needs" in one_line(error)
    assert "1000 B are free" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    origin = Path(shutil.copytree(source(), tmp_path / "source"))
    path = next(p for p in sorted(origin.glob("*.safetensors")) if _experts_in(p))
    tensors = load_file(path)
    name = _experts_in(path)[0]
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="has weights that are infinite, NaN or too large"):
        pack(str(origin), tmp_path / "pack", "int8")
    pack(str(origin), tmp_path / "same", "same")  # bytes are bytes


def _experts_in(path: Path) -> list[str]:
    return [name for name in read_header(path, 0) if ".experts." in name]
