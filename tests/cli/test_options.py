"""Which options the user gave, whatever their defaults are."""

from __future__ import annotations

import argparse
import re

import pytest

from greenroom.cli import main
from greenroom.cli.options import add_options, given, take
from greenroom.config import LoadConfig
from tests.cli.conftest import Run


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, LoadConfig, "memory")
    return parser.parse_args(argv)


def test_a_default_that_is_given_counts_as_given():
    args = parsed("--scope", "shared", "--no-guard", "--readers", "3")
    assert given(args) == {"scope": "shared", "no_guard": True, "readers": 3}
    assert take(args, LoadConfig) == LoadConfig(no_guard=True, readers=3)


def test_nothing_given_and_no_trace_of_the_call_before():
    assert given(parsed("--readers", "3")) == {"readers": 3}
    assert given(parsed()) == {}
    assert take(parsed(), LoadConfig) == LoadConfig()


SHOWN = {
    "run": 8, "chat": 8, "serve": 8, "bench": 8, "tune": 8, "simulate": 9, "plan": 7,
}  # fmt: skip


@pytest.mark.parametrize("command", SHOWN)
def test_help_shows_the_options_that_people_use_and_all_when_asked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def options(flag: str) -> set[str]:
        with pytest.raises(SystemExit) as left:
            main([command, flag])
        assert left.value.code == 0
        return set(re.findall(r"^  (?:-o FILE, |-h, )?(--[a-z-]+)", capsys.readouterr().out, re.M))

    few, every = options("--help"), options("--help-all")
    assert len(few - {"--help", "--help-all"}) == SHOWN[command]
    assert few < every
    assert "--policy" in every or command == "plan"


def test_an_option_that_help_hides_works(cli: Run) -> None:
    assert "--readers must be at least 1" in cli("run", "demo", "x", "--readers", 0).mistake
