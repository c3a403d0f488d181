"""The cases of all kernels but the formats, and their comparison between libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from greenroom.runtime.kernels.dense.kv_rows import FORMATS
from tests.runtime.kernels.codes import Style
from tests.runtime.kernels.native.variants import LIBRARIES, PAIR_FORMS, pair_form
from tests.runtime.kernels.toys import DTYPES
from tests.runtime.kernels.walls import bytes_of
from tests.runtime.kernels.widths import attention, dense, experts, formats, kv_rows, peaks, routers
from tests.runtime.kernels.widths.attention import KEY_HEADS, Attention, Projection
from tests.runtime.kernels.widths.experts import Kind
from tests.runtime.kernels.widths.kernel import WalledKernel, symbol_of

Check = Callable[[WalledKernel, int], Iterator[Tensor]]

# Widths in elements: remainders of a vector (16), of four and of a block of 64.
FEW = (1, 2, 15, 16, 19, 33, 66)
SMALL = (3, 16, 150)  # of experts: 150 channels are more than a thread claims at a time
ALL = (*range(1, 71), 96, 127, 128, 130, 255, 257, 600, 1100)
BLOCKS = (1, 2, 5)
ALL_BLOCKS = range(1, 71)
PAIRED = {"compute_group", "linear", "project", "project_rows", "attend", "attend_rows"}
ENCODINGS = (Style("q8_0"), Style("q4_k"), Style("mxfp4", "uint8"), Style("affine4", "float16"))


@dataclass(frozen=True)
class Case:
    """The check of a kernel at a width.

    kernel: name of the kernel without the model's type
    name:   what the width is of, or the form of the kernel's matrices
    unit:   elements of a width of 1
    few, many: widths that `make check` and `make soak` try
    typed:  does a kernel exist for each of the model's types?
    """

    kernel: str
    name: str
    check: Check
    unit: int = 1
    few: Iterable[int] = FEW
    many: Iterable[int] = ALL
    typed: bool = True

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        return DTYPES if self.typed else (None,)

    def has_pairs(self, dtype: torch.dtype | None) -> bool:
        """Does the kernel multiply pairs of bfloat16, by an instruction if there is one?"""
        return self.kernel in PAIRED and dtype is torch.bfloat16

    @property
    def symbols(self) -> set[str]:
        """The names under which libraries export the kernel."""
        return {symbol_of(self.kernel, dtype) for dtype in self.dtypes}


def encoded_cases(
    kernel: str, check: Callable[..., Iterator[Tensor]], *more: str
) -> Iterator[Case]:
    """Cases with matrices of a few encodings.

    more: native, precise or rounded (matrix.py), for a `check` that takes it
    """
    for style in ENCODINGS:
        unit = formats.unit_of(style)
        few = BLOCKS if unit < 256 else BLOCKS[:2]
        name, arguments = "-".join((str(style), *more)), (style, *more)
        run = lambda k, n, a=arguments: check(k, n, *a)  # noqa: E731
        yield Case(kernel, name, run, unit, few, ALL_BLOCKS)


def group_cases() -> Iterator[Case]:
    """Cases of experts: plain ones of any size, encoded ones with many inputs of either matrix."""
    for tokens, narrow in ((1, True), (1, False), (5, False), (13, False), (5, True), (60, True)):
        form = f"{tokens}-token{'s' * (tokens > 1)}{'-narrow' * narrow}"
        for kind in experts.KINDS:
            if narrow and tokens > 1 and kind.transposed:
                continue
            yield Case("compute_group", f"{kind.name}-{form}", PlainExperts(kind, tokens, narrow),
                       few=SMALL)  # fmt: skip
        encoded = narrow == (tokens == 1)  # several rows are packed before
        for kind in experts.ENCODED_KINDS if encoded else ():
            for side in ("hidden", "inner"):
                check = EncodedExperts(kind, tokens, narrow, side == "hidden")
                few = (5,) if check.unit < 256 else (1,)
                name = f"{kind.name}-{side}-{form}"
                yield Case("compute_group", name, check, check.unit, few, ALL_BLOCKS)


@dataclass(frozen=True)
class PlainExperts:
    """The check of experts with hidden states of a width, and some more channels."""

    kind: Kind
    tokens: int
    narrow: bool

    def __call__(self, kernel: WalledKernel, n: int) -> Iterator[Tensor]:
        return experts.check_group(kernel, n, n + 5, self.kind, self.tokens, self.narrow)


@dataclass(frozen=True)
class EncodedExperts(PlainExperts):
    """The check of encoded experts with either many hidden states or many channels."""

    is_hidden: bool

    @property
    def unit(self) -> int:
        return max(formats.unit_of(style) for style in (self.kind.up, self.kind.down) if style)

    def __call__(self, kernel: WalledKernel, n: int) -> Iterator[Tensor]:
        other = max(64, self.unit)
        sizes = (n, other) if self.is_hidden else (other, n)
        return experts.check_group(kernel, *sizes, self.kind, self.tokens, self.narrow)


def project_cases(kernel: str, check: Callable[..., Iterator[Tensor]]) -> Iterator[Case]:
    """Cases of projections, with and without norms."""
    yield Case(kernel, "hidden", lambda k, n: check(k, Projection(k, n, 12, 6, 0)))
    yield Case(kernel, "width", lambda k, n: check(k, styled_projection(k, n)))
    make = lambda k, n, *encoding: check(k, Projection(k, n, 20, 20, None, *encoding))  # noqa: E731
    yield from encoded_cases(kernel, make)
    yield from encoded_cases(kernel, make, "rounded")


def styled_projection(kernel: WalledKernel, n: int) -> Projection:
    """A projection to heads of a width, with each style of norms in turn."""
    return Projection(kernel, 19, n, n - n % 2, (None, 0, 1, 2)[n % 4])


def attend_cases(kernel: str, check: Callable[..., Iterator[Tensor]]) -> Iterator[Case]:
    """Cases of attention: tokens, outputs, and widths of heads, which are whole vectors."""
    yield Case(kernel, "context", lambda k, n: check(k, Attention(k, 16, 2, 70), n))
    yield Case(kernel, "context-many-queries", lambda k, n: check(k, Attention(k, 16, 9, 7), n))
    yield Case(kernel, "outputs", lambda k, n: check(k, Attention(k, 16, 3, n), 5))
    heads = lambda k, n: check(k, Attention(k, n, 1, 7), 5)  # noqa: E731
    yield Case(kernel, "width", heads, 16, BLOCKS, ALL_BLOCKS)
    for form in FORMATS.values():
        tokens = lambda k, n, f=form: check(k, Attention(k, 16, 2, 7, form=f), n)  # noqa: E731
        yield Case(kernel, f"context-{form.name}", tokens)
        heads = lambda k, n, f=form: check(k, Attention(k, n, 2, 7, form=f), 5)  # noqa: E731
        yield Case(kernel, f"width-{form.name}", heads, 16, BLOCKS, ALL_BLOCKS)
    make = lambda k, n, *encoding: check(  # noqa: E731
        k, Attention(k, n // KEY_HEADS, 1, 70, *encoding), 3
    )
    yield from encoded_cases(kernel, make)
    yield from encoded_cases(kernel, make, "rounded")


DISTINCT = (*range(1, 71), 128, 130, 255)  # so many numbers / 8 are distinct in bfloat16

CASES = (
    Case("linear", "inputs", lambda k, n: dense.check_linear(k, n, 70)),
    Case("linear", "outputs", lambda k, n: dense.check_linear(k, 19, n)),
    *encoded_cases("linear", dense.check_encoded_linear),
    *encoded_cases("expand_rows", dense.check_expand),
    Case("pack_rows", "columns", dense.check_pack, 32, BLOCKS, ALL_BLOCKS, typed=False),
    Case("pack_keys_values", "width", kv_rows.check_pack),
    Case("expand_keys_values", "width", kv_rows.check_expand),
    Case("add_and_norm", "columns", dense.check_norm),
    Case("add_and_norm_rows", "columns", dense.check_norm_rows),
    Case("activate", "columns", dense.check_activation),
    Case("test_exponentials", "length", dense.check_exponentials),
    *project_cases("project", attention.check_project),
    *project_cases("project_rows", attention.check_project_rows),
    *attend_cases("attend", attention.check_attend),
    *attend_cases("attend_rows", attention.check_attend_rows),
    *group_cases(),
    Case("sum_experts", "hidden", experts.check_sum),
    Case("select", "experts", routers.check_select, many=DISTINCT),
    Case("select_rows", "experts", routers.check_select_rows, many=DISTINCT),
    Case("find_slots", "choices", routers.check_find_slots, typed=False),
    Case("copy_calls", "length", routers.check_copies, typed=False),
    Case("run_stages", "count", routers.check_stages, many=range(1, 71), typed=False),
    Case("read_memory", "bytes", peaks.check_read, 64, typed=False),
    *(
        Case(
            f"multiply_{kind}",
            "units",
            peaks.check_multiply,
            few=(1, 2),
            many=(1, 2, 3),
            typed=False,
        )
        for kind in ("floats", "bytes")
    ),
    Case("run_measured", "length", routers.check_measured, typed=False),
    Case("test_await", "amount", routers.check_await, typed=False),
    Case("test_count", "counter", routers.check_count, typed=False),
)


def check_few(case: Case) -> None:
    """Run a case at a few widths, the last one also with walls before the arrays."""
    for width in case.few:
        check_case(case, width)
    check_case(case, width, at_end=False)


def check_case(case: Case, width: int, at_end: bool = True) -> None:
    """Run a kernel of all libraries at a width, and compare the libraries bit for bit."""
    for dtype in case.dtypes:
        found = []
        for of, form in product(LIBRARIES, (True, False)):
            if form not in PAIR_FORMS[of.variant] or (form and not case.has_pairs(dtype)):
                continue
            with pair_form(of, form):
                kernel = WalledKernel(of, case.kernel, dtype, at_end)
                results = case.check(kernel, width * case.unit)
                found.append([bytes_of(each).tobytes() for each in results])
            assert kernel.has_clean_margins(), (str(case), width, dtype)
        first, *others = found
        assert first
        assert all(first == other for other in others), (str(case), width, dtype)
