"""GGUF files are served in place: every bit is that of transformers' own expanded load."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.gguf import reader

from greenroom.errors import CheckpointError, ModelError, NotAModel, UnsupportedModel
from greenroom.hf.check.verify import verify
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.gguf_file import encoding_of
from greenroom.hf.checkpoint.resolve import resolve
from greenroom.hf.checkpoint.tokenizer import _fast_header_reader, tokenizer_of
from greenroom.hf.load.load import load
from greenroom.hf.model.reference import load_reference_experts, load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.encodings import ENCODINGS, decode
from tests.gguf_models import DATA, LLAMA, LOW_BITS, SIZES, SMALL, write, write_model
from tests.hf.check.test_parity import assert_same, ids, streamed
from tests.hf.conftest import one_line
from tests.models import make, read_expert

# name -> (architecture, types, what the experts of the first layer are stored in)
FILES: dict[str, tuple[str, dict[str, str], set[str]]] = {
    "F32": ("qwen3_moe", {"": "F32"}, set()),
    "F16": ("qwen3_moe", {"": "F16"}, set()),
    "BF16": ("qwen3_moe", {"": "BF16"}, set()),
    "Q8_0": ("qwen3_moe", {"": "Q8_0"}, {"q8_0"}),
    "Q4_0": ("qwen2_moe", {"": "Q4_0"}, {"q4_0"}),
    "Q5_0": ("qwen2_moe", {"": "Q5_0"}, {"q5_0"}),
    "Q5_K": ("qwen3_moe", {"": "Q5_K"}, {"q5_k"}),
    "MXFP4": ("qwen3_moe", {"_exps": "MXFP4", "": "BF16"}, {"gguf_mxfp4"}),
    "K_M": ("qwen3_moe", {"blk.2.ffn_down": "Q4_K", "down": "Q6_K", "": "Q4_K"}, {"q4_k", "q6_k"}),
    "Q8_0, rest Q5_1": ("qwen2_moe", {"_exps": "Q8_0", "": "Q5_1"}, {"q8_0"}),
    "a plain matrix": ("qwen3_moe", {"down_exps": "BF16", "": "Q4_K"}, {"q4_k"}),
    "minimax": ("minimax_m2", {"": "Q8_0"}, {"q8_0"}),
}

VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")


@pytest.fixture(scope="module", params=FILES)
def file(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    name, types, stored = FILES[request.param]
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", name, types), stored


def test_logits_equal_those_of_the_expanded_model(file: tuple[Path, set[str]]) -> None:
    path, stored = file
    skeleton = ModelSkeleton.of(path)
    assert set(skeleton.catalog.layouts[0].encodings.values()) == stored
    whole = load_reference_model(skeleton)
    with streamed(path, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


def test_every_expert_equals_gguf_s_own(file: tuple[Path, set[str]]) -> None:
    path, _ = file
    catalog = ModelSkeleton.of(path).catalog
    for layer in range(len(catalog.layers)):
        wanted = load_reference_experts(ModelSkeleton.of(path), layer)
        layout = catalog.layouts[layer]
        for expert_id in range(catalog.offsets[layer], catalog.offsets[layer + 1]):
            tensors = read_expert(catalog, expert_id)
            for key, full in wanted.items():
                weight = layout.weight(key)
                made = tensors[key]
                if weight.encoding != "plain":
                    parts = [tensors[part.name] for part in weight.parts]
                    made = decode(weight, parts, full.dtype)
                assert torch.equal(made, full[expert_id - catalog.offsets[layer]])


def test_slots_and_reads_count_stored_bytes(file: tuple[Path, set[str]]) -> None:
    path, _ = file
    catalog = ModelSkeleton.of(path).catalog
    for expert_id in (0, catalog.experts - 1):
        read = sum(extent.length for extent in catalog.extents(expert_id))
        layout = catalog.layouts[catalog.layer_of(expert_id)]
        floats = not layout.encodings and layout.tensors[0].dtype == "bfloat16"
        assert read == layout.nbytes or (floats and read >= layout.nbytes)
        assert all(extent.divisible for extent in catalog.extents(expert_id))


def test_a_vocabulary_is_read_from_a_buffer_not_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of an array takes microseconds, and a vocabulary has 300,000 strings."""
    checkpoint = GgufCheckpoint.open(write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"}))
    slices, original = [], np.memmap.__getitem__
    by_transformers = reader.read_gguf_metadata(str(checkpoint.folder), VOCABULARY)
    with _fast_header_reader():
        assert reader.read_gguf_metadata(str(checkpoint.folder), VOCABULARY) == by_transformers
        assert reader.read_gguf_metadata(str(checkpoint.folder)) != by_transformers  # counts
    strings, read_string = [], reader._read_string
    monkeypatch.setattr(
        reader, "_read_string", lambda *args: strings.append(args) or read_string(*args)
    )

    def counted(array: Any, index: Any) -> Any:
        slices.append(index)
        return original(array, index)

    monkeypatch.setattr(np.memmap, "__getitem__", counted)
    tokenizer = tokenizer_of(checkpoint)
    assert len(tokenizer) > 100
    assert len(slices) < 10
    assert len(strings) < len(tokenizer)
    assert isinstance(reader._mapped(str(checkpoint.folder)), np.memmap)


def test_load_gives_a_tokenizer_and_generates(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    model, tokenizer = load(str(path), cache="30%", kernels="eager")
    try:
        text = "The green room"
        given = tokenizer(text, return_tensors="pt")
        assert tokenizer.decode(given["input_ids"][0]) == text
        out = model.generate(**given, max_new_tokens=3, do_sample=False)
        assert out.shape[1] == given["input_ids"].shape[1] + 3
        assert model.greenroom.stats().bytes_read > 0
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("gate", ["Q8_0", "Q5_K"])
def test_kernels_are_near_eager_and_the_same_whatever_the_cache(gate: str, tmp_path: Path) -> None:
    path = str(write(tmp_path / "tiny.gguf", "qwen3_moe", {"gate_exps": gate, "": "Q8_0"}))
    token = ids(1, 1)

    def logits(**options: Any) -> torch.Tensor:
        with streamed(path, **options) as model, torch.inference_mode():
            return torch.stack([model(input_ids=token + n).logits[0, -1] for n in range(4)])

    mine, again = (logits(capacity=n, kernels="native") for n in (3, 9))
    assert torch.equal(mine, again)
    eager = logits(capacity=3, kernels="eager")
    rounded = logits(capacity=3, kernels="rounded")
    assert (rounded - eager).float().norm() < 1e-3 * eager.float().norm()
    assert 0 < (mine - eager).float().norm() < 0.03 * eager.float().norm()


@pytest.mark.parametrize("layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify(tmp_path: Path, layers: bool) -> None:
    path = str(write(tmp_path / "tiny.gguf", "qwen3_moe", {"down": "Q6_K", "": "Q4_K"}))
    assert verify(path, "30%", tokens=2, prompt="The", layers=layers).identical


# What llama.cpp's own llama-quantize made: tests/data/gguf

LLAMA_STORED = {  # file -> what its experts' matrices are stored in
    "Q8_0": {"q8_0"},
    "Q4_0": {"q4_0"},
    "Q5_0": {"q5_0"},
    "MXFP4_MOE": {"gguf_mxfp4"},
    "Q4_K_M": {"q4_k", "q6_k"},
    "Q5_K": {"q5_k", "q8_0"},
    "LOW_BITS": {kind for layer in LOW_BITS for kind in layer},
}
# Distance of quantised weights from those before, relative to these: 0.15, but ternary ones have
# the largest weight of 256 as their scale.
FAR = {"LOW_BITS": 0.85}


def test_there_is_a_file_of_llama_cpp_s_for_every_type_served() -> None:
    assert set(LLAMA_STORED) == set(LLAMA) == {path.stem for path in DATA.glob("*.gguf")}
    served = {*ENCODINGS} & {encoding_of(each.name) for each in gguf.GGMLQuantizationType}
    assert set().union(*LLAMA_STORED.values()) == served - {"gguf_nvfp4"}  # the tool cannot


@pytest.mark.parametrize("name", LLAMA_STORED)
def test_what_llama_quantize_made(name: str) -> None:
    """Values are those of gguf's dequantize, near the weights before, and verify passes."""
    path = DATA / f"{name}.gguf"
    catalog = ModelSkeleton.of(path).catalog
    stored = {kind for each in catalog.layouts for kind in each.encodings.values()}
    assert {kind for kinds in stored for kind in kinds.split("+")} == LLAMA_STORED[name]
    values = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
        if "_exps" in tensor.name
    }
    before = make("qwen3_moe", "bfloat16", **{**SIZES, **SMALL, **LLAMA[name][0]}).state_dict()
    for layer, layout in enumerate(catalog.layouts):
        parts = (values[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        gate, up, down = parts
        for key, whole in {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}.items():
            plain = before[f"model.layers.{layer}.mlp.experts.{key}"].float()
            assert 0 < (whole - plain).norm() < FAR.get(name, 0.15) * plain.norm()
            weight = layout.weight(key)
            for expert, wanted in enumerate(whole):
                tensors = read_expert(catalog, catalog.offsets[layer] + expert)
                made = decode(weight, [tensors[p.name] for p in weight.parts], torch.float32)
                assert torch.equal(made, wanted)
    verdict = verify(str(path), "50%", tokens=2, prompt="The")
    assert verdict.entire_model
    assert verdict.identical
    assert verdict.near


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_dtype_is_a_choice(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": name})
    skeleton = ModelSkeleton.of(path, "float16")
    whole = load_reference_model(skeleton)
    skeleton = ModelSkeleton.of(path, "float16")
    assert skeleton.dtype == torch.float16
    for key, expert in read_expert(skeleton.catalog, 3).items():
        weight = skeleton.catalog.layouts[0].weight(key)
        if weight.encoding != "plain":
            expert = ENCODINGS[weight.encoding].decode([expert], weight.shape, torch.float16)
        full = whole.get_submodule(skeleton.catalog.layers[0]).get_parameter(key)
        assert torch.equal(expert, full[3])


# gpt-oss, whose gate and up transformers does not find in a GGUF file


@pytest.mark.parametrize("kind", ["MXFP4", "BF16", "Q8_0"])
def test_gpt_oss(tmp_path: Path, kind: str) -> None:
    """Against a model whose experts are expanded by gguf here."""
    whole = make("gpt_oss", "bfloat16", hidden_size=64, intermediate_size=96)
    rotary = whole.model.rotary_emb
    whole.model.rotary_emb = type(rotary)(whole.config)  # frequencies are not in bfloat16
    path = write_model(tmp_path / "tiny.gguf", whole, {"_exps": kind, "": "BF16"})
    for tensor in gguf.GGUFReader(path).tensors:
        if "_exps.weight" in tensor.name:
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            _, layer, name, _ = tensor.name.split(".")
            experts = whole.model.layers[int(layer)].mlp.experts
            part = {"ffn_gate_exps": experts.gate_up_proj[..., ::2]}
            part |= {"ffn_up_exps": experts.gate_up_proj[..., 1::2]}
            part |= {"ffn_down_exps": experts.down_proj}
            part[name].data.copy_(values.transpose(1, 2))
    skeleton = ModelSkeleton.of(path)
    config = skeleton.model.config
    assert config.rope_parameters == whole.config.rope_parameters
    assert (config.sliding_window, config.head_dim) == (16, 8)
    with streamed(path, capacity=3, kernels="eager") as model:
        assert_same(model, whole.eval(), ids(2, 9))
    if kind == "MXFP4":
        assert verify(str(path), "30%", tokens=2, prompt="The").identical


# qwen35moe, whose values llama.cpp changes: norms, heads, A

HYBRID = {"num_hidden_layers": 4, "layer_types": None}


def test_qwen35moe_undoes_what_llama_cpp_s_converter_does(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_5_moe_text", {"": "BF16"}, **HYBRID)
    before = make("qwen3_5_moe_text", "bfloat16", **{**SIZES, **HYBRID})
    skeleton = ModelSkeleton.of(path)
    whole = load_reference_model(skeleton)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name)), name
    with streamed(path, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before.get_parameter(name)), name


def test_qwen35moe_quantised(tmp_path: Path) -> None:
    """In float32, in which transformers expands as gguf does."""
    path = write(
        tmp_path / "tiny.gguf", "qwen3_5_moe_text", {"_exps": "Q4_K", "": "Q8_0"}, **HYBRID
    )
    skeleton = ModelSkeleton.of(path, "float32")
    assert set(skeleton.catalog.layouts[0].encodings.values()) == {"q4_k"}
    whole = load_reference_model(skeleton)
    mine = ModelSkeleton.of(path, "float32").load()
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name
    for layer, name in enumerate(skeleton.catalog.layers):
        for key, full in load_reference_experts(ModelSkeleton.of(path, "float32"), layer).items():
            assert torch.equal(full, whole.get_submodule(name).get_parameter(key))
    verdict = verify(str(path), "30%", tokens=2, prompt="The")
    assert verdict.entire_model
    assert verdict.identical
    assert verdict.near


# Files in parts


def split(path: Path, parts: int) -> list[Path]:
    """The parts of a file, as llama-gguf-split writes them: metadata in the first one only."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for i, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "")
        writer.kv_data[0].clear()
        for field in reader.fields.values() if i == 0 else ():
            if not field.name.startswith("GGUF."):
                sub = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names


def test_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    whole = load_reference_model(ModelSkeleton.of(path))
    names = split(path, 3)
    path.unlink()
    assert resolve(tmp_path) == names[0]
    for given in (names[0], names[2]):
        with streamed(given, capacity=2, kernels="eager") as model:
            assert_same(model, whole, ids(1, 7))
    names[1].unlink()
    for given in (names[0], names[2], tmp_path):
        with pytest.raises(CheckpointError) as error:
            ModelSkeleton.of(resolve(given))
        assert f"{names[1]}: this file is missing" in one_line(error)
        assert "split into 3 files" in one_line(error)


def without_splits(path: Path) -> None:
    """Part 3 is a copy of part 2 by its tensors, but its metadata do not say so."""
    reader = gguf.GGUFReader(path.with_name(path.name.replace("-00003-", "-00002-")))
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def part_of(layers: int, parts: int) -> Callable[[Path], None]:
    """The last part of another model takes the place of part 3."""

    def spoil(path: Path) -> None:
        folder = path.parent / "other"
        folder.mkdir()
        other = write(folder / "tiny.gguf", "qwen3_moe", {"": "Q8_0"}, num_hidden_layers=layers)
        shutil.copy(split(other, parts)[2], path)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: shutil.copy(path.parent / "tiny-00002-of-00003.gguf", path),
         "the metadata say that this is file 1 of the model, counted from 0"),
        (without_splits, "is also in {}/tiny-00002-of-00003.gguf: these are parts of different"),
        (part_of(2, 3), "a part of another model: its split.tensors.count is"),
        (part_of(3, 4), "a part of another model: its split.count is 4"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together(
    tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    names = split(write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"}), 3)
    spoil(names[2])
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(names[0])
    assert f"{names[2]}: " in one_line(error)
    assert words.format(tmp_path) in one_line(error)


@pytest.mark.parametrize("gone", [False, True])
def test_parts_are_links_as_in_the_hub_s_cache(tmp_path: Path, gone: bool) -> None:
    """Each part leads to a file of another name; a link that leads nowhere is a missing part."""
    names = split(write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"}), 3)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(names):
        (blobs / f"{number:064x}").write_bytes(name.read_bytes())
        (snapshot / name.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    first = snapshot / names[0].name
    if not gone:
        assert len(ModelSkeleton.of(first).checkpoint.files) == 3
        return
    (blobs / f"{1:064x}").unlink()
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(first)
    assert f"{snapshot / names[1].name}: this file is missing" in one_line(error)


# What can be wrong


def patched(offset: int, value: bytes) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset : offset + len(value)] = value
        path.write_bytes(data)

    return spoil


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def unknown_type(path: Path) -> None:
    """The type of the first tensor of the table."""
    data = bytearray(path.read_bytes())
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight")
    (axes,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * axes, 77)
    path.write_bytes(data)


def longer_rows(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    struct.pack_into("<Q", data, at + 4, 255)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (patched(0, b"GGML"), NotAModel, "does not begin with GGUF"),
        (patched(4, b"\1\0\0\0"), UnsupportedModel, "GGUF version 1"),
        (patched(4, b"\x09\0\0\0"), UnsupportedModel, "GGUF version 9"),
        (patched(4, b"\0\0\0\3"), UnsupportedModel, "big-endian"),
        (patched(8, b"\xff" * 8), CheckpointError, "the GGUF header is cut off or damaged"),
        (patched(24, b"\xff" * 8), CheckpointError, "the GGUF header is cut off or damaged"),
        (cut(0), CheckpointError, "the file is empty"),
        (cut(10), CheckpointError, "the file ends inside its header"),
        (cut(2000), CheckpointError, "the GGUF header is cut off or damaged"),
        (cut(200_000), CheckpointError, "truncated"),
        (unknown_type, UnsupportedModel, "output_norm.weight has the ggml type 77"),
        (longer_rows, CheckpointError, "rows of 255 values, but Q8_0 needs a multiple of 32"),
    ],
)
def test_damaged_files(
    tmp_path: Path, spoil: Callable[[Path], None], kind: type[ModelError], words: str
) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    spoil(path)
    with pytest.raises(kind) as error:
        ModelSkeleton.of(path)
    assert str(path) in one_line(error)
    assert words in one_line(error), one_line(error)


def test_a_type_that_nothing_decodes_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"down_exps": "Q8_K", "": "Q8_0"})
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(path)
    assert "ffn_down_exps.weight is stored as Q8_K" in one_line(error)
    assert "q4_k" in one_line(error)


def test_a_dense_part_in_a_type_that_nothing_decodes_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"attn_q.": "Q8_K", "": "Q8_0"})
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(path).load()
    assert "attn_q.weight is stored as Q8_K, which is not supported" in one_line(error)
    assert "iq2_xxs" in one_line(error)


def test_a_layer_with_a_plain_gate_and_a_quantised_up(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"up_exps": "Q8_0", "": "BF16"})
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(path)
    assert "different types" in one_line(error)
    assert "ffn_gate_exps.weight as bfloat16" in one_line(error)


def test_interleaved_gate_and_up_in_different_types(tmp_path: Path) -> None:
    model = make("gpt_oss", "bfloat16", hidden_size=64, intermediate_size=64)
    path = write_model(tmp_path / "tiny.gguf", model, {"up_exps": "Q4_0", "": "Q8_0"})
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(path)
    assert "ffn_gate_exps.weight as q8_0" in one_line(error)
    assert "ffn_up_exps.weight as q4_0" in one_line(error)


def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(path)
    assert "architecture gemma2" in one_line(error)
    assert "qwen3moe" in one_line(error)


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    monkeypatch.setattr("greenroom.hf.checkpoint.gguf.checkpoint.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(path)
    assert "pip install 'greenroom[gguf]'" in one_line(error)


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert resolve(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotAModel) as error:
        resolve(tmp_path)
    assert "a.gguf, b.gguf" in one_line(error)
    for name in "cdefg":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotAModel, match=r"e\.gguf and 2 more"):
        resolve(tmp_path)
