"""Groups of experts and sums over experts at one width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.activation import (
    CLAMPED,
    FORMULAS,
    RAW,
    RELU2,
    SILU,
    SILU_FLOAT,
    Activation,
)
from greenroom.runtime.kernels.cpu_layer import SCRATCH_BYTES
from greenroom.runtime.kernels.matrix import format_name, format_symbol
from greenroom.runtime.kernels.routing import Routing
from tests.runtime.kernels.codes import Style, planes_of, tensors_of
from tests.runtime.kernels.packed import GROUP, LARGEST, pack, rounded, unpack
from tests.runtime.kernels.walls import PAGE
from tests.runtime.kernels.widths.formats import layout_of, spec_of
from tests.runtime.kernels.widths.kernel import WalledKernel, is_near, is_untouched

EXPERTS, TOP_K = 3, 2
SLOTS = (4, 1, 2)  # of the experts
ERROR = 1e-5  # of a product of a row and inputs of length 1
NEAR = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 4e-6}


@dataclass(frozen=True)
class Kind:
    """The form of a layer's experts.

    up, second, down: the encodings of matrices, None for plain ones; `second` is that of the
                      up projection, if it is another than the gate projection's
    kernels: native, precise or rounded
    """

    name: str
    code: int = SILU
    interleaved: bool = False
    transposed: bool = False
    biased: bool = False
    up: Style | None = None
    second: Style | None = None
    down: Style | None = None
    kernels: str = "native"

    @property
    def activation(self) -> Activation:
        limited = self.code == CLAMPED
        return Activation(self.code, 7.0, 1.702) if limited else Activation(self.code)

    def planes(self, style: Style | None) -> int:
        return planes_of(style, self.kernels) if style else 0

    @property
    def has_gate(self) -> bool:
        return self.code != RELU2


Q8, Q4, MXFP4 = Style("q8_0"), Style("q4_0"), Style("mxfp4", "uint8")
AFFINE = Style("affine4", "float16")
BF12 = Style("bf12", share=(1, 1 << 20))
KINDS = (
    Kind("relu2", RELU2),
    Kind("silu", SILU, biased=True),
    Kind("raw", RAW, interleaved=True, biased=True),
    Kind("silu-float-transposed", SILU_FLOAT, transposed=True),
    Kind("clamped-transposed", CLAMPED, interleaved=True, transposed=True, biased=True),
)
ENCODED_KINDS = (
    Kind("q8_0", up=Q8, down=Q8),
    Kind("q8_0+q4_0", up=Q8, second=Q4, down=Q4),
    Kind("affine4", RELU2, up=AFFINE, down=AFFINE),
    Kind("mxfp4-interleaved", CLAMPED, interleaved=True, biased=True, up=MXFP4, down=MXFP4),
    Kind("q4_0-rounded", up=Q4, down=Q4, kernels="rounded"),
    Kind("q4_0-precise", up=Q4, down=Q4, kernels="precise"),
    Kind("bf12", up=BF12, down=BF12, kernels="rounded"),
    Kind("q4_k", up=Style("q4_k"), down=Style("q6_k")),
)


class ExpertMatrices:
    """One matrix [outputs, inputs] of each expert."""

    def __init__(self, style: Style | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
        random = np.random.default_rng(shape)
        self.style, self.shape = style, shape
        if style is None:
            drawn = random.integers(-1, 2, (EXPERTS, *shape))
            self.parts = [{"w": torch.from_numpy(each).to(dtype)} for each in drawn]
        else:
            self.parts = [tensors_of(style, "w", shape, random) for _ in range(EXPERTS)]
        largest = max(part.nbytes for part in self.parts[0].values())
        self.stride = (-(-largest // PAGE) + 1) * PAGE  # of slots, with a page between them

    def weights(self, decoded: torch.dtype) -> Tensor:
        """The matrices in float64, after decoding to a type."""
        if self.style is None:
            return torch.stack([parts["w"] for parts in self.parts]).double()
        decode = ENCODINGS[self.style.name].decode
        each = [decode([*parts.values()], self.shape, decoded) for parts in self.parts]
        return torch.stack(each).double()

    def place(self, kernel: WalledKernel, stride: int, kind: Kind, first: int = 0) -> Any:
        """Place each part in slots of its own, and make the description that kernels read.

        first: the number that kernels give to the first row
        """
        stored = [
            [part.T if kind.transposed else part for part in each.values()] for each in self.parts
        ]
        addresses = [
            kernel.place_in_slots(parts, SLOTS, stride) for parts in zip(*stored, strict=True)
        ]
        if self.style is None:
            return kernel.structure("ExpertMatrix", offset=addresses[0])
        spec = spec_of(self.style, self.parts[0])
        decoded = kernel.dtype if kind.kernels == "rounded" else None
        symbol = format_symbol(format_name(spec), decoded)
        symbol += "_precise" * (kind.kernels == "precise")
        layout = kernel.place_structures([layout_of(kernel.of, spec, addresses, first)])
        return kernel.structure("ExpertMatrix", format=kernel.of.address(symbol), layout=layout)


class Layer:
    """A layer of experts."""

    def __init__(self, kind: Kind, dtype: torch.dtype, hidden: int, inner: int) -> None:
        self.kind, self.dtype, self.hidden, self.inner = kind, dtype, hidden, inner
        self.width = 2 * inner if kind.has_gate else inner
        self.rounds = kind.code != RAW
        self.up = [ExpertMatrices(kind.up, (inner if kind.second else self.width, hidden), dtype)]
        if kind.second:
            self.up.append(ExpertMatrices(kind.second, (inner, hidden), dtype))
        self.down = ExpertMatrices(kind.down, (hidden, inner), dtype)
        decoded = dtype if kind.kernels == "rounded" else torch.float32
        self.up_weights = torch.cat([each.weights(decoded) for each in self.up], 1)
        self.down_weights = self.down.weights(decoded)
        drawn = np.random.default_rng(inner).integers(-2, 3, (EXPERTS, self.width))
        self.bias = torch.from_numpy(drawn).to(dtype) if kind.biased else None
        self.up_planes, self.down_planes = kind.planes(kind.up), kind.planes(kind.down)
        self.multiplies_pairs = dtype is torch.bfloat16 and not (kind.up or kind.transposed)

    def place(self, kernel: WalledKernel) -> int:
        """Place the layer's weights, and return the address of its description."""
        kind, stride = self.kind, max(each.stride for each in (*self.up, self.down))
        up = self.up[0].place(kernel, stride, kind)
        layer = kernel.structure(
            "ExpertLayer", slot_bytes=stride, up=up, down=self.down.place(kernel, stride, kind),
            second=self.up[1].place(kernel, stride, kind, self.inner) if kind.second else up,
            hidden=self.hidden, inner=self.inner, width=self.width, rounds=self.rounds,
            interleaved=kind.interleaved, transposed=kind.transposed, bias=kernel.place(self.bias),
        )  # fmt: skip
        for name in ("code", "limit", "alpha"):
            setattr(layer.activation, name, getattr(kind.activation, name))
        return kernel.place_structures([layer])

    def activate(self, mid: Tensor) -> Tensor:
        """The activations of up projections, in the model's type, or numbers in their place."""
        mid = mid.to(self.dtype)
        if self.kind.code == RAW:
            return mid[:, : self.inner].clamp(-3, 3)
        if not self.kind.has_gate:
            gate = up = mid
        elif self.kind.interleaved:
            gate, up = mid[:, ::2], mid[:, 1::2]
        else:
            gate, up = mid.chunk(2, 1)
        return FORMULAS[self.kind.code](self.kind.activation, gate, up)


