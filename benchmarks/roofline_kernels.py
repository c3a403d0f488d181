"""The kernels of roofline.py: calls of each one, the bytes that it reads and its operations."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from kernels import DECODED, STORED, encoded_layer, encoded_matrix
from torch import nn

from greenroom.core.layout import SlotLayout
from greenroom.runtime.kernels.activation import SILU
from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.dense.attention import KeyValueView, OneTokenAttention
from greenroom.runtime.kernels.dense.blocks.router import CompiledRouter, RouterSettings
from greenroom.runtime.kernels.dense.blocks.router_call import RouterCall
from greenroom.runtime.kernels.dense.kv_rows import FORMATS as KEY_VALUE_FORMATS
from greenroom.runtime.kernels.dense.norms import ROUND_THEN_SCALE
from greenroom.runtime.kernels.dense.stored import (
    EXPANDED,
    FEW,
    MatrixRecord,
    StoredMatrix,
    product_scratch,
    thread_scratch,
)
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import batch_stage
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.routing import Routing

DTYPE = torch.bfloat16
FORMATS = ("bf16", *STORED, *DECODED)
SEQUENCES = 16  # whose tokens are decoded together
FLOATS, BYTES, LONG = "float32", "8-bit inputs", "15-bit inputs"  # what products multiply


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: those of Qwen3-30B-A3B."""

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    top_k: int = 8
    heads: int = 32
    kv_heads: int = 4
    width: int = 128
    vocabulary: int = 151_936
    tokens: tuple[int, ...] = (1, 16, 128)
    contexts: tuple[int, ...] = (128, 4096)


QUICK = Sizes(256, 256, 32, 4, 4, 2, 32, 1024, (1, 16), (32,))


@dataclass
class Case:
    """A kernel with its arguments.

    nbytes:     that must come from memory, or go there, at least once
    operations: multiplications and additions
    products:   FLOATS, BYTES or LONG
    prepare:    makes a call (function, address); what it returns in third place stays alive
    wide:       does the kernel run on all threads?
    """

    group: str
    name: str
    tokens: int
    nbytes: int
    operations: int
    products: str
    prepare: Callable[[], tuple[Any, int, Any]]
    wide: bool = True
    keep: Any = field(default=None, repr=False)  # tensors that calls have the addresses of


def copied(entry: Any, call: Any, keep: Any = None) -> Callable[[], tuple[Any, int, Any]]:
    """Make a fresh copy of a call for each run: kernels count in it."""

    def prepare() -> tuple[Any, int, Any]:
        again = type(call).from_buffer_copy(call)
        return entry, ctypes.addressof(again), (again, keep)

    return prepare


def expert_cases(sizes: Sizes, formats: tuple[str, ...]) -> Iterator[Case]:
    """Experts of each format: `tokens` tokens which all choose the same top-k experts."""
    for name in formats:
        layer, kernel = encoded_layer(name, sizes.hidden, sizes.inner, nbytes=0), CpuKernel()
        turns = itertools.cycle(range(0, layer.num_experts - sizes.top_k + 1, sizes.top_k))
        for tokens in sizes.tokens:
            x = torch.randn(tokens, sizes.hidden).to(DTYPE)
            weights = torch.ones(tokens, sizes.top_k).to(DTYPE)

            def prepare(
                layer: Any = layer, kernel: Any = kernel, x: Any = x, weights: Any = weights,
                turns: Any = turns,
            ) -> tuple[Any, int, Any]:  # fmt: skip
                first = next(turns)
                ids = list(range(first, first + weights.shape[1]))
                index = torch.tensor([ids] * len(x))
                step = kernel.begin(layer, x, Routing.of(index.numpy(), layer.num_experts), weights)
                call, lists = step.group_call(step.plan, ids, ids)
                return step.plan.group_entry, ctypes.addressof(call), (call, lists, step, index)

            _, _, (_, _, step, _) = prepare()
            rows = tokens * sizes.top_k
            yield Case(
                "experts", name, tokens,
                sizes.top_k * layer.layout.nbytes + 2 * x.numel() + 4 * rows * sizes.hidden,
                6 * rows * sizes.hidden * sizes.inner,
                (FLOATS, BYTES, LONG)[step.plan.up_planes], prepare,
            )  # fmt: skip


