"""Tests of the argument parser of all commands."""

from __future__ import annotations

import pytest

from greenroom.cli import parser
from greenroom.errors import UsageError


@pytest.mark.parametrize(
    "words",
    [
        "run MODEL TEXT --memory 1GB",
        "run MODEL --memory 1GB TEXT",
        "run --memory 1GB MODEL TEXT",
        "run --memory 1GB MODEL --raw TEXT",
    ],
)
def test_a_prompt_may_stand_before_and_after_options(words: str) -> None:
    args = parser().parse_args(words.split())
    assert (args.model, args.prompt, args.memory) == ("MODEL", "TEXT", "1GB")


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        ("run MODEL --raw TEXT MORE", "MORE"),
        ("run MODEL TEXT --raw MORE", "MORE"),
        ("run MODEL --raw --red TEXT", "--red TEXT"),
        ("models --moe TEXT", "--moe TEXT"),
    ],
)
def test_other_words_are_named(words: str, unknown: str) -> None:
    with pytest.raises(UsageError, match=f"unrecognized arguments: {unknown} "):
        parser().parse_args(words.split())