_layer = lru_cache(maxsize=3)(Layer)  # of each type: libraries and walls follow one another


class Group:
    """A group of the experts that some tokens have chosen, and memory for its results."""

    def __init__(self, kernel: WalledKernel, layer: Layer, tokens: int, narrow: bool) -> None:
        self.kernel, self.layer = kernel, layer
        narrow = narrow and (tokens == 1 or layer.multiplies_pairs)
        index = np.stack(
            [np.random.default_rng(t).permutation(EXPERTS)[:TOP_K] for t in range(tokens)]
        )
        routing = self.routing = Routing.of(index, EXPERTS)
        x = self.x = kernel.integers(tokens, layer.hidden, most=1)
        # The first expert is left out if there are several tokens.
        self.experts = routing.experts[::-1] if tokens == 1 else routing.experts[:0:-1]
        lists = (
            torch.from_numpy(self.experts.copy()),
            torch.tensor([SLOTS[e] for e in self.experts]),
        )
        need = SCRATCH_BYTES(kernel.of.address("expert_scratch_bytes"))(layer.hidden, layer.inner)
        self.fields: dict[str, int] = {
            "layer": layer.place(kernel),
            "routing": place_routing(kernel, routing),
            "x": kernel.place(x if narrow else x.float()),
            "packed": 0,
            "narrow": narrow,
            "pairs": kernel.dtype is torch.bfloat16 and (narrow or tokens > 3),
            "scratch_bytes": need,
            "count": len(self.experts),
            "experts": kernel.place(lists[0]),
            "slots": kernel.place(lists[1]),
        }

        if layer.up_planes and not narrow:
            self.fields["packed"] = kernel.place(pack(x, layer.up_planes))

    def allocate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for the up projections, the activations and the outputs."""
        entries, layer = len(self.routing.rows), self.layer
        sizes = (entries, layer.width), (entries, layer.inner), (len(self.x) * TOP_K, layer.hidden)
        return tuple(self.kernel.allocate(*size) for size in sizes)

    def compute(self, memory: Sequence[Tensor], sequential: int, **fields: int) -> None:
        kernel = self.kernel
        mid, act, out = (each.data_ptr() for each in memory)
        finished = kernel.allocate(len(self.experts), dtype=torch.int64).zero_()
        kernel.call(
            "GroupCall", **self.fields, **fields, mid=mid, act=act, out=out,
            finished=finished.data_ptr(), scratch=kernel.scratch(self.fields["scratch_bytes"]),
            sequential_rows=sequential,
        )  # fmt: skip

    def compare_up(self, mid: Tensor, act: Tensor) -> None:
        """Compare the up projections with exact ones, and the activations with torch's of these."""
        routing, layer = self.routing, self.layer
        for expert in routing.experts:
            at = routing.entries(int(expert))
            if expert not in self.experts:
                assert is_untouched(mid[at])
                assert is_untouched(act[at])
                continue
            x = rounded(self.x[torch.from_numpy(routing.tokens[at])], layer.up_planes)
            weights = layer.up_weights[expert]
            want = (x @ weights.T).float()
            want = want.to(layer.dtype) if layer.rounds else want
            if layer.bias is not None:
                want = want + layer.bias[expert]
            if layer.kind.up is None:
                assert torch.equal(mid[at], want.float())
            else:
                slack = ERROR * x.norm(dim=1, keepdim=True) * weights.norm(dim=1)
                near = 4 * torch.finfo(layer.dtype).eps
                assert is_near(mid[at], want, near, slack + near * want.abs().max())
            if layer.kind.code != RAW:
                self.compare_activations(layer.activate(mid[at]), act[at])

    def compare_activations(self, want: Tensor, got: Tensor) -> None:
        """Compare activations with torch's; packed ones were rounded to steps of their group."""
        layer, planes = self.layer, self.layer.down_planes
        assert planes or torch.equal(got.to(layer.dtype).float(), got)
        steps = torch.zeros(1)
        if planes:
            largest = want.abs().unflatten(1, (-1, GROUP)).amax(2).repeat_interleave(GROUP, 1)
            steps = largest.double() / LARGEST[planes]
        assert is_near(unpack(got, planes), want, NEAR[layer.dtype], 1.01 * steps + 1e-30)

    def compare_down(self, act: Tensor, out: Tensor, factor: int = 1) -> None:
        """Compare the outputs with products of the activations."""
        routing, layer = self.routing, self.layer
        for expert in routing.experts:
            at = routing.entries(int(expert))
            got = out[torch.from_numpy(routing.rows[at])]
            if expert not in self.experts:
                assert is_untouched(got)
                continue
            x, weights = unpack(act[at], layer.down_planes), layer.down_weights[expert]
            slack = factor * ERROR * x.norm(dim=1, keepdim=True) * weights.norm(dim=1)
            assert is_near(got, factor * (x @ weights.T), 0, slack)