def step_cases(sizes: Sizes) -> Iterator[Case]:
    """What a step of experts has besides them: packed inputs, and the sum over experts."""
    layer, kernel = encoded_layer("q4_k", sizes.hidden, sizes.inner, nbytes=0), CpuKernel()
    for tokens in (1, max(sizes.tokens)):
        x, rows = torch.randn(tokens, sizes.hidden).to(DTYPE), tokens * sizes.top_k
        index = torch.arange(sizes.top_k).expand(tokens, -1).contiguous()
        weights = torch.ones(tokens, sizes.top_k).to(DTYPE)
        step = kernel.begin(layer, x, Routing.of(index.numpy(), layer.num_experts), weights)
        call, *keep = step.sum_call(step.plan)
        yield Case(
            "other", "sum over experts", tokens, rows * sizes.hidden * 4 + 2 * x.numel(),
            2 * rows * sizes.hidden, FLOATS,
            copied(step.plan.sum_entry, call, (step, keep)), rows * sizes.hidden > 1 << 16,
        )  # fmt: skip
    wide, out = torch.randn(tokens, sizes.hidden), torch.empty(tokens, sizes.hidden)
    pack = library().structure("PackCall")(
        planes=1, rows=tokens, columns=sizes.hidden, x=wide.data_ptr(), out=out.data_ptr()
    )
    yield Case(
        "other", "packed inputs", tokens, 8 * wide.numel(), 3 * wide.numel(), FLOATS,
        copied(kernel_entry("pack_rows"), pack, (wide, out)),
    )  # fmt: skip


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    """Projections of queries, keys and values; attention and its output projection."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden, num_attention_heads=sizes.heads, head_dim=sizes.width,
        num_key_value_heads=sizes.kv_heads, attn_implementation="sdpa",
    )  # fmt: skip
    module = Qwen3MoeAttention(config, 0).to(DTYPE).eval()
    attention = OneTokenAttention(module, (ROUND_THEN_SCALE, 1e-6), lambda *_: None, {})
    x, out = (torch.randn(1, 1, sizes.hidden).to(DTYPE) for _ in range(2))
    positions = torch.ones(2, 1, sizes.width).to(DTYPE).unbind()
    for number, context in enumerate(sizes.contexts):
        k, v = torch.randn(2, 1, sizes.kv_heads, context, sizes.width).to(DTYPE).unbind()
        view, work = KeyValueView(k, v, context), attention.workspace(context)
        stages = attention.stages(x.data_ptr(), positions, view, work, out.data_ptr())
        keep = module, attention, x, out, positions, view, work
        (project, projecting), (attend, attending) = stages
        wide = (sizes.heads + 2 * sizes.kv_heads) * sizes.width * sizes.hidden
        if number == 0:
            yield Case(
                "attention", "queries, keys, values", 1, 2 * wide, 2 * wide, FLOATS,
                copied(project, projecting, keep),
            )  # fmt: skip
        scores = sizes.heads * context * sizes.width
        output = sizes.heads * sizes.width * sizes.hidden
        yield Case(
            "attention", f"attention over {context:,}", 1,
            2 * (2 * context * sizes.kv_heads * sizes.width + output),
            4 * scores + 2 * output, FLOATS, copied(attend, attending, keep),
        )  # fmt: skip
    yield from batched_attention_cases(sizes, attention, positions)


def batched_attention_cases(
    sizes: Sizes, attention: OneTokenAttention, positions: Any
) -> Iterator[Case]:
    """The same for one token of each of several sequences, which share the weights."""
    context, tokens = sizes.contexts[0], SEQUENCES
    x, out = (torch.randn(tokens, 1, 1, sizes.hidden).to(DTYPE) for _ in range(2))
    works = [attention.workspace(context) for _ in range(tokens)]
    keys_values = torch.randn(tokens, 2, 1, sizes.kv_heads, context, sizes.width).to(DTYPE)
    each = [
        attention.stages(
            one.data_ptr(), positions, KeyValueView(*kv.unbind(), context), work, result.data_ptr()
        )
        for one, kv, work, result in zip(x, keys_values, works, out, strict=True)
    ]
    shared = torch.randn(4, tokens, attention.widest)
    (project, projecting), (attend, attending) = attention.batched_stages(each, shared)
    keep = attention, positions, x, out, works, keys_values, each, shared, projecting, attending
    projected = (sizes.heads + 2 * sizes.kv_heads) * sizes.width
    wide = projected * sizes.hidden
    yield Case(
        "attention", "queries, keys, values", tokens,
        2 * wide + 4 * tokens * (sizes.hidden + projected), 2 * tokens * wide, FLOATS,
        copied(project, projecting, keep),
    )  # fmt: skip
    scores = sizes.heads * context * sizes.width
    output = sizes.heads * sizes.width * sizes.hidden
    yield Case(
        "attention", f"attention over {context:,}", tokens,
        4 * tokens * context * sizes.kv_heads * sizes.width + 2 * output,
        tokens * (4 * scores + 2 * output), FLOATS, copied(attend, attending, keep),
    )  # fmt: skip


def key_value_cases(sizes: Sizes) -> Iterator[Case]:
    """Quantising keys of a prompt's block to int8, and decoding those of a context."""
    form, context = KEY_VALUE_FORMATS["int8"], sizes.contexts[-1]
    heads, width = sizes.kv_heads, sizes.width
    x = torch.randn(heads, context, width).to(DTYPE)
    rows = torch.zeros(heads, context, form.row_bytes(width), dtype=torch.uint8)
    for name, source, target in (("pack", x, rows), ("expand", rows, x)):
        call = library().structure("KeyValueCall")(
            source=source.data_ptr(), source_head=source[0].nbytes,
            source_token=source[0, 0].nbytes, target=target.data_ptr(),
            target_head=target[0].nbytes, target_token=target[0, 0].nbytes, heads=heads,
            tokens=context, width=width, format=form.number,
        )  # fmt: skip
        entry = kernel_entry(f"{name}_keys_values", DTYPE)
        yield Case(
            "attention", f"{name} keys as int8", context, source.nbytes + target.nbytes,
            2 * x.numel(), FLOATS, copied(entry, call, (x, rows)),
        )  # fmt: skip


