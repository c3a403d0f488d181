"""Measure a model's KV cache memory by a forward pass on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from mmap import PAGESIZE
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from greenroom.errors import UsageError
from greenroom.hf.kv.cache import BLOCK, FREED, layers_of
from greenroom.hf.kv.kinds import DYNAMIC, OFFLOADED, CacheKind, cache_kind
from greenroom.runtime.kernels.dense.kv_rows import KeyValueFormat

PROBE = 47  # tokens; a dimension of this size is taken for the tokens
GPU_PAGE = 2 << 20  # what torch's allocator rounds large tensors up to
LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Memory of one layer's KV cache, for one sequence.

    token:    bytes for each token
    fixed:    bytes that do not depend on the number of tokens, such as recurrent states
    rows:     heads of keys plus heads of values; each begins on a memory page of its own
    max_tokens: most tokens that the layer stores, if it has a sliding window; else None
    in_place: whether the layer's tensors grow in place
    shape:    number of heads, width of a key, width of a value
    decoded:  bytes of a token as computed, if the layer stores less; else 0
    """

    token: int
    fixed: int = 0
    rows: int = 2
    max_tokens: int | None = None
    in_place: bool = True
    shape: tuple[int, int, int] = (1, 1, 1)
    decoded: int = 0

    def quantised(self, form: KeyValueFormat) -> LayerSize:
        """Return the size of this layer with quantised keys and values.

        Layers that do not grow in place are never quantised.
        """
        if not self.in_place:
            return self
        heads, *widths = self.shape
        token = heads * sum(map(form.row_bytes, widths))
        return replace(self, token=token, decoded=self.token)

    def held_bytes(self, tokens: int) -> int:
        """Return how many bytes `tokens` tokens take in a layer, not rounded to pages."""
        return (
            self.token * (tokens if self.max_tokens is None else min(tokens, self.max_tokens))
            + self.fixed
        )


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Memory of a model's KV cache, as a function of the tokens in each sequence.

    layers:   the memory of each layer
    kind:     plain, quantised or offloaded
    on_a_gpu: whether the cache is in a GPU's memory
    room:     tokens within which a cache in host memory grows without a copy
    """

    layers: tuple[LayerSize, ...]
    kind: CacheKind = field(default_factory=CacheKind)
    on_a_gpu: bool = False
    room: int = 4096

    def held_bytes(self, tokens: int, batch: int = 1) -> int:
        """Return how many bytes a KV cache takes with `tokens` tokens in each sequence.

        During a forward pass it may take more: see `update_bytes`.
        """
        if self.kind.name == OFFLOADED:  # the layer that computes, and the next one
            return 2 * batch * self._largest(tokens)
        return sum(self._paged_bytes(layer, tokens, batch) for layer in self.layers)

    def host_bytes(self, tokens: int) -> int:
        """Return the bytes of host memory that an offloaded KV cache takes; 0 for other kinds."""
        offloaded = self.kind.name == OFFLOADED
        return sum(layer.held_bytes(tokens) for layer in self.layers) if offloaded else 0

    def update_bytes(self, tokens: int, batch: int = 1, decodes: bool = True) -> int:
        """Return the most extra bytes that a KV cache takes while a layer adds tokens.

        decodes: whether attention needs quantised keys and values decoded, as that of prompts does
        """
        if self.kind.name == OFFLOADED:
            return batch * self._largest(tokens)
        all_copy = self.on_a_gpu or tokens > self.room
        copied = max(
            (x.held_bytes(tokens) for x in self.layers if all_copy or not x.in_place), default=0
        )
        decoded = max((layer.decoded for layer in self.layers), default=0) * tokens * decodes
        freed = FREED if self.on_a_gpu and tokens > BLOCK else 0
        return batch * max(copied, decoded) + freed

    def total_bytes(self, tokens: int, batch: int = 1, decodes: bool = True) -> int:
        return self.held_bytes(tokens, batch) + self.update_bytes(tokens, batch, decodes)

    def _largest(self, tokens: int) -> int:
        return max((layer.held_bytes(tokens) for layer in self.layers), default=0)

    def _paged_bytes(self, layer: LayerSize, tokens: int, batch: int) -> int:
        """Return the bytes of a layer's plain KV cache, rounded up to pages or blocks."""
        if not layer.in_place:
            is_window = self.on_a_gpu and layer.max_tokens is not None
            return batch * layer.held_bytes(tokens + BLOCK * is_window)
        if not self.on_a_gpu:
            return batch * (layer.held_bytes(tokens) + layer.rows * PAGESIZE)
        nbytes = batch * layer.held_bytes(-(-tokens // BLOCK) * BLOCK)
        return nbytes + (2 * GPU_PAGE if nbytes > LARGE else 0)


_LAYERS: dict[tuple[Any, ...], list[LayerSize]] = {}  # by model: measuring takes a while


def kv_bytes(
    model: PreTrainedModel,
    kv: str = DYNAMIC,
    *,
    block: int,
    on_a_gpu: bool = False,
    room: int = 4096,
) -> KVBytes:
    """Measure a model's KV cache memory by a forward pass on the meta device.

    kv:    the kind of KV cache, a value of `--kv`; UsageError if the model does not support it
    block: most tokens of a prompt that one forward pass computes
    on_a_gpu, room: fields of the result
    """
    config = model.config
    key = type(model), model.dtype, block, config.to_json_string(), config._attn_implementation
    if (layers := _LAYERS.get(key)) is None:
        try:
            layers = _layers(model, block)
        except Exception:  # a model whose forward cannot run without data
            layers = _by_config(model)
        _LAYERS[key] = layers
    kind = cache_kind(kv, model, on_a_gpu)
    if (form := kind.form) is not None:
        layers = [layer.quantised(form) for layer in layers]
        _check_quantised(model, kind, layers)
    return KVBytes(tuple(layers), kind, on_a_gpu, room)


def _check_quantised(model: PreTrainedModel, kind: CacheKind, layers: Sequence[LayerSize]) -> None:
    """Check that a model can compute with quantised keys and values; else raise UsageError.

    Some read the stored keys of other layers, which are rows of bytes here.
    """
    refusal = f"--kv {kind.name} does not work with {model.config.model_type} models"
    if not any(layer.decoded for layer in layers):
        raise UsageError(f"{refusal}: no layer with full attention was found; use --kv dynamic")
    cache = kind.cache(model.config, in_blocks=True)
    try:
        with torch.no_grad(), _equal_modules_once(model):
            for tokens in (PROBE, 1):
                ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
                model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as error:  # a model's own code fails in its own way
        raise UsageError(f"{refusal}, which read stored keys: use --kv dynamic") from error


def _layers(model: PreTrainedModel, block: int) -> list[LayerSize]:
    """Measure the size of each KV cache layer after a pass of PROBE tokens."""
    ids = torch.zeros(1, PROBE, dtype=torch.long, device="meta")
    # Some encoders refuse `use_cache`; decoders have a cache by default.
    options: dict[str, Any] = {"use_cache": True}
    if model.config.is_encoder_decoder:
        options = {"decoder_input_ids": ids}
    model.eval()  # some models leave out random layers in training
    with torch.no_grad(), _equal_modules_once(model):
        cache: Any = model(input_ids=ids, **options).past_key_values
    return [_layer(layer, block) for layer in layers_of(cache)]


@contextmanager
def _equal_modules_once(model: nn.Module) -> Iterator[None]:
    """Compute only the first of equal submodules within this context, for passes on meta tensors.

    Submodules are equal if they differ in the values of their weights only. A call with one tensor
    then returns the result of the first call with a tensor of this shape, since on the meta device
    a result is only a shape. Calls with further arguments, such as a KV cache, are computed.
    """
    kind_of: dict[nn.Module, int] = {}
    _add_kinds(model, {}, kind_of)
    counts = Counter(kind_of.values())
    results: dict[Hashable, Any] = {}
    changed = [m for m, kind in kind_of.items() if counts[kind] > 1 and "forward" not in vars(m)]
    for module in changed:
        module.forward = partial(_first_result, results, kind_of[module], module.forward)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _add_kinds(
    module: nn.Module, kinds: dict[Hashable, int], kind_of: dict[nn.Module, int]
) -> None:
    """Number the kinds of a module and of all its submodules.

    Modules of a kind are equal but for the values of their weights.
    """
    for each in module.children():
        if each not in kind_of:
            _add_kinds(each, kinds, kind_of)
    values = tuple(
        (k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str)
    )
    tensors = (*module._parameters.items(), *module._buffers.items())
    shapes = tuple((name, None if t is None else (t.shape, t.dtype)) for name, t in tensors)
    inner = tuple(
        (name, None if each is None else kind_of[each]) for name, each in module._modules.items()
    )
    kind = type(module), values, shapes, inner
    kind_of[module] = kinds.setdefault(kind, len(kinds))


def _first_result(
    results: dict[Hashable, Any], kind: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if len(args) != 1 or kwargs or not isinstance(x := args[0], torch.Tensor):
        return forward(*args, **kwargs)
    key = kind, x.shape, x.stride(), x.dtype
    if key not in results:
        results[key] = forward(x)
    return results[key]


def _layer(layer: Any, block: int) -> LayerSize:
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    window = getattr(layer, "sliding_window", None)
    if window is not None:  # the window may be shorter than PROBE
        growing, tokens = [layer.keys, layer.values], layer.keys.shape[-2]
    else:
        growing, tokens = [tensor for tensor in tensors if PROBE in tensor.shape], PROBE
    nbytes = sum(tensor.nbytes for tensor in growing)
    shape = (1, 1, 1)
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        shape = (layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
    return LayerSize(
        token=nbytes // tokens,
        fixed=sum(tensor.nbytes for tensor in tensors) - nbytes,
        rows=sum(prod(tensor.shape[:-2]) for tensor in growing),
        max_tokens=None if window is None else window + max(block, BLOCK),
        in_place=type(layer) is DynamicLayer,
        shape=shape,
    )


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer; one config if all layers have the same."""
    return list(config.per_layer_config) if config.is_heterogeneous else [config]


def _by_config(model: PreTrainedModel) -> list[LayerSize]:
    """Compute the sizes of KV cache layers from the model's config, as full attention."""
    config: Any = model.config.get_text_config()
    layers = []
    for each in layer_configs(config):
        heads = getattr(each, "num_key_value_heads", None) or each.num_attention_heads
        width = getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads
        token = int(2 * heads * width * model.dtype.itemsize)
        pages = 2 * heads * PAGESIZE
        shape = (heads, width, width)
        layers.append(LayerSize(token, pages, rows=2 * heads, in_place=False, shape=shape))
    return layers if config.is_heterogeneous else layers * config.num_hidden_layers
