"""Names and values of GGUF tensors: by hand, and what is refused. Converted models lie beside."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from greenroom.errors import CheckpointError, GreenroomError, ModelError, UnsupportedModel
from greenroom.hf.checkpoint import gguf_file
from greenroom.hf.checkpoint.gguf.architectures import NO_FORMAT, SERVED, UNREAD, gguf_name
from greenroom.hf.checkpoint.resolve import open_checkpoint
from greenroom.hf.index import catalog
from greenroom.hf.index.gguf.values import (
    JoinByKeyHead,
    JoinKeysAndValues,
    LogMagnitude,
    UnpermuteRows,
)
from greenroom.hf.model.architectures import architectures
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_architectures import FOLDER
from tests.gguf_models import add
from tests.hf.conftest import one_line
from tests.models import read_expert

# Values, by hand


def undo(operation: ConversionOps, *tensors: Tensor, **config: int) -> Tensor:
    """The result of an operation."""
    text: Any = SimpleNamespace(**config)
    text.get_text_config = lambda: text
    patterns = [str(number) for number in range(len(tensors))]
    inputs = {pattern: [tensor] for pattern, tensor in zip(patterns, tensors, strict=True)}
    made = operation.convert(inputs, patterns, ["t"], config=text, model=None, full_layer_name="t")
    tensor: Tensor = made["t"]
    return tensor


def test_rows_of_queries() -> None:
    """Two heads of four rows; in the file the halves of a head alternate: 0 2 1 3."""
    stored = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])
    assert undo(UnpermuteRows(2), stored).tolist() == list(range(8))
    rows = stored[:, None] * 10 + torch.arange(3)
    assert undo(UnpermuteRows(2), rows)[:, 0].tolist() == [10 * n for n in range(8)]


def test_keys_and_values_of_latent_attention() -> None:
    """One head: two rows of keys, three of values, over a latent of two."""
    whole = torch.arange(10).view(5, 2)
    keys, values = whole[:2].T[None], whole[None, 2:]
    assert torch.equal(undo(JoinKeysAndValues(), keys, values), whole)


def test_projections_by_key_head() -> None:
    """Two key heads of one row, each with two rows of values and of gates: q k v v z z."""
    whole = torch.arange(12)[:, None]
    queries, keys, values, gates = [0, 6], [1, 7], [2, 3, 8, 9], [4, 5, 10, 11]
    joined = undo(
        JoinByKeyHead(), whole[queries + keys + values], whole[gates],
        linear_num_key_heads=2, linear_key_head_dim=1,
    )  # fmt: skip
    assert torch.equal(joined, whole)


def test_logarithms_are_those_of_bfloat16_numbers_where_they_can_be() -> None:
    """Of all bfloat16 numbers from -4 to 4, by either sign; others are near."""
    numbers = torch.arange(-512, 513) / 128
    numbers = numbers.bfloat16().float()
    for sign in (1, -1):
        assert torch.equal(undo(LogMagnitude(), sign * numbers.exp()), numbers)
    others = numbers + 0.0007
    assert torch.allclose(undo(LogMagnitude(), others.exp()), others, 1e-6, 1e-6)
    assert not torch.equal(others, others.bfloat16())


# The table


def test_every_architecture_has_a_name_or_a_reason() -> None:
    rows = {row.name: row.gguf for row in architectures() if row.how != "wrapper"}
    assert {*SERVED, *UNREAD} <= {*rows}
    assert not {*SERVED} & {*UNREAD}
    assert rows["mixtral"] == "llama"
    assert rows["jetmoe"] == gguf_name("jetmoe") == NO_FORMAT


# Whole files

Tensors = dict[str, np.ndarray]


def rewritten(
    folder: Path,
    name: str,
    change: Callable[[Tensors], None] = lambda tensors: None,
    types: Mapping[str, str] = {},
) -> Path:
    """A converted model with other tensors, beside its config.

    types: the type of the matrices whose name contains the key; others are F32
    """
    source = FOLDER / name
    shutil.copy(source / "config.json", folder / "config.json")
    reader = gguf.GGUFReader(source / "model.gguf")
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).copy()
        for tensor in reader.tensors
    }
    change(tensors)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            kind = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=kind)
    for key, values in tensors.items():
        kind = next((types[part] for part in types if part in key), "F32")
        add(writer, key, torch.from_numpy(values), gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def extra(tensors: Tensors) -> None:
    tensors["blk.0.attn_q.scale"] = np.ones(1, np.float32)


def prediction(tensors: Tensors) -> None:
    """Tensors that predict several tokens ahead, and factors of RoPE, which the config has."""
    tensors["blk.0.nextn.eh_proj.weight"] = np.ones((2, 2), np.float32)
    tensors["rope_freqs.weight"] = np.ones(2, np.float32)


def lost(tensors: Tensors) -> None:
    del tensors["blk.1.attn_output.weight"]


def lost_experts(tensors: Tensors) -> None:
    del tensors["blk.1.ffn_up_exps.weight"]


def short(tensors: Tensors) -> None:
    tensors["blk.1.attn_output.weight"] = tensors["blk.1.attn_output.weight"][1:]


def short_queries(tensors: Tensors) -> None:
    tensors["blk.1.attn_q.weight"] = tensors["blk.1.attn_q.weight"][1:]


def test_what_no_parameter_needs_is_left(tmp_path: Path) -> None:
    assert ModelSkeleton.of(rewritten(tmp_path, "mixtral", prediction)).layers


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (extra, UnsupportedModel, "no parameter for the tensor blk.0.attn_q.scale"),
        (lost, CheckpointError, "model.layers.1.self_attn.o_proj.weight is missing"),
        (lost_experts, UnsupportedModel, "the tensor blk.1.ffn_gate_exps.weight"),
        (short, CheckpointError, "blk.1.attn_output.weight has shape"),
        (short_queries, CheckpointError, "blk.1.attn_q.weight"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, spoil: Callable[[Tensors], None], kind: type[ModelError], words: str
) -> None:
    path = rewritten(tmp_path, "mixtral", spoil)
    with pytest.raises(kind) as error:
        ModelSkeleton.of(path)
    assert words in one_line(error)
    assert str(path) in one_line(error)


def test_gate_and_up_of_experts_in_one_tensor(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them with --fuse-gate-up-exps."""

    def fuse(tensors: Tensors) -> None:
        for layer in range(3):
            parts = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)

    skeleton = ModelSkeleton.of(rewritten(tmp_path, "mixtral", fuse))
    plain = ModelSkeleton.of(FOLDER / "mixtral" / "model.gguf")
    for expert in (0, plain.catalog.experts - 1):
        wanted = read_expert(plain.catalog, expert)
        for key, tensor in read_expert(skeleton.catalog, expert).items():
            assert torch.equal(tensor, wanted[key])


