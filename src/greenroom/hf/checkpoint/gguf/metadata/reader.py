"""Reader of the values in a GGUF file's metadata."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.json_file import printable

ADVICE = (
    "put the original model's config.json beside the file, or name its folder or hub id with"
    " --config"
)


class Metadata:
    """Reader of a GGUF file's metadata, by keys without the architecture's name.

    architecture: GGUF's name of the architecture
    layers:       number of layers, without those that predict further tokens
    tensors:      the file's tensors by name
    paths:        the model's files
    """

    def __init__(self, header: Header) -> None:
        self.architecture = header.architecture
        self.tensors = header.tensors
        self.paths = header.paths
        self._values = header.metadata
        self.layers: int = self["block_count"] - self.get("nextn_predict_layers", 0)

    def __getitem__(self, name: str) -> Any:
        """Return a value; raise UnsupportedModel if the metadata lack it."""
        if (value := self.get(name)) is None:
            raise self.lacking(f"{self.architecture}.{name}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or `default` if the metadata lack it.

        An array that has one value for all layers that have any is replaced by this value.
        """
        value = self._values.get(f"{self.architecture}.{name}")
        if value is None:
            return default
        if isinstance(value, list):
            several = sorted({*value} - {0}) or [0]
            if len(several) > 1:
                raise self.refused(f"{self.architecture}.{name} differs between layers")
            return exact(several[0])
        return exact(value)

    def has_key(self, name: str) -> bool:
        """Return whether the metadata have a value."""
        return f"{self.architecture}.{name}" in self._values

    def array(self, name: str) -> list[Any]:
        """Return an array's values; a single value stands for all layers."""
        value = self._values.get(f"{self.architecture}.{name}")
        if value is None:
            raise self.lacking(f"{self.architecture}.{name}")
        return [exact(each) for each in value] if isinstance(value, list) else [value] * self.layers

    def each_layer(self, name: str) -> list[Any]:
        """Return a value for each layer; raise UnsupportedModel if there are fewer."""
        values = self.array(name)
        if len(values) < self.layers:
            raise self.refused(
                f"{self.architecture}.{name} has {len(values)} values, but the model has"
                f" {self.layers} layers"
            )
        return values[: self.layers]

    def token(self, name: str) -> int | None:
        """Return the id of one of the tokenizer's special tokens."""
        return self._values.get(f"tokenizer.ggml.{name}_token_id")

    def has(self, pattern: str) -> bool:
        """Return whether the file has a tensor of a name that a regular expression matches."""
        return any(re.fullmatch(pattern, name) for name in self.tensors)

    def layers_with(self, tensor: str) -> list[bool]:
        """Return for each layer whether it has a tensor of this name."""
        return [f"blk.{layer}.{tensor}" in self.tensors for layer in range(self.layers)]

    def lacking(self, what: str) -> UnsupportedModel:
        """Error for a value that the metadata lack, and that the model's config needs."""
        return self.refused(f"they lack {what}")

    def refused(self, why: str) -> UnsupportedModel:
        """Error for metadata of which no config can be made."""
        return UnsupportedModel(
            f"{self.paths[0]}: the metadata of this file do not make a config for the architecture"
            f" {printable(self.architecture)}: {why}: {ADVICE}"
        )


def exact(value: Any) -> Any:
    """Return a float of 32 bits as the shortest decimal number that has its bits.

    Metadata store 1e-6 as 9.99999997e-07. Other values are returned as they are.
    """
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
