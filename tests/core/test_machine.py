from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.cost import Link
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.errors import ProfileError, UnknownName, UsageError

EXPERT = Table((100, 300), (1, 10), ((1.0, 2.0), (2.0, 6.0)))
DENSE = Table((100,), (1,), ((0.5,),))
DISK, BUS = Link(10.0, 0.1, 4), Link(100.0, 0.01, 2)
MACHINE = Machine(
    (Route("disk", "host", DISK), Route("host", "device", BUS)),
    (Processor("cpu", "host", EXPERT, DENSE), Processor("gpu", "device", DENSE, DENSE)),
    {"cpu": "a test's"},
)


def test_times_are_interpolated_between_measured_sizes():
    """Times are linear between measured sizes, and in proportion beyond them."""
    times = {nbytes: EXPERT.at(nbytes).points for nbytes in (50, 100, 200, 300, 600)}
    assert times == {
        50: ((1, 0.5), (10, 1.0)),
        100: ((1, 1.0), (10, 2.0)),
        200: ((1, 1.5), (10, 4.0)),
        300: ((1, 2.0), (10, 6.0)),
        600: ((1, 4.0), (10, 12.0)),
    }
    assert EXPERT.at(0).seconds(5) == 0


def test_costs_follow_the_links_from_the_store_to_the_processor():
    assert MACHINE.costs(100).links == (DISK,)
    assert MACHINE.costs(100, processor="gpu").links == (DISK, BUS)
    assert MACHINE.costs(100, processor="gpu", store="host").links == (BUS,)
    costs = MACHINE.costs(300, 200)
    assert (costs.lanes, costs.expert.seconds(10), costs.dense.seconds(1)) == ((4,), 6.0, 1.0)
    assert MACHINE.costs(300).dense.seconds(1) == 0


def test_unknown_names_and_missing_links_are_named():
    with pytest.raises(UnknownName, match="unknown processor 'tpu': choose one of cpu, gpu"):
        MACHINE.costs(1, processor="tpu")
    with pytest.raises(UnknownName, match="unknown store 'tape': choose one of device, disk, host"):
        MACHINE.costs(1, store="tape")
    with pytest.raises(UsageError, match="no link leads from device to host"):
        MACHINE.costs(1, store="device")
    with pytest.raises(UsageError, match="--store host is the memory of the processor itself"):
        MACHINE.costs(1, store="host")


def test_a_profile_survives_its_file(tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MACHINE.as_json()))
    assert Machine.load(path) == MACHINE


def test_links_in_a_circle_are_refused(tmp_path: Path):
    circle = Machine((Route("a", "b", DISK), Route("b", "a", BUS)), MACHINE.processors)
    with pytest.raises(UsageError, match="no link leads from a to host"):
        circle.path("a", "host")


def changed(*path: str | int, to: Any) -> str:
    fields = copy.deepcopy(MACHINE.as_json())
    place: Any = fields
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(fields)


DAMAGE = {
    "{": "it is not JSON",
    "[]": "no machine profile: greenroom doctor -o makes such files",
    changed("format", to="other"): "no machine profile",
    changed("version", to=9): "version 9, this Greenroom reads version 1: measure again",
    changed("version", to=None): "version None",
    changed("links", to=None): "links is missing",
    changed("links", to=[]): "must have at least one entry each",
    changed("links", 0, "lanes", to=0): "lanes must be a whole number from 1 to 1024, got 0",
    changed("links", 0, "bandwidth", to=0): "bandwidth must be more than 0",
    changed("links", 0, "bandwidth", to=float("nan")): "NaN is not a number in JSON",
    changed("links", 0, "latency", to="1s"): "latency must be a number from 0, got '1s'",
    changed(
        "processors", 0, "expert", "seconds", to=[[1]]
    ): "seconds must have 2 rows, one for each of nbytes, of 2 numbers",
    changed(
        "processors", 0, "expert", "tokens", to=[10, 1]
    ): "tokens must be a list of whole numbers of at least 1",
    changed("processors", 0, "expert", to=3): "damaged",
}


@pytest.mark.parametrize("text", DAMAGE)
def test_damage_is_one_clear_line(tmp_path: Path, text: str):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        Machine.load(path)
    assert DAMAGE[text] in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_profile_is_an_error(tmp_path: Path):
    with pytest.raises(ProfileError, match="No such file"):
        Machine.load(tmp_path / "none.json")
