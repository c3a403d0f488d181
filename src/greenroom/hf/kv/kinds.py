"""Kinds of KV cache (plain, quantised, offloaded) that `--kv` names, as transformers' caches.

`dynamic` stores keys and values as computed. `fp8`, `int4` and `int2` quantise keys and values,
which changes the output. `offloaded` stores a GPU's keys and values in host memory, which does not
change the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, QuantizedCache
from transformers.utils import is_optimum_quanto_available, is_quanto_greater

from greenroom.errors import UsageError
from greenroom.hf.kv.cache import tensor_bytes

DYNAMIC, OFFLOADED, FP8 = "dynamic", "offloaded", "fp8"
BITS = {"int4": 4, "int2": 2}  # quantised by optimum-quanto
GROUP = 64  # the most values that share a scale
RESIDUAL = 128  # newest tokens, which optimum-quanto's layers do not quantise
# Memory of a layer's update, in times of its keys and values as computed: all of them are decoded
# and joined with the new ones, and from time to time quantised again.
UPDATING = {"fp8": 5.0, "int4": 6.0, "int2": 7.0}

Widths = Sequence[tuple[int, int, int]]  # (heads, width of keys, width of values) of each layer


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Kind of KV cache for one model: plain, quantised or offloaded.

    name:  the value of `--kv`
    group: number of values that share a scale, in an int4 or int2 cache
    """

    name: str = DYNAMIC
    group: int = GROUP

    @property
    def quantised(self) -> bool:
        return self.name not in (DYNAMIC, OFFLOADED)

    @property
    def generation_options(self) -> dict[str, Any]:
        """Return the options of transformers' generation config that select this KV cache."""
        if self.name == DYNAMIC:
            return {}
        if self.name == OFFLOADED:
            return {"cache_implementation": OFFLOADED}
        return {"cache_implementation": "quantized", "cache_config": self._options}

    @property
    def _options(self) -> dict[str, Any]:
        if self.name == FP8:
            return {"backend": FP8}
        return {
            "backend": "quanto",
            "nbits": BITS[self.name],
            "q_group_size": self.group,
            "residual_length": RESIDUAL,
        }

    def cache(self, config: Any) -> Any:
        """Return an empty KV cache of this kind for a model's decoder."""
        if self.quantised:
            return QuantizedCache(config=config, **self._options)
        return DynamicCache(config=config, offloading=self.name == OFFLOADED)

    def stored_bytes(self, heads: int, keys: int, values: int, dtype: torch.dtype) -> int:
        """Measure the bytes of 64 tokens in one layer of a quantised KV cache.

        heads, keys, values: numbers of heads, and widths of a key and a value
        """
        from transformers.cache_utils import Fp8QuantizedLayer, QuantoQuantizedLayer

        options = {k: v for k, v in self._options.items() if k != "backend"}
        layer: Any = (Fp8QuantizedLayer if self.name == FP8 else QuantoQuantizedLayer)(**options)
        tensors = [torch.ones(1, heads, 64, width, dtype=dtype) for width in (keys, values)]
        layer.update(*tensors)
        stored_bytes = tensor_bytes([layer._quantized_keys, layer._quantized_values])
        # One more token makes optimum-quanto compile its kernels now, not in the first answer.
        layer.update(*(tensor[:, :, :1] for tensor in tensors))
        return stored_bytes


def cache_kind(name: str, model: PreTrainedModel, widths: Widths, on_a_gpu: bool) -> CacheKind:
    """Return the kind of KV cache that `--kv NAME` selects for a model.

    widths: number of heads, width of a key and width of a value in each layer
    Raises UsageError if this model, device or installation does not support the kind.
    """
    if name == DYNAMIC:
        return CacheKind()
    config: Any = model.config
    if config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        raise UsageError(
            f"--kv {name} does not work with {config.model_type} models, which have a KV cache of"
            " their own kind: use --kv dynamic"
        )
    if name == OFFLOADED:
        if not on_a_gpu:
            raise UsageError(
                "--kv offloaded moves a GPU's KV cache to host memory: on a CPU use --kv dynamic"
            )
        return CacheKind(name)
    if name in BITS and not (
        is_optimum_quanto_available() and is_quanto_greater("0.2.5", accept_dev=True)
    ):
        raise UsageError(
            f"--kv {name} needs optimum-quanto: run pip install optimum-quanto, or use --kv fp8"
        )
    group = gcd(GROUP, *(width for _, *both in widths for width in both))
    kind = CacheKind(name, group)
    try:
        kind.cache(config)
    except ValueError as error:
        raise UsageError(
            f"--kv {name} does not work with {config.model_type} models: transformers can quantise"
            " keys and values of full-attention layers only; use --kv dynamic"
        ) from error
    return kind
