"""Amounts, sizes for people, and what a config refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config import (
    UNITS,
    Amount,
    LoadConfig,
    SamplingConfig,
    ServeConfig,
    format_amount,
    options_in,
    show_bytes,
)
from greenroom.errors import BudgetError, UnknownName, UsageError

CHOICES = [
    (kind, option.name, option.metadata["choices"])
    for kind in (LoadConfig, SamplingConfig, ServeConfig)
    for option in options_in(kind)
    if option.metadata["choices"]
]


@pytest.mark.parametrize("given", ["700MiB", "4GiB", "1.5GiB", "96KiB"])
def test_an_amount_that_can_be_written_is_shown_as_it_was_given(given: str) -> None:
    most = Amount.parse(given, "--memory").of(0)
    assert format_amount(most * 9999 // 10000, most) == given


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_bytes_in_any_unit_and_case(number: int, unit: str, space: str) -> None:
    expected = Amount(nbytes=number * UNITS[unit])
    for written in (unit, unit.lower()):
        assert Amount.parse(f"{space}{number}{space}{written}", "--memory") == expected


@given(st.integers(1, 1 << 53))
def test_a_number_is_bytes_however_it_is_given(number: int) -> None:
    amount = Amount.parse(number, "--memory")
    assert amount == Amount.parse(f"{number}B", "--memory") == Amount.parse(amount, "--memory")
    assert amount.of(7) == number


@given(st.integers(1, 100), st.integers(0, 1 << 50))
def test_a_share_is_rounded_down_and_never_more_than_the_whole(percent: int, total: int) -> None:
    amount = Amount.parse(f"{percent}%", "--cache")
    assert amount.nbytes is None
    assert amount.of(total) <= total
    assert abs(amount.of(total) - total * percent / 100) <= 1
    assert Amount.parse("100%", "--cache").of(total) == total


@given(st.text(max_size=12))
def test_any_text_is_an_amount_or_a_clear_mistake(text: str) -> None:
    mistake = None
    try:
        amount = Amount.parse(text, "--cache")
        assert (amount.nbytes is None) != (amount.share is None)
    except UsageError as error:
        mistake = str(error)
    assert mistake is None or (mistake.startswith("--cache ") and "\n" not in mistake)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8 giga",
        "GiB",
        "-1GiB",
        "1e9",
        "5%%",
        "1,5GiB",
        "nan",
        True,
        "٣%",
        "３GiB",
        "1_0%",
        "²",
        "1e-3%",
        "inf",
        "inf%",
        "NaN%",
        "0x10",
        "+5%",
        "1.%",
        ".5%",
        "8GİB",
        "9" * 400 + "GiB",
    ],
)
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(UsageError, match="write bytes as 8GiB or 500MB, a share as 60%"):
        Amount.parse(text, "--memory")


@pytest.mark.parametrize("value", [0, -1, "0", "0%", "0.0GiB"])
def test_nothing_is_no_budget(value: str | int) -> None:
    with pytest.raises(BudgetError, match="--memory must be more than 0"):
        Amount.parse(value, "--memory")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (18 << 20, "18 MiB"),
        (int(3.24 * 2**30), "3.24 GiB"),
        (500 << 30, "500 GiB"),
        (2 << 40, "2 TiB"),
    ],
)
def test_sizes_for_people(size: int, shown: str) -> None:
    assert show_bytes(size) == shown


@given(st.integers(1, 1 << 50))
def test_a_shown_size_is_near_the_size(size: int) -> None:
    shown = Amount.parse(show_bytes(size), "--memory").of(0)
    assert abs(shown - size) <= 0.006 * size


@pytest.mark.parametrize(("kind", "name", "choices"), CHOICES, ids=lambda value: str(value))
def test_choices_are_taken_and_listed(
    kind: type[LoadConfig], name: str, choices: tuple[str, ...]
) -> None:
    needed = {"device": "cuda:0,cuda:1"} if name == "device_placement" else {}
    for choice in choices:
        assert getattr(kind(**{name: choice}, **needed), name) == choice  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match=f"'no such': choose one of {', '.join(choices)}"):
        kind(**{name: "no such"})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [LoadConfig, SamplingConfig])
def test_every_option_has_help_and_a_valid_default(kind: type[LoadConfig]) -> None:
    kind()
    for option in options_in(kind):
        assert option.metadata["help"]
        flag = option.default is False
        assert flag or option.metadata["metavar"] or option.metadata["choices"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_batch": 0}, "--max-batch must be at least 1, got 0"),
        ({"max_queue": -1}, "--max-queue must be at least 0, got -1"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, got 0"),
        ({"port": 70000}, "--port must be at most 65535, got 70000"),
        ({"prefill_chunk": 8193}, "--prefill-chunk must be at most 8192, got 8193"),
        ({"timeout": 0}, "--timeout must be above 0, got 0"),
        ({"timeout": float("inf")}, "--timeout must be above 0, got inf"),
        ({"grace": -1}, "--grace must be at least 0, got -1"),
        ({"kv_memory": "lots"}, "--kv-memory is 'lots': write bytes"),
        ({"prefix_share": "1GiB"}, "--prefix-share must be a share such as 50%"),
        ({"max_body": "5%"}, "--max-body must be an amount, as 4MiB"),
    ],
)
def test_a_server_refuses_impossible_options(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        ServeConfig(**wrong)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
