"""Table of graphics cards (`cards.csv`), from their vendors' data sheets.

Products are dense, with sums in float32, which GeForce cards compute at half of their largest rate.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files

from greenroom.errors import UnknownName, UsageError

LANE_GBS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s of one PCIe lane, by generation
NEAREST = 3  # names in the message about an unknown card
# Words that a name may have or lack. Others, such as Ti or Laptop, tell two cards apart.
MAKERS = {"nvidia", "geforce", "rtx", "quadro", "tesla", "gpu", "graphics", "card", "generation",
          "blackwell", "workstation", "server", "edition"}  # fmt: skip
VARIANT = re.compile(r"\d+gb|pcie|sxm")  # terms that a name may lack if one card is left then


@dataclass(frozen=True, slots=True)
class Pcie:
    """A PCIe slot or a card's connector: generation and number of lanes."""

    generation: int
    lanes: int

    @classmethod
    def parse(cls, text: str, name: str) -> Pcie:
        """Parse a slot such as `4x16`; raises UsageError for another text.

        `name` is the option's name in errors.
        """
        match = re.fullmatch(r"([0-9])[xX]([0-9]{1,2})", text.strip())
        if match is None or int(match[1]) not in LANE_GBS or int(match[2]) not in (1, 2, 4, 8, 16):
            generations = f"{min(LANE_GBS)} to {max(LANE_GBS)}"
            raise UsageError(
                f"{name} is {text!r}: write generation and lanes as 4x16 (generation {generations},"
                " 1 to 16 lanes)"
            )
        return cls(int(match[1]), int(match[2]))

    def with_slot(self, slot: Pcie | None) -> Pcie:
        """Return the link of a card in a slot: the lesser generation, and the fewer lanes."""
        if slot is None:
            return self
        return Pcie(min(self.generation, slot.generation), min(self.lanes, slot.lanes))

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second that the link carries in one direction, at most."""
        return LANE_GBS[self.generation] * self.lanes * 1e9

    def __str__(self) -> str:
        return f"{self.generation}x{self.lanes}"


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card's data sheet, in bytes, bytes a second and operations a second.

    bf16, fp16, fp8: rate of products of dense matrices; None where the card has none
    """

    name: str
    memory: int
    bandwidth: float
    pcie: Pcie
    bf16: float | None
    fp16: float
    fp8: float | None
    source: str

    @property
    def half(self) -> float:
        """Return the rate of products of 16 bits: of bfloat16 if the card has it, else float16."""
        return self.bf16 or self.fp16


@cache
def load_cards() -> tuple[Card, ...]:
    """Read the package's table of graphics cards."""
    text = files("greenroom.plan.cards").joinpath("cards.csv").read_text(encoding="utf-8")
    return tuple(_card(row) for row in csv.DictReader(text.splitlines()))


def _card(row: dict[str, str]) -> Card:
    bf16, fp16, fp8 = (
        float(row[f"{kind}_tflops"] or 0) * 1e12 or None for kind in ("bf16", "fp16", "fp8")
    )
    assert fp16 is not None
    memory, bandwidth = int(row["memory_gib"]) << 30, float(row["bandwidth_gbs"]) * 1e9
    pcie = Pcie.parse(row["pcie"], "pcie")
    return Card(row["name"], memory, bandwidth, pcie, bf16, fp16, fp8, row["source"])


def find_card(name: str) -> Card:
    """Find a graphics card by its name: `4090`, `rtx4090`, `NVIDIA GeForce RTX 4090`.

    UnknownName lists the nearest names. UsageError lists the cards if the name fits several, such
    as both sizes of A100.
    """
    terms = _terms(name)
    cards = [card for card in load_cards() if _fits(terms, card)]
    if len(cards) == 1:
        return cards[0]
    if cards:
        names = ", ".join(card.name for card in cards)
        raise UsageError(f"graphics card {name!r} fits several cards: choose one of {names}")
    raise UnknownName("graphics card", name, _nearest(terms))


def _nearest(terms: frozenset[str]) -> list[str]:
    """Return the names of the cards that are nearest to the terms of an unknown name."""

    def likeness(card: Card) -> tuple[int, float]:
        of_card = _terms(card.name)
        one, other = (" ".join(sorted(each)) for each in (terms, of_card))
        return len(terms & of_card), SequenceMatcher(None, one, other).ratio()

    return [card.name for card in sorted(load_cards(), key=likeness, reverse=True)[:NEAREST]]


def _terms(name: str) -> frozenset[str]:
    """Split a card's name into the terms that tell it from other cards."""
    text = re.sub(r"sxm\d|hbm\d\w?", " sxm ", name.lower())
    text = re.sub(r"(\d+)\s*gi?b", r" \1gb ", re.sub("|".join(sorted(MAKERS)), " ", text))
    return frozenset(re.findall(r"\d+gb|[a-z]\d+|\d+|[a-z]+", text))


def _fits(terms: frozenset[str], card: Card) -> bool:
    """Check whether a name's terms are those of a card; a size of memory may be added."""
    card_terms = _terms(card.name)
    added = terms - card_terms - {f"{card.memory >> 30}gb"}
    return not added and all(VARIANT.fullmatch(term) for term in card_terms - terms)