def router_cases(sizes: Sizes) -> Iterator[Case]:
    """The router's product, its choice, and the search for the experts' slots."""
    module = nn.Linear(sizes.hidden, sizes.experts, bias=False).to(DTYPE)
    router = CompiledRouter(module, sizes.top_k, RouterSettings(summed=True), DTYPE)
    x = torch.randn(1, sizes.hidden).to(DTYPE)
    call = RouterCall(router, x.data_ptr())
    router(x)  # the choice needs logits
    (multiply, product), (select, choice) = call.stages
    multiply(ctypes.addressof(product))
    product.cursor = 0
    keep, weights = (module, router, x, call), sizes.hidden * sizes.experts
    yield Case("router", "router's logits", 1, 2 * weights, 2 * weights, FLOATS,
               copied(multiply, product, keep))  # fmt: skip
    yield Case("router", "choice of experts", 1, 2 * sizes.experts, 4 * sizes.experts, FLOATS,
               copied(select, choice, keep), wide=False)  # fmt: skip
    rows = torch.randn(SEQUENCES, sizes.hidden).to(DTYPE)
    several = RouterCall(router, rows.data_ptr(), SEQUENCES)
    several.products.normal_()
    (_, (select_rows, choices)), keep_rows = several.stages, (keep, rows, several)
    yield Case("router", "choice of experts", SEQUENCES, 2 * SEQUENCES * sizes.experts,
               4 * SEQUENCES * sizes.experts, FLOATS,
               copied(select_rows, choices, keep_rows))  # fmt: skip
    tables = [array("q", range(sizes.experts)) for _ in range(4)]
    lists = "sorted", "slots", "starts", "tokens", "rows", "found_places"
    ids, found = array("q", range(sizes.top_k)), array("q", [0] * (sizes.top_k + 1) * len(lists))
    at, step = found.buffer_info()[0], 8 * (sizes.top_k + 1)
    *places, counts = range(at, at + step * len(lists), step)
    search = library().structure("SlotSearch")(
        ids=ids.buffer_info()[0], count=1, top_k=sizes.top_k, experts=sizes.experts,
        **dict(zip(lists, places, strict=False)),
    )  # fmt: skip
    search.found_places[:] = counts, counts + 8
    names = "slot_of", "last_used", "requests", "memory"
    for name, table in zip(names, tables, strict=True):
        setattr(search.tables, name, table.buffer_info()[0])
    # Four tables of a number, in a line of 64 bytes each.
    prepare = copied(kernel_entry("find_slots"), search, (tables, ids, found))
    yield Case("router", "slots of experts", 1, 4 * 64 * sizes.top_k, sizes.top_k, FLOATS,
               prepare, wide=False)  # fmt: skip


def norm_cases(sizes: Sizes) -> Iterator[Case]:
    """The residual sum and an RMSNorm, of one token and of several sequences' tokens."""
    weight = torch.ones(sizes.hidden).to(DTYPE)
    rows = torch.ones(4, SEQUENCES, sizes.hidden).to(DTYPE)
    names = "x", "y", "sum", "out"
    calls = [
        library().structure("NormCall")(
            **{name: row.data_ptr() for name, row in zip(names, four, strict=True)},
            weight=weight.data_ptr(), columns=sizes.hidden, eps=1e-6, style=ROUND_THEN_SCALE,
        )
        for four in rows.transpose(0, 1)
    ]  # fmt: skip
    keep = weight, rows, calls
    yield Case(
        "norm", "residual sum and norm", 1, 10 * sizes.hidden, 5 * sizes.hidden, FLOATS,
        copied(kernel_entry("add_and_norm", DTYPE), calls[0], keep), wide=False,
    )  # fmt: skip
    entry, call = batch_stage(kernel_entry("add_and_norm_rows", DTYPE), calls)
    yield Case(
        "norm", "residual sum and norm", SEQUENCES, (8 * SEQUENCES + 2) * sizes.hidden,
        5 * SEQUENCES * sizes.hidden, FLOATS, copied(entry, call, (keep, call)),
    )  # fmt: skip


