"""The command line of several servers: options that exclude each other are refused at once."""

from __future__ import annotations

import pytest

from greenroom.cli.replicas import parse_replicas
from greenroom.errors import UsageError
from tests.options import needs_option


def test_a_command_line_has_the_options_of_servers_and_of_replicas() -> None:
    command = parse_replicas("ray.py", ["demo", "--replicas", "1-3", "--adapter", "math=here"])
    assert (command.name, command.replicas.bounds) == ("demo", (1, 3))
    assert command.load.adapter == ("math=here",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter", "demo=here"], "the model has this name"),
        (["--adapter", "here", "--split", "auto"], "--split cannot be used with --adapter"),
        pytest.param(
            ["--batch-invariant", "--skip-below", "0.1"],
            "leave out --batch-invariant",
            marks=needs_option("precision"),
        ),
        (["--replicas", "3-1"], "--replicas must be a number or MIN-MAX"),
    ],
)
def test_options_that_exclude_each_other(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_replicas("ray.py", ["demo", *options])
