"""Kinds of KV cache (plain, quantised, offloaded) that `--kv` names.

`dynamic` stores keys and values as computed. `int8` and `int4` quantise those of layers with full
attention, which changes the output. `offloaded` stores a GPU's keys and values in host memory,
which does not change the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from greenroom.errors import UsageError
from greenroom.hf.kv import cache as plain
from greenroom.hf.kv.quantised import QuantisedLayer
from greenroom.runtime.kernels.dense.kv_rows import FORMATS, KeyValueFormat

DYNAMIC, OFFLOADED = "dynamic", "offloaded"


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Kind of KV cache: plain, quantised or offloaded.

    name: the value of `--kv`
    """

    name: str = DYNAMIC

    @property
    def form(self) -> KeyValueFormat | None:
        """Return the format of quantised keys and values; None for other kinds."""
        return FORMATS.get(self.name)

    @property
    def generation_options(self) -> dict[str, Any]:
        """Return the options of transformers' generation config that select this KV cache."""
        return {"cache_implementation": OFFLOADED} if self.name == OFFLOADED else {}

    def cache(self, config: Any, room: int = plain.ROOM, in_blocks: bool = False) -> Any:
        """Return an empty KV cache of this kind for a model's decoder; see `make_growing`."""
        cache = DynamicCache(config=config, offloading=self.name == OFFLOADED)
        if self.form is not None:
            self.make_growing(cache, room, in_blocks)
        return cache

    def make_growing(self, cache: Any, room: int = plain.ROOM, in_blocks: bool = False) -> None:
        """Make a KV cache's plain layers grow in place, quantised if this kind is.

        room:      tokens for which address space is reserved, in host memory
        in_blocks: whether memory grows by blocks of 256 tokens instead, as on a GPU
        """
        replace = None if self.form is None else partial(QuantisedLayer.replacing, self.form)
        plain.make_growing(cache, room, in_blocks, replace)


def cache_kind(name: str, model: PreTrainedModel, on_a_gpu: bool) -> CacheKind:
    """Return the kind of KV cache that `--kv NAME` selects for a model.

    Raises UsageError if this model or device does not support the kind.
    """
    if name == DYNAMIC:
        return CacheKind()
    config: Any = model.config
    if config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        raise UsageError(
            f"--kv {name} does not work with {config.model_type} models, which have a KV cache of"
            " their own kind: use --kv dynamic"
        )
    if name == OFFLOADED and not on_a_gpu:
        raise UsageError(
            "--kv offloaded moves a GPU's KV cache to host memory: on a CPU use --kv dynamic"
        )
    return CacheKind(name)
