"""Profiles of predicted machines: rates by hand, and the file that other commands read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.core.cost import Link
from greenroom.core.machine import Machine
from greenroom.plan.cards import host_work
from greenroom.plan.cards.machine import (
    BALANCE,
    COMPUTE_SHARE,
    MEMORY_SHARE,
    PCIE_SHARE,
    Host,
    card_costs,
    predict_machine,
)
from greenroom.plan.cards.table import Pcie, find_card

DISK = Link(5e9, 1e-4, 4)
HOST = Host(64 << 30, 60e9, DISK)


def test_rates_are_shares_of_the_data_sheet() -> None:
    card = find_card("4090")
    machine = predict_machine(card, HOST)
    costs = machine.costs(10_000_000, 20_000_000, processor="gpu")
    assert costs.links == (DISK, costs.links[1])
    assert costs.links[1].bandwidth == pytest.approx(PCIE_SHARE * 31.504e9)
    read = 10_000_000 / (MEMORY_SHARE * 1008e9)
    assert costs.expert.seconds(1) == pytest.approx(read)
    assert costs.dense.seconds(1) == pytest.approx(2 * read + host_work.LAYER + host_work.HIT)
    assert costs.host is not None
    assert costs.host.seconds(1) == pytest.approx(10_000_000 / 60e9)


def test_what_the_host_does_is_in_the_profile() -> None:
    costs = predict_machine(find_card("4090"), HOST).costs(1000, processor="gpu")
    assert (costs.handling, costs.miss, costs.hop) == (
        host_work.FETCH, host_work.MISS, host_work.HOP,
    )  # fmt: skip
    assert 0 < host_work.GRAPH_LAYER < host_work.HIT < host_work.MISS < host_work.LAYER


def test_costs_of_a_card_alone_are_those_of_its_profile() -> None:
    machine = predict_machine(find_card("4090"), HOST)
    whole = machine.costs(10_000_000, processor="gpu", store="host")
    assert card_costs(find_card("4090"), 10_000_000) == replace(whole, host=None)


def test_many_tokens_take_the_time_of_their_products() -> None:
    """A weight of two bytes is multiplied and added once for each token."""
    costs = predict_machine(find_card("4090"), HOST).costs(10_000_000, processor="gpu")
    tokens, few = 4096, 16
    products = 2 * (10_000_000 / 2) * tokens
    assert costs.expert.seconds(tokens) == pytest.approx(
        products / (COMPUTE_SHARE * 165.2e12), rel=0.01
    )
    assert costs.expert.seconds(few) == costs.expert.seconds(1)
    assert costs.host is not None
    assert costs.host.seconds(BALANCE) == costs.host.seconds(1)
    assert costs.host.seconds(4 * BALANCE) == pytest.approx(4 * costs.host.seconds(1))


def test_a_card_without_bfloat16_computes_in_float16() -> None:
    t4 = predict_machine(find_card("t4"), HOST).costs(1 << 20, processor="gpu").expert
    assert t4.seconds(10_000) == pytest.approx(10_000 * (1 << 20) / (COMPUTE_SHARE * 65e12), 0.01)


def test_a_slower_slot_makes_the_link_slower() -> None:
    slow = Host(64 << 30, 60e9, DISK, Pcie(3, 8))
    links = [predict_machine(find_card("4090"), host).routes[1].link for host in (HOST, slow)]
    assert links[0].bandwidth == pytest.approx(4 * links[1].bandwidth, rel=0.01)


def test_the_profile_is_one_that_other_commands_read(tmp_path: Path) -> None:
    machine = predict_machine(find_card("h100 sxm"), HOST)
    (tmp_path / "m.json").write_text(json.dumps(machine.as_json()))
    assert Machine.load(tmp_path / "m.json") == machine
