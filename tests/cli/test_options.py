"""Which options the user gave, whatever their defaults are."""

from __future__ import annotations

import argparse

from greenroom.cli.options import add_options, given, take
from greenroom.config import LoadConfig


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
