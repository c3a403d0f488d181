"""Machine profiles predicted from data sheets: a graphics card in a host of given speeds.

No part of them is measured on that machine. docs/planning.md has the sources of the shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.plan.cards import host_work
from greenroom.plan.cards.table import Card, Pcie

# Shares of a data sheet's rate that programs reach.
MEMORY_SHARE = 0.7  # of a card's memory: decoding of dense models, whose weights are read once
HOST_SHARE = 0.75  # of the host's memory
PCIE_SHARE = 0.75  # of the link to a card, from pinned memory
COMPUTE_SHARE = 0.5  # of products of 16 bits
BALANCE = 16  # tokens that a host's processor computes in the time of reading their weights
LATENCY = 10e-6  # seconds, of a copy to a card
LANES = 2  # copies to a card under way, as in a run
UNIT = 1 << 20  # bytes of weights in tables, whose times are in proportion to the bytes


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that a graphics card sits in.

    memory:    bytes of main memory
    bandwidth: bytes a second that programs read from it
    disk:      link from the disk to main memory
    slot:      the card's slot; None if it is as fast as the card
    """

    memory: int
    bandwidth: float
    disk: Link
    slot: Pcie | None = None


def predict_machine(card: Card, host: Host) -> Machine:
    """Build the profile of a machine with a graphics card from data sheets."""
    on_host = _roofline(host.bandwidth, BALANCE)
    memory = MEMORY_SHARE * card.bandwidth
    return Machine(
        (Route("disk", "host", host.disk), Route("host", "device", _link(card, host.slot))),
        (Processor("cpu", "host", on_host, on_host), _processor(card)),
        {"cpu": f"predicted host of a {card.name}", "memory_bytes": host.memory},
        {
            "predicted": True,
            "device": {"name": card.name, "memory_bytes": card.memory, "memory": memory},
        },
    )


def card_costs(card: Card, expert_bytes: int) -> Costs:
    """Predict the costs of a model's experts on a card, from main memory."""
    gpu = _processor(card)
    return Costs(
        (_link(card, None),), gpu.expert.at(expert_bytes), Work.constant(gpu.layer), gpu.fetch,
        hop=gpu.hop, miss=gpu.miss, shared_miss=gpu.shared_miss,
    )  # fmt: skip


def _link(card: Card, slot: Pcie | None) -> Link:
    return Link(PCIE_SHARE * card.pcie.with_slot(slot).bandwidth, LATENCY, LANES)


def _processor(card: Card) -> Processor:
    memory, products = MEMORY_SHARE * card.bandwidth, COMPUTE_SHARE * card.half
    table = _roofline(memory, round(products / memory))
    return with_host_work(Processor("gpu", "device", table, table))


def with_host_work(gpu: Processor) -> Processor:
    """Copy a GPU's times, with those that the host takes for its layers and misses."""
    return replace(
        gpu, layer=host_work.LAYER + host_work.HIT, fetch=host_work.FETCH, hop=host_work.HOP,
        miss=host_work.MISS, shared_miss=host_work.SHARED_MISS, piece_layer=host_work.PIECE,
        graph_token=host_work.GRAPH_TOKEN, graph_layer=host_work.GRAPH_LAYER,
    )  # fmt: skip


def _roofline(bandwidth: float, balance: int) -> Table:
    """Return computation times of bfloat16 weights that are read at `bandwidth` bytes a second.

    Up to `balance` tokens are computed while the weights are read; more take time in proportion.
    """
    read = UNIT / bandwidth
    return Table((UNIT,), (1, max(2, balance)), ((read, read),))