def test_parts_of_a_file_lie_where_a_link_leads(tmp_path: Path) -> None:
    from tests.hf.checkpoint.test_gguf import split

    whole = tmp_path / "there" / "model.gguf"
    whole.parent.mkdir()
    for name in ("model.gguf", "config.json"):
        shutil.copy(FOLDER / "mixtral" / name, whole.with_name(name))
    parts = split(whole, 3)
    link = tmp_path / "here" / parts[0].name
    link.parent.mkdir()
    link.symlink_to(parts[0])
    shutil.copy(FOLDER / "mixtral" / "config.json", link.parent)
    assert ModelSkeleton.of(link).checkpoint.files == (str(link), *map(str, parts[1:]))
    parts[1].unlink()
    with pytest.raises(GreenroomError) as error:
        open_checkpoint(link)
    assert f"this folder or in {whole.parent}" in one_line(error)


# Cost


@pytest.mark.parametrize("layers", [6, 60])
def test_a_file_of_many_experts_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """384 experts a layer: one header, one table of names, one analysis of each matrix."""
    path = many_experts(tmp_path, layers)
    calls = dict.fromkeys(("header", "table", "blocks", "name"), 0)

    def count(owner: Any, attribute: str, key: str) -> None:
        original = getattr(owner, attribute)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counted)

    count(gguf_file.Cursor, "__init__", "header")
    count(gguf.TensorNameMap, "__init__", "table")
    count(gguf.TensorNameMap, "get_name", "name")
    count(catalog, "derive_blocks", "blocks")
    skeleton = ModelSkeleton.of(path)
    assert skeleton.catalog.experts == 384 * layers
    dense = len(skeleton.dense_tensors)
    assert calls["header"] == calls["table"] == 1
    assert calls["blocks"] == 2  # gate and up, down
    assert dense <= calls["name"] <= 6 * dense


def many_experts(folder: Path, layers: int, experts: int = 384) -> Path:
    """A sparse file of a Mixtral with many experts, of which only the header is written."""
    reader = gguf.GGUFReader(FOLDER / "mixtral" / "model.gguf")
    shapes = {tensor.name: [*map(int, tensor.shape)][::-1] for tensor in reader.tensors}
    config = (FOLDER / "mixtral" / "config.json").read_text()
    assert '"num_hidden_layers": 3' in config
    config = config.replace('"num_hidden_layers": 3', f'"num_hidden_layers": {layers}')
    number = shapes["blk.0.ffn_gate_inp.weight"][0]
    assert f'"num_local_experts": {number}' in config
    config = config.replace(f'"num_local_experts": {number}', f'"num_local_experts": {experts}')
    (folder / "config.json").write_text(config)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_expert_count(experts)
    writer.add_block_count(layers)
    for name, shape in shapes.items():
        if name.startswith("blk.") and not name.startswith("blk.0."):
            continue
        size = [experts if axis == 0 and "_exps" in name else n for axis, n in enumerate(shape)]
        if "gate_inp" in name:
            size = [experts, shape[1]]
        for layer in range(layers if name.startswith("blk.") else 1):
            key = name.replace("blk.0.", f"blk.{layer}.")
            nbytes = 4 * int(np.prod(size))
            writer.add_tensor_info(key, size, np.dtype(np.float32), nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "r+b") as stream:
        stream.truncate(1 << 34)
    return path
