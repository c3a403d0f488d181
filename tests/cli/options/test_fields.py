"""Options are the fields of configs: a field is all that a new one needs."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli import main
from greenroom.cli.options.fields import add_options, configured, take
from greenroom.cli.options.parser import Parser
from greenroom.config import LoadConfig, SchedulerConfig, SimulateConfig, flag, options_in
from greenroom.errors import UsageError
from greenroom.option import MACHINE, at_least, option
from greenroom.trace import save
from tests.cli.conftest import Run
from tests.sim import small


def parsed(*argv: str) -> argparse.Namespace:
    return parser_of(LoadConfig).parse_args(argv)


def test_a_default_that_is_given_counts_as_given():
    args = parsed("--scope", "shared", "--no-guard", "--readers", "3")
    assert configured(args) == {"scope": "shared", "no_guard": True, "readers": 3}
    assert take(args, LoadConfig) == LoadConfig(no_guard=True, readers=3)


def test_an_option_may_be_given_several_times() -> None:
    args = parsed("--adapter", "math=/a", "--adapter=/b/law")
    assert configured(args) == {"adapter": ("math=/a", "/b/law")}
    assert take(args, LoadConfig) == LoadConfig(adapter=("math=/a", "/b/law"))
    assert take(parsed(), LoadConfig).adapter is None


@dataclass(frozen=True, slots=True)
class MoreToLoad(LoadConfig):
    """A run with one option more: all that the command line needs to know of it is here."""

    patience: int = option(3, "how long to wait", "N", check=at_least(2), group=MACHINE, shown=True)
    hurry: bool = option(False, "do not wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreToSimulate(SimulateConfig):
    """The same of `simulate`."""

    patience: float | None = option(
        None, "how long to wait", "S", check=at_least(2), needs="machine"
    )


def test_a_new_field_is_an_option_of_a_run(
    cli: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    taken: list[Any] = []

    def run(args: argparse.Namespace, config: LoadConfig, *more: object) -> None:
        taken.append(config)
        raise UsageError("this is far enough")

    monkeypatch.setattr("greenroom.cli.run.LoadConfig", MoreToLoad)
    monkeypatch.setattr("greenroom.cli.run._run", run)
    assert "unrecognized arguments: --patienc" in cli("run", "demo", "x", "--patienc", 3).mistake
    assert "argument --patience: invalid int" in cli("run", "demo", "x", "--patience", "y").mistake
    wrong = cli("run", "demo", "x", "--patience", 1).mistake
    assert wrong.startswith("--patience must be at least 2, got 1")
    for flags in ((), ("--patience", 5), ("--patience=6", "--hurry")):
        assert "far enough" in cli("run", "demo", "x", *flags).mistake
    assert [(each.patience, each.hurry) for each in taken] == [(3, False), (5, False), (6, True)]
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    few = capfd.readouterr().out
    assert re.search(
        r"^machine:$(\n  .*)+\n  --patience N +how long to wait \(default: 3\)", few, re.M
    )
    assert "--hurry" not in few
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    assert re.search(r"^  --hurry +do not wait$", capfd.readouterr().out, re.M)


def test_a_new_field_is_an_option_of_simulate(
    cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[Any] = []

    def study_of(config: MoreToSimulate, trace: object, machine: object) -> Any:
        taken.append(config)
        raise UsageError("this is far enough")

    monkeypatch.setattr("greenroom.cli.simulate.SimulateConfig", MoreToSimulate)
    monkeypatch.setattr("greenroom.cli.simulate.profile", lambda source: None)
    monkeypatch.setattr("greenroom.sim.study.study_of", study_of)
    save(small.trace([[-4, 1, 1]]), tmp_path / "t")
    asked = ("simulate", tmp_path / "t", "--policy", "lru", "--capacity", 4)
    assert "--patience has an effect only with --machine" in cli(*asked, "--patience", 3).mistake
    timed = (*asked, "--machine", "m.json")
    assert "--patience must be at least 2, got 1.5" in cli(*timed, "--patience", 1.5).mistake
    for flags in (timed, (*timed, "--patience", 2.5)):
        assert "far enough" in cli(*flags).mistake
    assert [each.patience for each in taken] == [None, 2.5]


def test_a_run_and_simulate_have_the_same_definitions() -> None:
    ours, theirs = parser_of(LoadConfig), parser_of(SimulateConfig)
    shared = [option.name for option in options_in(SchedulerConfig)]
    assert "scope" in shared
    for name in shared:
        mine, other = (each._option_string_actions[flag(name)] for each in (ours, theirs))
        assert vars(mine) | {"container": None} == vars(other) | {"container": None}


def parser_of(config: type) -> Parser:
    parser = Parser()
    add_options(parser, config)
    return parser


def test_nothing_given_and_no_trace_of_the_call_before():
    assert configured(parsed("--readers", "3")) == {"readers": 3}
    assert configured(parsed()) == {}
    assert take(parsed(), LoadConfig) == LoadConfig()


SHOWN = {
    "run": 10, "chat": 10, "serve": 12, "bench": 11, "tune": 10, "simulate": 9, "plan": 7,
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
