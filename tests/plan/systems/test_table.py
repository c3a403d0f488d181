"""The table of named systems: every row is put together, and nothing is left out in silence."""

from __future__ import annotations

import pytest

from greenroom.config import LoadConfig
from greenroom.errors import UnknownName, UsageError
from greenroom.plan.systems.table import SYSTEMS, system, system_options, systems
from greenroom.policies import policy
from greenroom.predictors import predictor
from tests.options import needs_option

OPTIONS_OF_A_RUN = {*LoadConfig.__dataclass_fields__}
USER_OPTIONS = (
    "mixtral-offloading adapmoe moe-infinity promoe moepic pre-gated expertflow hobbit fate"
    " hybrimoe fiddler llru static greenroom"
)


def test_all_are_there():
    assert set(USER_OPTIONS.split()) == set(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_parts_of_a_row_exist(name):
    row = SYSTEMS[name]
    policy(row.policy)
    predictor(row.prefetch)
    assert row.scope in ("shared", "per-layer")
    assert row.source
    assert row.reading
    assert set(row.settings()) <= OPTIONS_OF_A_RUN


@pytest.mark.parametrize("name", [n for n in SYSTEMS if not SYSTEMS[n].parts()])
def test_rows_that_need_nothing_more_are_options_of_a_run(name):
    LoadConfig(**system_options(system(name), {}, OPTIONS_OF_A_RUN))


@pytest.mark.parametrize("name", [n for n in SYSTEMS if SYSTEMS[n].parts()])
def test_what_a_row_lacks_is_named(name):
    row = system(name)
    with pytest.raises(UsageError, match=f"^system {name} needs ") as raised:
        system_options(row, {}, set(row.settings()))
    for what in row.parts().values():
        assert what in str(raised.value)


def test_what_is_given_goes_before_the_row():
    combined = system_options(
        system("mixtral-offloading"), {"policy": "fifo", "readers": 3}, OPTIONS_OF_A_RUN
    )
    assert combined == {
        "policy": "fifo", "scope": "per-layer", "prefetch": "next-gate:1", "no_guard": True,
        "prefetch_rule": "top-k", "readers": 3,
    }  # fmt: skip
    sized = system_options(system("adapmoe"), {"scope": "4,4"}, OPTIONS_OF_A_RUN)
    assert sized["scope"] == "4,4"


@needs_option("co_compute")
@needs_option("miss_precision")
def test_parts_that_are_built_are_taken_and_what_changes_the_output_never_is():
    every = {*OPTIONS_OF_A_RUN, "co_compute", "miss_precision", "pin", "split"}
    assert system_options(system("hybrimoe"), {}, every)["co_compute"] == "auto"
    assert system_options(system("moepic"), {}, every)["split"] == "auto"
    with pytest.raises(UsageError, match=r"int4, which change the output .--miss-precision.$"):
        system_options(system("hobbit"), {}, every)
    assert system_options(system("hobbit"), {"miss_precision": "int4"}, every)["policy"] == "hobbit"
    with pytest.raises(UsageError, match="system static needs experts chosen before the run"):
        system_options(system("static"), {}, every)
    pinned = system_options(system("static"), {"pin": "hot.json"}, every)
    assert pinned["policy"] == "lru"


def test_only_greenroom_is_guarded():
    assert [n for n, row in SYSTEMS.items() if row.guard] == ["greenroom"]
    assert system_options(system("greenroom"), {}, OPTIONS_OF_A_RUN)["no_guard"] is False


def test_only_greenroom_leaves_out_what_does_not_pay():
    rules = {name: row.settings()["prefetch_rule"] for name, row in SYSTEMS.items()}
    assert {n for n, rule in rules.items() if rule == "value"} == {
        "fiddler", "llru", "static", "greenroom"
    }  # fmt: skip
    assert {n for n, rule in rules.items() if rule == "all"} == {"moepic"}


@pytest.mark.parametrize("name", [n for n, row in SYSTEMS.items() if row.prefetch != "off"])
def test_a_row_with_greenroom_differs_in_rule_and_guard_alone(name):
    if name == "greenroom":
        with pytest.raises(UsageError, match="system greenroom has them already: give greenroom"):
            system("greenroom+greenroom")
        return
    row, guarded = system(name), system(f"{name}+greenroom")
    assert guarded.name == f"{name}+greenroom"
    settings = {**row.settings(), "no_guard": False, "prefetch_rule": "value"}
    assert guarded.settings() == settings
    assert guarded.parts() == row.parts()


def test_greenroom_adds_nothing_to_a_row_without_prefetching():
    with pytest.raises(UsageError, match="but system llru prefetches nothing: give llru"):
        system("llru+greenroom")
    with pytest.raises(UnknownName, match=r"unknown system 'x.greenroom': choose one of mixtral"):
        system("x+greenroom")


def test_names():
    assert [row.name for row in systems("llru, static,llru")] == ["llru", "static"]
    with pytest.raises(UnknownName, match="unknown system 'x': choose one of mixtral-offloading"):
        systems("llru,x")
