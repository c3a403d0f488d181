"""Values of a config that are computed from GGUF metadata and tensor names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.hf.checkpoint.gguf.metadata.reader import Metadata

EMBEDDING = "token_embd.weight"
BIAS = r"blk\.\d+\.attn_(q|k|v|qkv|q_a)\.bias"
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def key_value_heads(metadata: Metadata) -> int:
    """Number of heads of keys and values; without the key that of queries."""
    return int(metadata.get("attention.head_count_kv") or metadata["attention.head_count"])


def query_heads(metadata: Metadata) -> int:
    """Number of heads of latent attention: the file has one head of keys and values."""
    return int(metadata["attention.head_count"])


def head_size(metadata: Metadata) -> int:
    """Dimension of a head; without the key the hidden size divided by the heads."""
    return int(
        metadata.get("attention.key_length")
        or metadata["embedding_length"] // metadata["attention.head_count"]
    )


def weight_scale(metadata: Metadata) -> float:
    """Factor of the experts' gate weights; 0 and no value stand for 1."""
    return float(metadata.get("expert_weights_scale", 0.0) or 1.0)


def biased_attention(metadata: Metadata) -> bool:
    """Return whether the projections of attention have biases."""
    return metadata.has(BIAS)


def has_tensor(pattern: str) -> Callable[[Metadata], bool]:
    """Source of whether the file has a tensor, by a regular expression."""
    return lambda metadata: metadata.has(pattern)


def vocabulary(metadata: Metadata) -> int:
    """Number of rows of the embeddings."""
    if EMBEDDING not in metadata.tensors:
        raise metadata.refused(f"the file lacks the tensor {EMBEDDING}")
    return metadata.tensors[EMBEDDING].shape[0]


def sparse_layers(metadata: Metadata) -> list[str]:
    """Kind of each layer's MLP: those with a router are sparse."""
    has_router = metadata.layers_with("ffn_gate_inp.weight")
    if not any(has_router):
        raise metadata.refused("the file lacks the tensors ffn_gate_inp.weight")
    return ["sparse" if is_sparse else "dense" for is_sparse in has_router]


def leading_dense_layers(metadata: Metadata) -> int:
    """Number of layers in front of the first one with a router."""
    return sparse_layers(metadata).index("sparse")


def plain_head_size(metadata: Metadata) -> int:
    """Dimension of keys without rotation, in latent attention."""
    return int(metadata["attention.key_length_mla"] - metadata["rope.dimension_count"])


def window_layers(metadata: Metadata) -> list[str]:
    """Kind of each layer's attention, by the array of layers with a sliding window."""
    pattern = metadata.each_layer("attention.sliding_window_pattern")
    return [SLIDING if is_sliding else FULL for is_sliding in pattern]


def window_value(name: str, is_sliding: bool) -> Callable[[Metadata], Any]:
    """The value of layers with a sliding window, or of those without; refused if it differs."""

    def value(metadata: Metadata) -> Any:
        pattern = metadata.each_layer("attention.sliding_window_pattern")
        pairs = zip(pattern, metadata.each_layer(name), strict=True)
        values = sorted({number for slides, number in pairs if bool(slides) == is_sliding})
        if len(values) > 1:
            raise metadata.refused(f"{metadata.architecture}.{name} differs between layers")
        return values[0] if values else metadata.get(name)

    return value


def period_of_windows(period: int) -> Callable[[Metadata], list[str]]:
    """Kind of each layer's attention: every `period`-th layer is without a sliding window."""
    return lambda metadata: [
        SLIDING if (layer + 1) % period else FULL for layer in range(metadata.layers)
    ]


def recurrent_layers(metadata: Metadata) -> list[str]:
    """Kind of each layer's attention: layers without heads of keys and values are recurrent."""
    return [FULL if heads else LINEAR for heads in metadata.each_layer("attention.head_count_kv")]


def delta_layers(metadata: Metadata) -> list[str]:
    """Kind of each layer's attention: layers with a decay of states are linear."""
    return [LINEAR if is_linear else FULL for is_linear in metadata.layers_with("ssm_a")]