def activation_cases(sizes: Sizes) -> Iterator[Case]:
    """The activation of a dense MLP, whose width is that of all chosen experts."""
    columns, operations = (
        sizes.top_k * sizes.inner,
        25,
    )  # of a number: an exponential and a division
    for rows in (1, SEQUENCES):
        gate, up, out = torch.ones(3, rows, columns).to(DTYPE)
        call = library().structure("ActivateCall")(
            gate=gate.data_ptr(), up=up.data_ptr(), out=out.data_ptr(), rows=rows, columns=columns
        )
        call.activation.code, call.activation.limit = SILU, float("inf")
        yield Case(
            "mlp", "activation", rows, 6 * rows * columns, operations * rows * columns, FLOATS,
            copied(kernel_entry("activate", DTYPE), call, (gate, up, out)),
        )  # fmt: skip


def linear_cases(sizes: Sizes) -> Iterator[Case]:
    """Dense layers: the output head, plain and as stored, and rows decoded for long prompts."""
    rows, columns = sizes.vocabulary, sizes.hidden
    for name in ("bf16", "q8_0", "q6_k"):
        if name == "bf16":
            matrix: Any = torch.full((rows, columns), 0.01, dtype=DTYPE)
        else:
            codes = encoded_matrix(name, "weight", rows, columns)["weight"]
            layout = SlotLayout.pack(
                [("weight", tuple(codes.shape), "uint8")], {"weight": name}, "bfloat16"
            )
            matrix = StoredMatrix(layout, DTYPE)
            matrix.allocate()[0].copy_(codes)
            matrix.arrange()
            yield expansion_case(name, matrix)
        record, stride = MatrixRecord(matrix), 0
        for tokens in (1, 16):
            x = torch.randn(tokens, columns).to(DTYPE)
            out = torch.empty(tokens, rows, dtype=DTYPE)
            call = library().structure("LinearCall")(
                matrix=record.address, outputs=rows, inputs=columns, rows=tokens,
                x=x.data_ptr(), out=out.data_ptr(),
            )  # fmt: skip
            keep = [matrix, record, x, out]
            if name != "bf16":
                call.stride = stride = 64 * columns + product_scratch(columns)
                call.scratch = thread_scratch(stride)
            elif tokens > 1:
                keep += [wide := x.float(), sums := torch.empty(tokens, rows)]
                call.wide, call.sums = wide.data_ptr(), sums.data_ptr()
            yield Case(
                "head", f"head, {name}", tokens, matrix.nbytes + 2 * out.numel(),
                2 * tokens * rows * columns, FLOATS if name == "bf16" else BYTES,
                copied(kernel_entry("linear", DTYPE), call, keep),
            )  # fmt: skip


def expansion_case(name: str, matrix: StoredMatrix) -> Case:
    """Rows of a stored matrix, decoded for the products of a long prompt."""
    columns = matrix.shape[1]
    count = min(matrix.shape[0], EXPANDED // (DTYPE.itemsize * columns))
    record, out = MatrixRecord(matrix, kernels="rounded"), torch.empty(count, columns, dtype=DTYPE)
    stride = 4 * FEW * columns + product_scratch(columns)
    call = library().structure("ExpandCall")(
        matrix=record.address, rows=count, columns=columns, out=out.data_ptr(),
        scratch=thread_scratch(stride), stride=stride,
    )  # fmt: skip
    return Case(
        "head", f"decoded rows, {name}", count,
        matrix.nbytes * count // matrix.shape[0] + out.nbytes, 2 * count * columns, FLOATS,
        copied(kernel_entry("expand_rows", DTYPE), call, (matrix, record, out)),
    )  # fmt: skip


def all_cases(sizes: Sizes, formats: tuple[str, ...]) -> Iterator[Case]:
    """Every kernel; one layer of experts is in memory at a time."""
    yield from expert_cases(sizes, formats)
    yield from step_cases(sizes)
    yield from attention_cases(sizes)
    yield from key_value_cases(sizes)
    yield from router_cases(sizes)
    yield from norm_cases(sizes)
    yield from activation_cases(sizes)
    yield from linear_cases(sizes)
