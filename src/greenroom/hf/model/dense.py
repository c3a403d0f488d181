"""Find the weights, other than experts, that stay quantised in memory, or stay on disk.

Quantised in memory are the weights of plain linear layers and embeddings whose encoding (fp8, GGUF,
...) a compiled kernel can read. On disk are large tables of embeddings: a token needs one row. A
weight is excluded if the model's code uses it outside of the layer, by an expression such as
`x.weight`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate

from greenroom.core.layout import PLAIN
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.gguf.order import OrderFinder
from greenroom.hf.model.encoded import EncodedParameter, JoinedParameter, encoded_parameter
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.dense.table import DiskTable, RowsOnDisk, Shard, attach_table

WEIGHT = r"(?<![\"\w.])\w+(?:\.\w+)*\.(\w+)\.weight\b"  # use of a submodule's weight
ATTRIBUTES = r"\.(?:device|dtype|shape)\b"  # of a weight; a table on disk has them too
_ROUTERS = {"gate", "router"}  # routers stay torch layers: they decide which experts are chosen


@dataclass(frozen=True, slots=True)
class TableParameter:
    """An embedding's weight that stays on disk.

    modules: names of the embeddings that share the table
    tensors: names of the checkpoint's tensors, of which each has some of the rows
    stored:  the table
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    stored: DiskTable

    def detach(self, model: PreTrainedModel) -> None:
        """Replace the weight of the modules by the table."""
        for name in self.modules:
            attach_table(model.get_submodule(name), self.stored)

    def load(self, checkpoint: Checkpoint, empty: Callable[..., torch.Tensor]) -> None:
        """Open the table's files. Raises CheckpointError."""
        self.stored.open()


def find_table_parameters(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversions: dict[str, WeightConversion],
    dtypes: Callable[[str, torch.dtype], torch.dtype],
    least: int,
) -> dict[str, TableParameter]:
    """Find the embeddings that are large enough to stay on disk.

    They have at least `least` bytes in the checkpoint. An embedding that is tied to the output head
    is not among them: the head needs all rows for each token. `dtypes` returns the dtype in which a
    parameter is loaded, for its name and the dtype of the model's construction. Returns tables by
    parameter name.
    """
    tables: dict[str, TableParameter] = {}
    tied, used = dict(model.all_tied_weights_keys), _used_by_code(model, ATTRIBUTES)
    for target, conversion in conversions.items():
        names = [name for group in conversion.sources.values() for name in group]
        stored = [checkpoint.tensors[name] for name in names]
        size = sum(part.nbytes for each in stored for part in each.parts)
        if size < least or not _joins_rows(conversion) or not all(map(_has_rows, stored)):
            continue
        group = _tied_parameters(target, tied)
        if not all(_is_embedding_only(model, name, used) for name in group):
            continue
        modules = tuple(name.rpartition(".")[0] for name in group)
        weight = model.get_parameter(target)
        shards = [_shard(checkpoint, name) for name in names]
        table = DiskTable(shards, weight.shape[1], dtypes(target, weight.dtype))
        if table.shape == weight.shape:  # otherwise loading reports the wrong shape
            tables[target] = TableParameter(modules, tuple(names), table)
    return tables


def _joins_rows(conversion: WeightConversion) -> bool:
    """Check that a parameter is one tensor, or tensors of one kind below each other."""
    operations = conversion.operations
    joined = [type(each) is Concatenate and each.dim == 0 for each in operations]
    return len(conversion.sources) == 1 and (not operations or joined == [True])


def _has_rows(stored: StoredTensor) -> bool:
    """Check that a stored tensor is a matrix of which single rows can be read and decoded."""
    if len(stored.shape) != 2 or stored.transposed or any(part.form for part in stored.parts):
        return False
    rows_of_scales = -(-stored.shape[0] // stored.unit)
    return all(part.shape[:1] == (rows_of_scales,) for part in stored.companions)


def _shard(checkpoint: Checkpoint, name: str) -> Shard:
    """Describe where a checkpoint's tensor has the rows of a table."""
    stored = checkpoint.tensors[name]
    codes, *companions = stored.parts
    parts = tuple(
        RowsOnDisk(
            checkpoint.files[part.file],
            part.offset,
            part.nbytes // part.shape[0],
            getattr(torch, part.dtype),
            shared,
        )
        for part, shared in [(codes, 1), *((each, stored.unit) for each in companions)]
    )
    decode = _cast if stored.encoding == PLAIN else ENCODINGS[stored.encoding].decode
    return Shard(name, stored.shape[0], parts, decode)


def _cast(parts: list[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return parts[0].reshape(shape).to(dtype)


def _is_embedding_only(model: PreTrainedModel, name: str, used: set[str]) -> bool:
    """Check that a parameter is an embedding's weight, and that no other code reads its values."""
    path, module = name.split("."), model.get_submodule(name.rpartition(".")[0])
    is_table = isinstance(module, nn.Embedding) and path[-1] == "weight" and len(path) > 1
    return is_table and path[-2] not in used and module.max_norm is None


def find_encoded_parameters(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversions: dict[str, WeightConversion],
    dtype: torch.dtype,
) -> dict[str, EncodedParameter | JoinedParameter]:
    """Find the weight matrices, other than experts, that can stay quantised in memory.

    The model is on the meta device, and computes in `dtype`. `conversions` say from which tensors
    each parameter is made. Returns matrices by parameter name.
    """
    encoded: dict[str, EncodedParameter | JoinedParameter] = {}
    tied = dict(model.all_tied_weights_keys)
    used, orders = _used_by_code(model), OrderFinder(model)
    for target, conversion in conversions.items():
        names = [name for group in conversion.sources.values() for name in group]
        tensors = [checkpoint.tensors[name] for name in names]
        group = _tied_parameters(target, tied)
        if all(tensor.encoding == PLAIN for tensor in tensors) or not all(
            _is_used_by_layer_only(model, name, used) for name in group
        ):
            continue
        owners = [name.rpartition(".")[0] for name in group]
        modules = {owner: model.get_submodule(owner) for owner in owners}
        parameter = encoded_parameter(modules, conversion, tensors, orders, dtype)
        if parameter is not None:
            encoded[target] = parameter
    return encoded


def _tied_parameters(target: str, tied: dict[str, str]) -> list[str]:
    """Return the names of a parameter and of the parameters tied to it."""
    source = tied.get(target, target)
    others = {name for name, other in tied.items() if other == source} | {source}
    return [target, *sorted(others - {target})]


def _is_used_by_layer_only(model: PreTrainedModel, name: str, used: set[str]) -> bool:
    """Check that a parameter is the weight of a layer, and that no other code uses it."""
    path = name.split(".")
    if path[-1] != "weight" or len(path) < 2 or path[-2] in used or _ROUTERS & set(path):
        return False
    module = model.get_submodule(name.rpartition(".")[0])
    if type(module) is nn.Embedding:
        return module.max_norm is None and module.weight.dtype is model.dtype
    return type(module) is nn.Linear and module.weight.dtype is model.dtype


def _used_by_code(model: PreTrainedModel, harmless: str = "(?!)") -> set[str]:
    """Find names of submodules whose `weight` the model's code uses, as in `self.head.weight`.

    A use with text after it that matches `harmless` does not count.
    """
    modules = {type(module).__module__ for module in model.modules()}
    used: set[str] = set()
    for name in sorted(modules):
        if name.startswith("transformers.models."):
            source = inspect.getsource(sys.modules[name])
            used.update(re.findall(f"{WEIGHT}(?!{harmless})", source))
    return used