def value_head_size(metadata: Metadata) -> int:
    """Dimension of a value head in linear attention."""
    return int(metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"])


def expansion(metadata: Metadata) -> int:
    """Factor from the hidden size to the inner size of Mamba layers."""
    return int(metadata["ssm.inner_size"] // metadata["embedding_length"])


def period(layers: Callable[[Metadata], list[bool]], what: str) -> Callable[[Metadata], int]:
    """Distance of two layers of a kind; refused if the distances differ."""
    return lambda metadata: _steps(metadata, layers(metadata), what)[1]


def offset(layers: Callable[[Metadata], list[bool]], what: str) -> Callable[[Metadata], int]:
    """Number of the first layer of a kind."""
    return lambda metadata: _steps(metadata, layers(metadata), what)[0]


def _steps(metadata: Metadata, has: list[bool], what: str) -> tuple[int, int]:
    chosen = [layer for layer, is_chosen in enumerate(has) if is_chosen]
    if not chosen:
        raise metadata.refused(f"no layer has {what}")
    first = chosen[0]
    step = chosen[1] - first if len(chosen) > 1 else max(len(has) - first, first + 1)
    if chosen != list(range(first, len(has), step)):
        raise metadata.refused(f"the layers with {what} are not in equal distances")
    return first, step


def by_tensor(tensor: str) -> Callable[[Metadata], list[bool]]:
    """Source of the list of layers that have a tensor."""
    return lambda metadata: metadata.layers_with(tensor)


def by_heads(metadata: Metadata) -> list[bool]:
    """Return for each layer whether it has heads of keys and values."""
    return [heads > 0 for heads in metadata.each_layer("attention.head_count_kv")]


def rows(tensor: str) -> Callable[[Metadata], int]:
    """Number of rows of a tensor."""

    def count(metadata: Metadata) -> int:
        if tensor not in metadata.tensors:
            raise metadata.refused(f"the file lacks the tensor {tensor}")
        return metadata.tensors[tensor].shape[0]

    return count


def shared_experts(metadata: Metadata) -> int:
    """Number of shared experts, by their common size."""
    shared = metadata["expert_shared_feed_forward_length"]
    return int(shared // metadata["expert_feed_forward_length"])


def mamba_blocks(metadata: Metadata) -> list[str]:
    """Kind of each layer of Nemotron-H."""
    heads = metadata.each_layer("attention.head_count_kv")
    sparse = metadata.layers_with("ffn_gate_inp.weight")
    dense = metadata.layers_with("ffn_up.weight")
    return [
        FULL if heads[layer] else "moe" if sparse[layer] else "mlp" if dense[layer] else LINEAR
        for layer in range(metadata.layers)
    ]


def scoring(*supported: str) -> Callable[[Metadata], str]:
    """Function of the router, which must be one of `supported`; the first without a key."""
    names = {1: "softmax", 2: "sigmoid", 3: "softmax_weight", 4: "sqrtsoftplus"}

    def name(metadata: Metadata) -> str:
        number = metadata.get("expert_gating_func", 0)
        function = names.get(number, supported[0] if number == 0 else str(number))
        if function not in supported:
            raise metadata.refused(
                f"their router computes {function}, but the model's class {supported[0]}"
            )
        return function

    return name


def constant(value: Any) -> Callable[[Metadata], Any]:
    """Source of a value that all published models of an architecture have."""
    return lambda metadata: value


def indexer_layers(metadata: Metadata) -> list[str]:
    """Kind of each layer's indexer: a layer without one takes that of an earlier layer."""
    has = metadata.layers_with("indexer.attn_k.weight")
    return ["full" if has_indexer else "shared" for has_indexer in has]


def indexer_key_heads(metadata: Metadata) -> int:
    """Number of key heads of the indexers, by the rows of their projection."""
    size = metadata["attention.indexer.key_length"]
    names = [name for name in metadata.tensors if name.endswith(".indexer.k_proj.weight")]
    if not names:
        raise metadata.refused("the file lacks the tensors indexer.k_proj.weight")
    return int(metadata.tensors[names[0]].shape[0] // size)


def ends_of_text(metadata: Metadata) -> list[int]:
    """Tokens that end a text: that of the n-grams comes first."""
    ends = (metadata["ple.eos_token_id"], metadata.token("eos"), metadata.token("eot"))
    return [*dict.fromkeys(end for end in ends if end is not None)]


def limits(name: str) -> Callable[[Metadata], list[float] | None]:
    """Limits of each layer's activations; 0 stands for none."""
    return lambda metadata: metadata.each_layer(name) if metadata.has_key(name) else None


def shares_keys(metadata: Metadata) -> bool:
    """Return whether layers with full attention use their keys as values."""
    has_values = metadata.layers_with("attn_v.weight")
    has_keys = metadata.layers_with("attn_k.weight")
    return any(key and not value for key, value in zip(has_keys, has_values, strict=True))


def compressed_layers(metadata: Metadata) -> list[str]:
    """Kind of each layer's attention in DeepSeek V4: those with an indexer are sparse."""
    ratios = metadata.each_layer("attention.compress_ratios")
    has_indexer = metadata.layers_with("indexer.proj.weight")
    return [
        "sliding_attention" if not ratio else SPARSE if is_sparse else HEAVY
        for ratio, is_sparse in zip(ratios, has_indexer, strict=True)
    ]


def compression_rates(metadata: Metadata) -> dict[str, int]:
    """Numbers of tokens that DeepSeek V4's compressors make one."""
    ratios = metadata.each_layer("attention.compress_ratios")
    kinds = compressed_layers(metadata)
    rates = {SPARSE: {0}, HEAVY: {0}}
    for kind, ratio in zip(kinds, ratios, strict=True):
        if ratio:
            rates[kind].add(ratio)
    if any(len(numbers) > 2 for numbers in rates.values()):
        raise metadata.refused("attention.compress_ratios differ between layers of a kind")
    return {kind: max(numbers) or 1 for kind, numbers in rates.items()}


def prefix_size(metadata: Metadata) -> int | None:
    """Size of dense layers in front of those with experts."""
    if not leading_dense_layers(metadata):
        return None
    raise metadata.lacking("prefix_dense_sliding_window_pattern of their dense layers")
