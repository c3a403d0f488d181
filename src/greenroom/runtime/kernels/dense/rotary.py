"""Tables of rotary cosines and sines, computed by the module's own forward.

For one token a rotary embedding's forward is nine of torch's small operations. On CPU caches that
the weights have just evicted they take as long as a layer's attention. Their results depend on the
position only.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from itertools import product
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs

ROWS = 128  # positions of a table
TABLES = 16  # most tables in memory
FIXED = {"default", "linear", "llama3", "yarn"}  # kinds that depend on positions, not on lengths
_TRIED = (0, 1, 6, ROWS - 1, 8 * ROWS + 3, 40 * ROWS - 1)
_ODD = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)

Table = tuple[Tensor, Tensor]  # [1, ROWS, width]


class RotaryTables:
    """A rotary embedding's forward for one token, by lookup of cosines and sines.

    `RotaryTables.of` makes it for modules whose results depend on the position only.
    """

    def __init__(self, module: nn.Module, dtypes: Collection[torch.dtype]) -> None:
        self._module, self._original = module, type(module).forward
        self._dtypes = frozenset(dtypes)
        self._source_objects = self._sources()
        self._tables: dict[tuple[int, torch.dtype], Table] = {}
        self._lock = threading.Lock()  # for adding tables

    @staticmethod
    def of(module: nn.Module, dtypes: Collection[torch.dtype]) -> RotaryTables | None:
        """Make lookup tables for a rotary embedding if they equal its outputs bit by bit.

        Return None if they do not.
        """
        kind = getattr(module, "rope_type", None)  # a dictionary by layer type in some models
        supported = isinstance(kind, str) and kind in FIXED and "inv_freq" in module._buffers
        if not supported or module._parameters or module._modules:
            return None
        tables = RotaryTables(module, dtypes)
        try:
            return (
                tables if all(tables._agrees(*each) for each in product(dtypes, _TRIED)) else None
            )
        except _ODD:
            return None

    def _agrees(self, dtype: torch.dtype, position: int) -> bool:
        x, ids = torch.zeros(1, 1, 1, dtype=dtype), torch.tensor([[position]])
        with torch.no_grad():
            pairs = zip(self.forward(x, ids), self._original(self._module, x, ids), strict=True)
            return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)

    def _sources(self) -> tuple[Any, ...]:
        module = self._module
        return module._buffers["inv_freq"], getattr(module, "attention_scaling", None)

    @outside_graphs
    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the rotary cosines and sines [1, tokens, width] of positions, in x's type.

        For one position they are looked up; the module's own forward computes all others.
        """
        if (
            args
            or kwargs
            or position_ids.shape != (1, 1)
            or x.is_meta
            or x.dtype not in self._dtypes
            or torch.is_grad_enabled()
            or any(map(is_not, self._sources(), self._source_objects))
        ):
            return self._original(self._module, x, position_ids, *args, **kwargs)
        position = int(position_ids)
        row = position % ROWS
        cos, sin = self._table(position - row, x.dtype)
        return cos[:, row : row + 1], sin[:, row : row + 1]

    def _table(self, start: int, dtype: torch.dtype) -> Table:
        table = self._tables.get((start, dtype))
        if table is None:
            with torch.inference_mode(False), torch.no_grad():
                ids = torch.arange(start, start + ROWS)[None]
                table = self._original(self._module, torch.zeros(1, 1, 1, dtype=dtype), ids)
            with self._lock:
                self._tables[start, dtype] = table
                while len(self._tables) > TABLES:
                    del self._tables[next(iter(self._tables))]  # the oldest
        return table
