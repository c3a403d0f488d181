"""Hand-worked cases: the experts of variants, their memory, and what routers' choices become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.core.layout import Catalog, Extent, SlotLayout
from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.errors import UnsupportedModel
from greenroom.hf.memory.slots import slots_for
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.variants.catalog import ExpertVariants, join_catalogs
from greenroom.hf.variants.index import Adapters
from greenroom.hf.variants.predictor import VariantPredictor
from greenroom.hf.variants.routing import VariantRouting
from tests.adapters import make_adapter
from tests.models import cached_tiny

LAYOUT = SlotLayout.pack([("up_proj", (4, 8), "float32"), ("down_proj", (8, 4), "float32")])


def catalog(*changed: tuple[int, int, int], files: int = 1) -> Catalog:
    """Two layers of three experts in file 0; `changed` has (layer, expert, other file)."""
    at = {(layer, expert): file for layer, expert, file in changed}

    def locate(layer: int, expert: int) -> tuple[Extent, ...]:
        place = 3 * layer + expert
        return (Extent(at.get((layer, expert), 0), place * 256, 256, ()),)

    names = tuple(f"file{n}" for n in range(files))
    return Catalog(names, ("a", "b"), (0, 3, 6), (LAYOUT, LAYOUT), locate)


@pytest.fixture
def joined() -> tuple[Catalog, ExpertVariants]:
    """The first adapter changes expert 1 of layer 0, the second experts 0 and 1 of it."""
    return join_catalogs(
        [catalog(), catalog((0, 1, 1), files=2), catalog((0, 0, 2), (0, 1, 2), files=3)]
    )


def test_changed_experts_follow_the_models_own(joined: tuple[Catalog, ExpertVariants]) -> None:
    experts, variants = joined
    assert experts.offsets == (0, 6, 9)
    assert variants.originals[0].tolist() == [0, 0, 1, 1, 1, 2, 3]  # the last: left out
    assert variants.stored[0].tolist() == [[0, 2, 5, 6], [0, 3, 5, 6], [1, 4, 5, 6]]
    assert variants.stored[1].tolist() == [[0, 1, 2, 3]] * 3
    assert [experts.extents(e)[0].file for e in range(9)] == [0, 2, 0, 1, 2, 0, 0, 0, 0]
    assert experts.files == ("file0", "file1", "file2")
    assert variants.changed(1) == [(0, 1)]
    assert variants.changed(2) == [(0, 0), (0, 1)]
    assert variants.of_model(experts).offsets == (0, 3, 6)


def test_memory_grows_by_the_changed_experts_alone(joined: tuple[Catalog, ExpertVariants]) -> None:
    """Three servers would need 3 * 6 experts; this one needs 6 and the 3 changed ones."""
    experts, _ = joined
    assert experts.all_experts_bytes == (6 + 3) * LAYOUT.nbytes == 9 * 256
    assert slots_for("100%", experts) == 9
    assert slots_for(3 * 256, experts) == slots_for(3 * 256, catalog()) == 3


def test_another_layout_is_refused() -> None:
    from dataclasses import replace

    other = SlotLayout.pack([("down_proj", (8, 4), "float32"), ("up_proj", (4, 8), "float32")])
    with pytest.raises(UnsupportedModel, match="another layout"):
        join_catalogs([catalog(), replace(catalog(), layouts=(LAYOUT, other))])


def test_equal_digests_are_of_equal_numbers(joined: tuple[Catalog, ExpertVariants]) -> None:
    _, variants = joined
    same = join_catalogs([catalog(), catalog((0, 1, 1)), catalog((0, 0, 2), (0, 1, 2))])[1]
    other = join_catalogs([catalog(), catalog((0, 2, 1)), catalog((0, 0, 2), (0, 1, 2))])[1]
    assert variants.digest == same.digest != other.digest
    assert len(variants.digest) == 16


CHOSEN = np.array([[1, 2], [1, 0], [0, 3], [2, 9]])  # ids from 3 on are left out


def test_each_token_gets_the_experts_of_its_variant(joined: tuple[Catalog, ExpertVariants]) -> None:
    routing = VariantRouting(joined[1])
    assert routing.stored(0, CHOSEN).tolist() == [[2, 5], [2, 0], [0, 6], [5, 6]]
    routing.use([2, 2, 2, 2])
    assert routing.stored(0, CHOSEN).tolist() == [[4, 5], [4, 1], [1, 6], [5, 6]]
    routing.use([0, 1, 2, 1])
    assert routing.stored(0, CHOSEN).tolist() == [[2, 5], [3, 0], [1, 6], [5, 6]]
    assert routing.stored(1, CHOSEN).tolist() == [[1, 2], [1, 0], [0, 3], [2, 3]]
    weights = torch.rand(4, 2)
    read, on_host = routing.read_choice(0, torch.from_numpy(CHOSEN), weights)
    assert read.tolist() == routing.stored(0, CHOSEN).tolist()
    assert on_host.tolist() == weights.tolist()
    routing.use([])
    assert routing.stored(0, CHOSEN[:1]).tolist() == [[2, 5]]


def test_a_pass_of_another_size_is_refused(joined: tuple[Catalog, ExpertVariants]) -> None:
    routing = VariantRouting(joined[1])
    routing.use([0, 1, 0])
    with pytest.raises(RuntimeError, match="4 tokens in a pass of 3"):
        routing.stored(0, CHOSEN)


class Inner:
    """A predictor that records what it observes."""

    name, costly, distance, width = "inner", False, 1, 2

    def __init__(self) -> None:
        self.observed: list[list[list[int]]] = []
        self.guesses: list[LayerPrediction] = []

    def begin(self, at: PassStart) -> None: ...

    def observe(self, routing: LayerRouting) -> None:
        self.observed.append(routing.experts.tolist())

    def predict(self, layer: int) -> list[LayerPrediction]:
        return self.guesses

    def state(self) -> dict[str, Any]:
        return {"learned": np.arange(3)}

    def restore(self, state: Any) -> None:
        self.restored = state


def test_a_predictor_knows_the_models_own_experts(joined: tuple[Catalog, ExpertVariants]) -> None:
    inner = Inner()
    predictor = VariantPredictor(inner, joined[1])
    predictor.begin(PassStart(0, 0, 2, False, variants=np.array([1, 2])))
    predictor.observe(LayerRouting(0, np.array([[3, 5], [4, 1]])))
    assert inner.observed == [[[1, 2], [1, 0]]]
    inner.guesses = [
        LayerPrediction(2, np.array([[1, 0]])),  # layer 0 of the next pass: as the last token
        LayerPrediction(1, np.array([[1, 2], [0, -1]])),
        LayerPrediction(0, np.array([[1, 2], [0, -1]]), np.array([0.1, 0.2, 0.3])),
    ]
    later, one, zero = predictor.predict(0)
    assert later.experts.tolist() == [[4, 1]]
    assert one.experts.tolist() == [[1, 2], [0, -1]]
    assert zero.experts.tolist() == [[3, 5], [1, -1]]
    assert zero.priorities is not None
    assert zero.priorities.tolist() == [0.1, 0.1, 0.2, 0.2, 0.2, 0.3]
    assert predictor.state()["learned"].tolist() == [0, 1, 2]
    predictor.restore({"learned": np.zeros(1)})
    assert inner.restored["learned"].tolist() == [0]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "glm4_moe"])
def test_architectures_have_variants(name: str, tmp_path: Path) -> None:
    folder = cached_tiny(name)
    layer = 0 if name in ("mixtral", "olmoe", "qwen3_moe") else 1
    adapter = make_adapter(folder, tmp_path / "one", {layer: [0, 2]})
    base = ModelSkeleton.of(folder).catalog
    skeleton = ModelSkeleton.of(folder, adapters=Adapters((str(adapter),), as_variants=True))
    assert skeleton.catalog.experts == base.experts + 2
    assert skeleton.variants is not None
    assert skeleton.variants.changed(1) == [(0, 0), (0, 2)]
