"""Find the weight conversion from GGUF tensors to each parameter of a model.

Routed experts are found by their modules: GGUF has gate, up and down matrices of a layer's experts
as [experts, outputs, inputs], and flags of the experts module say how transformers joins them. The
other parameters are found by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    Transpose,
    WeightConverter,
)

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.library_errors import error_line
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.experts import expert_modules
from greenroom.hf.index.gguf.names import GgufNames, layer_of
from greenroom.hf.index.gguf.values import SPLIT, operations_for

# Tensors that no parameter needs: factors of RoPE, which the config has, and layers that predict
# several tokens ahead (MTP), which transformers does not compute.
UNUSED = re.compile(r"^rope_(freqs|factors_\w+)\.weight$|\.rope_freqs\.weight$|\.nextn\.")


def gguf_conversions(
    model: PreTrainedModel, checkpoint: GgufCheckpoint
) -> dict[str, WeightConversion]:
    """Find the weight conversions from GGUF tensors to a model's parameters.

    Returns conversions by the full name of their parameter. Axes of length 1, which GGUF leaves
    out, are added to the checkpoint's tensors. Raises UnsupportedModel for a tensor that no
    parameter needs, CheckpointError for tensors of wrong shapes.
    """
    finder = _Finder(model, checkpoint)
    for name, module in finder.experts.items():
        finder.add_experts(name, module)
    experts = {*finder.conversions}
    for name in model.state_dict():
        if name not in experts:
            finder.add(name)
    finder.check_unused()
    return finder.conversions


@dataclass
class _Finder:
    """Finder of the weight conversions of one model; `converters` are shared by all layers.

    The keys of `converters` are (GGUF's names inside a layer, the parameter's own name).
    """

    model: PreTrainedModel
    checkpoint: GgufCheckpoint
    conversions: dict[str, WeightConversion] = field(default_factory=dict)
    converters: dict[tuple[tuple[str, ...], str], WeightConverter] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        layers = self.model.config.get_text_config().num_hidden_layers
        self.layers = int(layers)
        self.names = GgufNames(self.model, self.checkpoint.architecture, self.layers)
        self.parameters = self.model.state_dict()
        self.experts = expert_modules(self.model)

    def add_experts(self, name: str, module: torch.nn.Module) -> None:
        """Add the conversions of one experts module, if the file has its tensors."""
        layer = layer_of(f"{name}.")
        transpose: list[ConversionOps] = [Transpose(1, 2)] if module.is_transposed else []
        split: list[ConversionOps] = (
            [] if module.is_concatenated else [Interleave(dim=1, inverse=True)]
        )
        ups = ["ffn_gate_exps", "ffn_up_exps"] if module.has_gate else ["ffn_up_exps"]
        first = "gate_up_proj" if module.has_gate else "up_proj"
        if self._present(layer, ["ffn_gate_up_exps.weight"]):
            ups = ["ffn_gate_up_exps"]
        join: list[ConversionOps] = [Concatenate(dim=1), *split] if len(ups) > 1 else split
        for stems, key, operations in ((ups, first, join), (["ffn_down_exps"], "down_proj", [])):
            matrices = [f"{stem}.weight" for stem in stems]
            self._add_layer(layer, matrices, f"{name}.{key}", [*operations, *transpose])
            if module.has_bias:
                biases = [f"{stem}.bias" for stem in stems]
                self._add_layer(layer, biases, f"{name}.{key}_bias", operations)

    def add(self, parameter: str) -> None:
        """Add the conversion of a parameter that is no routed expert's, if the file has it."""
        layer = layer_of(parameter)
        for split in SPLIT:
            if re.search(split.pattern, parameter) and self._present(layer, split.parts):
                return self._add_layer(layer, split.parts, parameter, [split.join])
        for name in self.names.names_of(parameter):
            if name in self.checkpoint.tensors and name not in self.used:
                return self._add_tensor(name, parameter)
        return None

    def check_unused(self) -> None:
        """Raise UnsupportedModel if the file has tensors that no parameter needs."""
        unused = [
            name
            for name in self.checkpoint.tensors
            if name not in self.used and not UNUSED.search(name) and not self._is_beyond(name)
        ]
        if unused:
            more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
            stored = self.checkpoint.tensors[unused[0]]
            raise UnsupportedModel(
                f"{self.checkpoint.files[stored.file]}: {type(self.model).__name__} has no"
                f" parameter for the tensor {unused[0]}{more}: the model's config does not fit this"
                " file, or Greenroom does not support this variant of the architecture"
            )

    def _is_beyond(self, name: str) -> bool:
        """True for a tensor of a layer after the model's last one: it predicts further tokens.

        The file's number of layers includes such layers.
        """
        layer = layer_of(name)
        blocks = self.checkpoint.config.get(f"{self.checkpoint.architecture}.block_count", 0)
        return layer is not None and isinstance(blocks, int) and self.layers <= layer < blocks

    def _present(self, layer: int | None, parts: Sequence[str]) -> bool:
        return all(f"blk.{layer}.{part}" in self.checkpoint.tensors for part in parts)

    def _add_layer(
        self, layer: int | None, parts: Sequence[str], target: str, operations: list[ConversionOps]
    ) -> None:
        """Add the conversion of a parameter that is made from tensors of a layer."""
        if not self._present(layer, parts):
            return
        self._add(target, [f"blk.{layer}.{part}" for part in parts], parts, operations)

    def _add_tensor(self, name: str, target: str) -> None:
        """Add the conversion of a parameter that is made from one tensor."""
        shape = tuple(self.parameters[target].shape)
        stored = self.checkpoint.tensors[name]
        if (
            stored.shape != shape
            and stored.encoding == PLAIN
            and prod(stored.shape) == prod(shape)
            and [n for n in stored.shape if n > 1] == [n for n in shape if n > 1]
        ):
            self.checkpoint.tensors[name] = replace(stored, shape=shape)  # type: ignore[index]
        operations = list(
            operations_for(self.checkpoint.architecture, name, self.model.config.get_text_config())
        )
        self._add(target, [name], [re.sub(r"^blk\.\d+\.", "", name)], operations)

    def _add(
        self,
        target: str,
        names: Sequence[str],
        patterns: Sequence[str],
        operations: list[ConversionOps],
    ) -> None:
        self.used.update(names)
        if target not in self.parameters:  # experts that were detached from the model
            return
        converter = None
        if operations:
            key = tuple(patterns), target.rpartition(".")[2]
            converter = self.converters.get(key)
            if converter is None:
                converter = WeightConverter(list(patterns), f".{key[1]}", operations)
                self.converters[key] = converter
        keys = patterns if converter is not None else names
        sources = {key: [name] for key, name in zip(keys, names, strict=True)}
        conversion = WeightConversion((target,), converter, sources)
        if converter is not None and target.rpartition(".")[0] not in self.experts:
            self._check_shape(conversion, names)
        self.conversions[target] = conversion

    def _check_shape(self, conversion: WeightConversion, names: Sequence[str]) -> None:
        """Check that tensors have the shapes from which a conversion makes its parameter."""
        (target,), tensors = conversion.targets, self.checkpoint.tensors
        expected, got = list(self.parameters[target].shape), ""
        empty = {name: torch.empty(tensors[name].shape, device="meta") for name in names}
        try:
            parameter = conversion.convert(empty, self.model, self.model.config)[target]
            if list(parameter.shape) == expected:
                return
            got = f"shape {list(parameter.shape)}"
        except (RuntimeError, ValueError, IndexError) as error:
            got = error_line(error)
        having = ", ".join(f"{name} {list(tensors[name].shape)}" for name in names)
        raise CheckpointError(
            f"{self.checkpoint.files[tensors[names[0]].file]}: the shapes of its tensors ({having})"
            f" do not fit the config, by which {target} has shape {expected} ({got})"
        )
