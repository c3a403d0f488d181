"""Embedding tables on disk return the rows of the decoded weight, bit by bit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from greenroom.errors import CheckpointError
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.dense.table import (
    DiskTable,
    RowsOnDisk,
    Shard,
    attach_table,
    disk_bytes,
    restore_tables,
    stored_weight,
    table_of,
)

ROWS, COLUMNS, START = 37, 64, 100


def cast(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return parts[0].reshape(shape).to(dtype)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def file(weight: Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "table"
    path.write_bytes(bytes(START) + weight.view(torch.uint8).numpy().tobytes())
    return path


@pytest.fixture
def table(file: Path) -> DiskTable:
    part = RowsOnDisk(str(file), START, 2 * COLUMNS, torch.bfloat16)
    shards = [
        Shard("embed", 20, (part,), cast),
        Shard("rest", ROWS - 20, (replace(part, offset=START + 20 * part.nbytes),), cast),
    ]
    table = DiskTable(shards, COLUMNS, torch.float32)
    table.open()
    return table


class Scaled(nn.Embedding):
    """As in Gemma: the code of a subclass stays in use."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(3.0).to(self.weight.dtype)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_an_embedding_returns_the_rows_of_its_weight(
    kind: type[nn.Embedding], table: DiskTable, weight: Tensor
) -> None:
    module = kind(ROWS, COLUMNS)
    module.weight.data = weight.float()
    ids = torch.tensor([[5, 36, 5], [0, 1, 5]])
    wanted = module(ids)
    attach_table(module, table)
    assert torch.equal(module(ids), wanted)
    assert module(ids[:0]).shape == (0, 3, COLUMNS)
    assert module(ids.to("meta")).shape == wanted.shape
    assert not list(module.parameters())
    assert stored_weight(module) is table
    assert disk_bytes(module) == 2 * weight.numel()


@pytest.mark.parametrize("id", [-1, ROWS])
def test_a_number_out_of_range(id: int, table: DiskTable) -> None:
    with pytest.raises(IndexError, match=f"row numbers 0 to {ROWS}|row numbers -1 to 0"):
        embedding(torch.tensor([id, 0]), table)


def test_other_operations_are_refused_by_name(table: DiskTable) -> None:
    with pytest.raises(TypeError, match="linear cannot compute with an embedding table"):
        linear(torch.zeros(1, COLUMNS), table)  # type: ignore[arg-type]


def test_scales_that_rows_share(tmp_path: Path) -> None:
    """A row of fp8 codes is multiplied by the scales of its 128 rows."""
    rows, columns = 300, 256
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    decode = ENCODINGS["fp8"].decode
    path = tmp_path / "table"
    path.write_bytes(
        scales.view(torch.uint8).numpy().tobytes() + codes.view(torch.uint8).numpy().tobytes()
    )
    parts = [
        RowsOnDisk(str(path), scales.nbytes, columns, torch.float8_e4m3fn),
        RowsOnDisk(str(path), 0, 8, torch.float32, shared=128),
    ]
    table = DiskTable([Shard("embed", rows, tuple(parts), decode)], columns, torch.bfloat16)
    table.open()
    wanted = codes.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    assert torch.equal(table.look_up(torch.arange(rows)), wanted.bfloat16())
    assert torch.equal(table.look_up(torch.tensor(131)), wanted[131].bfloat16())


def test_restored_modules_share_the_weight(table: DiskTable, weight: Tensor) -> None:
    one, two = (nn.Embedding(ROWS, COLUMNS) for _ in range(2))
    for module in (one, two):
        attach_table(module, table)
    restore_tables(nn.ModuleList([one, two]))
    assert one.weight is two.weight
    assert torch.equal(one.weight, weight.float())
    assert table_of(one) is None
    assert "weight" not in one.__dict__


def test_a_file_that_is_cut_off(file: Path, table: DiskTable) -> None:
    os.truncate(file, START + 2 * COLUMNS * 30)
    assert table.look_up(torch.tensor([29])).shape == (1, COLUMNS)
    with pytest.raises(CheckpointError, match="truncated: the file ends inside the tensor rest"):
        table.look_up(torch.tensor([30]))
    module = nn.Embedding(ROWS, COLUMNS)
    attach_table(module, table)
    with pytest.raises(CheckpointError, match="truncated"):
        restore_tables(module)
    assert table_of(module) is table


def test_files_that_cannot_be_opened_or_read(file: Path, tmp_path: Path) -> None:
    def table_in(path: Path) -> DiskTable:
        part = RowsOnDisk(str(path), START, 2 * COLUMNS, torch.bfloat16)
        return DiskTable([Shard("embed", ROWS, (part,), cast)], COLUMNS, torch.float32)

    with pytest.raises(CheckpointError, match="lost: cannot be read: No such file"):
        table_in(tmp_path / "lost").open()
    folder = table_in(tmp_path)
    folder.open()
    with pytest.raises(CheckpointError, match="reading the tensor embed failed: Is a directory"):
        folder.look_up(torch.tensor([1]))


def test_closing_frees_the_descriptors(table: DiskTable) -> None:
    (descriptor,) = table._files.values()
    table.close()
    table.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