def place_routing(kernel: WalledKernel, routing: Routing) -> int:
    names = ("experts", "starts", "tokens", "rows")
    arrays = {name: torch.from_numpy(getattr(routing, name).copy()) for name in names}
    places = {name: kernel.place(each) for name, each in arrays.items()}
    routed = kernel.structure("Routing", count=len(routing.experts), **places)
    return kernel.place_structures([routed])


def check_group(
    kernel: WalledKernel, hidden: int, inner: int, kind: Kind, tokens: int, narrow: bool = False
) -> Iterator[Tensor]:
    """The up projection, the down projection, this added to its result, and both at once."""
    layer = _layer(kind, kernel.dtype, hidden, inner)
    group = Group(kernel, layer, tokens, narrow)
    for sequential in (0,) if kind.up is None else (0, tokens):
        mid, act, out = memory = group.allocate()
        group.compute(memory, sequential, up=1)
        assert is_untouched(out)
        group.compare_up(mid, act)
        if kind.code == RAW:
            assert is_untouched(act)
            for expert in group.experts:
                at = group.routing.entries(int(expert))
                act[at] = layer.activate(mid[at]).float()
        yield from (mid, act)
        group.compute(memory, sequential, down=1)
        group.compare_down(act, out)
        separate = out.clone()
        yield separate
        group.compute(memory, sequential, down=1, accumulate=1)
        group.compare_down(act, out, 2)
        yield out
        if kind.code != RAW:
            both = group.allocate()
            group.compute(both, sequential, up=1, down=1)
            for got, want in zip(both, (mid, act, separate), strict=True):
                assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def check_sum(kernel: WalledKernel, hidden: int) -> Iterator[Tensor]:
    """Sums of outputs times gate weights, in each order of rounding: the same bits."""
    index = np.array([[2, 0], [0, 2], [1, EXPERTS]])  # the last is of another process
    routing, tokens, dtype = Routing.of(index, EXPERTS), len(index), kernel.dtype
    outputs, bias = (
        kernel.normals(tokens * TOP_K, hidden).float() / 3,
        kernel.normals(EXPERTS, hidden),
    )
    gates, placed = kernel.normals(tokens * TOP_K), place_routing(kernel, routing)
    roundings = ((1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 0, 0))
    for (rounds, product_rounds, sum_rounds), narrow, biased in product(
        roundings, (True, False), (True, False)
    ):
        y = kernel.allocate(tokens * TOP_K, hidden).copy_(outputs)
        sums, result = kernel.allocate(tokens, hidden), kernel.allocate(tokens, hidden, dtype=dtype)
        weights = gates if narrow else gates.float() / 3
        kernel.call(
            "SumCall", routing=placed, tokens=tokens, hidden=hidden, outputs=y.data_ptr(),
            bias=kernel.place(bias) if biased else 0, weights=kernel.place(weights),
            narrow=narrow, rounds=rounds, round_product=product_rounds, round_sum=sum_rounds,
            sums=sums.data_ptr(), result=result.data_ptr(),
        )  # fmt: skip
        want_y, want = outputs.clone(), torch.zeros(tokens, hidden)
        for i, expert in enumerate(routing.experts):
            for j in range(routing.starts[i], routing.starts[i + 1]):
                token, row = routing.tokens[j], routing.rows[j]
                h = outputs[row].to(dtype) if rounds else outputs[row]
                h = want_y[row] = (h + bias[expert] if biased else h).float()
                term = h * weights[row].float()
                term = term.to(dtype).float() if product_rounds else term
                total = want[token] + term
                want[token] = total.to(dtype).float() if sum_rounds else total
        assert torch.equal(y, want_y)
        assert torch.equal(sums, want)
        assert torch.equal(result, want.to(dtype))
        yield from (y, result)
