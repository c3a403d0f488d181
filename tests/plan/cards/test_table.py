"""The table of graphics cards: its rows, and the names that find them."""

from __future__ import annotations

import pytest

from greenroom.errors import UnknownName, UsageError
from greenroom.plan.cards.table import Pcie, find_card, load_cards

NAMES = {
    "4090": "RTX 4090",
    "rtx4090": "RTX 4090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "geforce rtx 4090 24GB": "RTX 4090",
    "3060": "RTX 3060 12GB",
    "RTX 3060 12 GB": "RTX 3060 12GB",
    "rtx4060ti": "RTX 4060 Ti 16GB",
    "5070-Ti": "RTX 5070 Ti",
    "a6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "Tesla T4": "T4",
    "l40s": "L40S",
    "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
    "a100 40gb": "A100 40GB",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "h100pcie": "H100 PCIe",
    "h200": "H200",
}


@pytest.mark.parametrize(("name", "card"), NAMES.items())
def test_a_name_finds_its_card(name: str, card: str) -> None:
    assert find_card(name).name == card


@pytest.mark.parametrize("card", load_cards(), ids=lambda card: card.name)
def test_every_row_is_found_by_its_own_name_and_is_plausible(card) -> None:
    assert find_card(card.name) is card
    assert card.source
    assert 8 << 30 <= card.memory <= 192 << 30
    assert 2e11 < card.bandwidth <= 8e12
    assert card.pcie.bandwidth < card.bandwidth
    # An order of magnitude: products in 16 bits outrun the memory by 50 to 500 operations a byte.
    assert 50 < card.half / card.bandwidth < 500
    assert card.bf16 in (None, card.fp16)
    if card.fp8 is not None:
        assert card.fp8 == pytest.approx(2 * card.fp16, rel=0.03)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("RTX 4091", "RTX 4090"), ("4060", "RTX 4060 Ti 16GB"), ("4090 laptop", "RTX 4090"),
     ("4070 super", "RTX 4070"), ("RTX 4090 48GB", "RTX 4090")],
)  # fmt: skip
def test_an_unknown_card_is_refused_with_the_nearest_names(name: str, nearest: str) -> None:
    with pytest.raises(UnknownName) as error:
        find_card(name)
    assert str(error.value).startswith(f"unknown graphics card {name!r}: choose one of ")
    assert nearest in str(error.value).partition("choose one of ")[2].split(", ")
    assert "\n" not in str(error.value)


def test_a_name_of_several_cards_is_refused_with_their_names() -> None:
    with pytest.raises(UsageError, match="fits several cards: choose one of A100 40GB, A100 80GB"):
        find_card("A100")


def test_a_slot_limits_generation_and_lanes() -> None:
    card = find_card("4060 Ti")
    assert str(card.pcie) == "4x8"
    assert str(card.pcie.with_slot(Pcie(3, 16))) == "3x8"
    assert str(card.pcie.with_slot(Pcie(5, 4))) == "4x4"
    assert card.pcie.with_slot(None) == card.pcie
    assert Pcie(4, 16).bandwidth == pytest.approx(31.5e9, rel=0.01)


@pytest.mark.parametrize("text", ["", "4", "x16", "2x16", "4x3", "4x32", "4 x 16", "gen4x16"])
def test_another_text_is_no_slot(text: str) -> None:
    with pytest.raises(UsageError, match=r"--pcie is .*: write generation and lanes as 4x16"):
        Pcie.parse(text, "--pcie")
