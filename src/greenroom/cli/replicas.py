"""The command line of several servers of one model: options beside those of each server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from greenroom.cli.options.fields import add_options, take
from greenroom.cli.options.parser import Parser
from greenroom.cli.serve import add_to, checked_name
from greenroom.config import Amount, LoadConfig, ServeConfig
from greenroom.errors import UsageError
from greenroom.option import above, at_least, check_options, option
from greenroom.server.http.keys import check_address, read_api_key


def parse_range(value: str, name: str) -> tuple[int, int]:
    """Parse `3` or `1-3` as the least and the largest number; UsageError if invalid."""
    least, _, most = value.partition("-")
    numbers = (least, most or least)
    if not all(each.isdecimal() for each in numbers) or not 1 <= int(least) <= int(numbers[1]):
        raise UsageError(f"{name} must be a number or MIN-MAX, as 3 or 1-3, got {value}")
    return int(least), int(numbers[1])


@dataclass(frozen=True)
class ReplicasConfig:
    """Options of several servers of one model."""

    address: str | None = option(
        None, "a running Ray cluster (default: RAY_ADDRESS, or a new cluster of this machine)",
        "ADDRESS", shown=True,
    )  # fmt: skip
    replicas: str = option(
        "1", "servers, at most one a node; MIN-MAX: as many as the requests need", "N|MIN-MAX",
        check=parse_range, shown=True,
    )  # fmt: skip
    target: float | None = option(
        None, "requests a replica, by which MIN-MAX is decided (default: --max-batch)", "N",
        check=above(0), shown=True,
    )  # fmt: skip
    upscale_delay: float = option(
        30.0, "seconds for which requests must be too many before replicas are added", "S",
        check=at_least(1), shown=True,
    )  # fmt: skip
    downscale_delay: float = option(
        600.0, "seconds for which requests must be few before replicas are removed", "S",
        check=at_least(1), shown=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest number of replicas."""
        return parse_range(self.replicas, "--replicas")


@dataclass(frozen=True)
class ReplicasCommand:
    """A command line that starts replicas of a server: model, options, API key."""

    model: str
    name: str
    load: LoadConfig
    serve: ServeConfig
    replicas: ReplicasConfig
    key: str | None

    @property
    def memory_bytes(self) -> int:
        """The budget of a replica in bytes; 0 if it is a share of a node's memory."""
        if self.load.memory in (None, "auto"):
            return 0
        return Amount.parse(self.load.memory, "--memory").nbytes or 0


def parse_replicas(program: str, arguments: Sequence[str]) -> ReplicasCommand:
    """Parse a command line with the options of `greenroom serve` and ReplicasConfig.

    UsageError for a wrong value.
    """
    parser = Parser(program, description="Serve a model by replicas of `greenroom serve`.")
    add_options(parser, ReplicasConfig, "replicas")
    add_to(parser)
    args: argparse.Namespace = parser.parse_args(arguments)
    load, config = take(args, LoadConfig), take(args, ServeConfig)
    name = checked_name(args.model, load, config)
    key = read_api_key(config.api_key_file)
    check_address(config.host, key)
    return ReplicasCommand(args.model, name, load, config, take(args, ReplicasConfig), key)
