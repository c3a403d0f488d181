"""Embedding tables on disk, of which rows are read by token.

A token needs one row of its input embedding. The table of a vocabulary of 200,000 tokens takes
1.2 GB of memory, that of n-grams more than 50 GB. A row takes a few kilobytes, and is read in some
microseconds from the page cache and in about 0.1 ms from an SSD.

A table has no copy of rows of its own: the page cache keeps those of frequent tokens, and gives the
memory back when a process needs it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from greenroom.errors import CheckpointError
from greenroom.runtime.kernels.dense.stored import JoinedMatrix, StoredMatrix, stored_matrix

TABLE = "_greenroom_table"  # name of a module's attribute


Decode = Callable[[list[Tensor], tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class RowsOnDisk:
    """The byte range of a two-dimensional tensor in a file.

    path:   the file
    offset: the first byte of row 0
    nbytes: bytes of a row
    dtype:  the type of the stored elements
    shared: number of decoded rows that one row of this tensor belongs to, such as a row of scales
    """

    path: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shared: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of a table, as one tensor of a checkpoint stores them.

    name:   the tensor's name, for error messages
    rows:   number of rows
    parts:  the stored numbers or codes, then the companions of codes, such as scales
    decode: function of the parts' rows, a shape and a dtype, which returns the decoded rows
    """

    name: str
    rows: int
    parts: tuple[RowsOnDisk, ...]
    decode: Decode

    @property
    def nbytes(self) -> int:
        """Return the bytes of a shard in the checkpoint's files."""
        return sum(part.nbytes * -(-self.rows // part.shared) for part in self.parts)


class DiskTable:
    """An embedding table [rows, columns] on disk, in place of an embedding's weight.

    It has the attributes of a weight that a model's code asks for: `shape`, `dtype` and `device`.
    `torch.nn.functional.embedding` with a table as the weight returns the values that it returns
    with the decoded weight. All other operations of torch raise TypeError.
    """

    device = torch.device("cpu")
    requires_grad = False
    nbytes = 0  # in memory
    _is_hf_initialized = True  # or transformers' loader would initialise the weight

    def __init__(self, shards: Sequence[Shard], columns: int, dtype: torch.dtype) -> None:
        """Describe a table of one or several shards; call `open` before rows are read."""
        self.shards, self.dtype = tuple(shards), dtype
        self._ends = [*accumulate(shard.rows for shard in shards)]
        self.shape = torch.Size((self._ends[-1], columns))
        self._files: dict[str, int] = {}  # descriptors

    def open(self) -> None:
        """Open a table's files. Raises CheckpointError if a file cannot be opened."""
        for path in dict.fromkeys(part.path for shard in self.shards for part in shard.parts):
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.close()
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
            # Otherwise each read of a row reads its neighbours too, 128 KiB in all.
            os.posix_fadvise(self._files[path], 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Close a table's files; a second call does nothing."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of a table in the checkpoint's files."""
        return sum(shard.nbytes for shard in self.shards)

    def numel(self) -> int:
        """Return the number of elements of the decoded table."""
        return self.shape.numel()

    def look_up(self, ids: Tensor) -> Tensor:
        """Read and decode the rows whose numbers are in `ids`, of any shape and device.

        Returns [*ids.shape, columns] on the device of `ids`. Raises IndexError for numbers out of
        range, CheckpointError if a file cannot be read.
        """
        if ids.is_meta:
            return torch.empty(*ids.shape, self.shape[1], dtype=self.dtype, device="meta")
        numbers, places = torch.unique(ids.cpu(), return_inverse=True)
        rows = numbers.tolist()
        if rows and not 0 <= rows[0] <= rows[-1] < self.shape[0]:
            raise IndexError(
                f"row numbers {rows[0]} to {rows[-1]}, but the table has {self.shape[0]} rows"
            )
        values = self._rows(rows)
        return values[places.reshape(-1)].view(*ids.shape, self.shape[1]).to(ids.device)

    def _rows(self, rows: Sequence[int]) -> Tensor:
        """Read and decode rows by their numbers, which ascend: [len(rows), columns]."""
        out = torch.empty(len(rows), self.shape[1], dtype=self.dtype)
        first = 0
        while first < len(rows):
            number = bisect_right(self._ends, rows[first])
            last = bisect_left(rows, self._ends[number], first)
            shard = self.shards[number]
            start = self._ends[number] - shard.rows
            inside = [row - start for row in rows[first:last]]
            parts = [self._read(shard, part, inside) for part in shard.parts]
            out[first:last] = shard.decode(parts, (last - first, self.shape[1]), self.dtype)
            first = last
        return out

    def _read(self, shard: Shard, part: RowsOnDisk, rows: Sequence[int]) -> Tensor:
        """Read the stored rows of one part of a shard: [len(rows), elements of a row]."""
        size, descriptor = part.nbytes, self._files[part.path]
        raw = torch.empty(len(rows), size, dtype=torch.uint8)
        view = raw.numpy().reshape(-1).data
        starts = [part.offset + row // part.shared * size for row in rows]
        try:
            if len(starts) > 1:  # the disk serves all of them at once
                for start in starts:
                    os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)
            for number, start in enumerate(starts):
                at, stop = number * size, (number + 1) * size
                while at < stop:
                    got = os.preadv(descriptor, [view[at:stop]], start + at - number * size)
                    if not got:
                        raise CheckpointError(
                            f"{part.path}: truncated: the file ends inside the tensor {shard.name}:"
                            " download the file again"
                        )
                    at += got
        except OSError as error:
            raise CheckpointError(
                f"{part.path}: reading the tensor {shard.name} failed: {error.strerror}"
            ) from error
        return raw.view(part.dtype)

    def decode(self, step: int = 1 << 10) -> Tensor:
        """Read and decode a complete table, `step` rows at a time."""
        out = torch.empty(self.shape, dtype=self.dtype)
        for first in range(0, self.shape[0], step):
            some = range(first, min(first + step, self.shape[0]))
            out[some.start : some.stop] = self._rows(some)
        return out

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Tensor:
        """Compute `embedding` by reading rows; any other function of torch raises TypeError."""
        if function is not embedding:
            raise TypeError(
                f"{function.__name__} cannot compute with an embedding table that is on disk"
            )
        ids, table = arguments[:2]
        return table.look_up(ids)


def table_of(module: nn.Module) -> DiskTable | None:
    """Return the table on disk in place of a module's weight, or None."""
    return module.__dict__.get(TABLE)


def stored_weight(module: nn.Module) -> StoredMatrix | JoinedMatrix | DiskTable | None:
    """Return the object in place of a module's parameter `weight`, or None."""
    return stored_matrix(module) or table_of(module)


def attach_table(module: nn.Module, table: DiskTable) -> None:
    """Replace an embedding's weight by a table on disk.

    The parameter `weight` becomes None; the attribute `weight` is the table.
    """
    module.register_parameter("weight", None)
    module.__dict__[TABLE] = module.__dict__["weight"] = table


def disk_bytes(model: nn.Module) -> int:
    """Return the bytes of the tables that a model leaves on disk."""
    return sum(table.disk_bytes for table in {*filter(None, map(table_of, model.modules()))})


def restore_tables(model: nn.Module) -> None:
    """Replace all tables on disk of a model by weight parameters in memory.

    Modules that shared a table share the parameter. If reading fails, CheckpointError is raised
    and all tables stay on disk.
    """
    tables = {module: table for module in model.modules() if (table := table_of(module))}
    parameters = {
        table: nn.Parameter(table.decode(), requires_grad=False) for table in {*tables.values()}
    }
    for module, table in tables.items():
        del module.__dict__[TABLE], module.__dict__["weight"]
        module.register_parameter("weight", parameters[table])
    for table in parameters:
        table.close()
