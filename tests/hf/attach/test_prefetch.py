"""Whoever predicts, however wrong, and whatever ends: the bits are those without prefetching."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import greenroom
from greenroom.core.predictor import LayerPrediction
from greenroom.hf.attach.predictors import runs_in_worker
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.plan.history.files import save_predictor
from greenroom.predictors import PREDICTORS
from tests.hf.check.test_parity import NAMED, ids, streamed
from tests.models import cached_tiny, reference

ARCHITECTURE = "qwen3_moe"
SLOW = pytest.mark.slow
BESIDE = sorted(name for name, kind in PREDICTORS.items() if "trace" not in kind.needs)
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_tiny(ARCHITECTURE, dtype="bfloat16")


def random_networks(folder: Path, path: Path) -> str:
    """A file for `learned` that has learned nothing."""
    catalog, random = ModelSkeleton.of(folder).catalog, np.random.default_rng(1)
    made: dict[str, np.ndarray] = {"distance": np.array([1])}
    for layer, experts in enumerate(np.diff(catalog.offsets).tolist()):
        sizes = {"up.weight": (5, 32), "up.bias": (5,), "down.weight": (experts, 5)}
        for name, size in {**sizes, "down.bias": (experts,)}.items():
            made[f"{layer}.{name}"] = random.standard_normal(size).astype(np.float32)
    save_predictor(path, made, "", {"model": folder.name})
    return str(path)


def ahead(name: str, folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Parts that prefetch by this predictor, whatever it costs."""
    file = None
    if name == "learned":
        file = random_networks(folder, tmp_path / "learned.safetensors")
    return {"prefetch": name, "predictor": file, "guard": False}


def answers(model: PreTrainedModel) -> list[torch.Tensor]:
    """Tokens and logits of two prompts, the second a batch of two, with what follows them."""
    found = []
    for prompt in (ids(1, 9), ids(2, 5)):
        out = model.generate(prompt, **OPTIONS)
        found += [out.sequences, *out.logits]
    return found


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[torch.Tensor]:
    return answers(reference(folder))


@pytest.mark.parametrize("name", BESIDE)
def test_every_predictor_leaves_every_bit(name, folder, wanted, tmp_path):
    """With at most two borrowed slots, and with all but one expert in the cache."""
    parts = ahead(name, folder, tmp_path)
    experts = ModelSkeleton.of(folder).catalog.experts
    for capacity, fake in ((9, False), (experts - 1, True)):
        with streamed(folder, capacity=capacity, kernels="eager", fake=fake, **parts) as model:
            assert equal(answers(model), wanted), (capacity, fake)
            prefetch = model.greenroom.stats().prefetch
            assert prefetch["predictor"] == ("off" if name == "none" else name)


@pytest.mark.parametrize("name", ["learned", "next-gate", "markov", "eamc"])
def test_a_predictor_in_a_worker_leaves_every_bit_and_learns_the_same(
    name, folder, wanted, tmp_path
):
    parts, states = ahead(name, folder, tmp_path), []
    for place in ("inline", "worker"):
        with streamed(
            folder, capacity=9, kernels="eager", fake=True, predict_in=place, **parts
        ) as model:
            assert equal(answers(model), wanted), place
            prefetch = model.greenroom.stats().prefetch
            assert prefetch["predict_in"] == place
            assert prefetch["overtaken"] >= 0 if place == "worker" else not prefetch["overtaken"]
            names = [thread.name for thread in threading.enumerate()]
            assert ("greenroom-predict" in names) == (place == "worker")
        states.append(model.greenroom.predictor.state())
    inline, worker = states
    assert inline.keys() == worker.keys()
    assert all(np.array_equal(inline[key], worker[key]) for key in inline)


def test_on_a_cpu_no_predictor_has_a_thread_by_default(folder, tmp_path):
    for name, place in (("learned", "inline"), ("next-gate", "inline"), ("none", None)):
        with streamed(folder, capacity=9, **ahead(name, folder, tmp_path)) as model:
            assert model.greenroom.stats().prefetch["predict_in"] == place, name


def test_with_a_gpu_only_a_costly_predictor_has_a_thread_by_default(folder, tmp_path):
    for name, costly in (("learned", True), ("next-gate", False)):
        with streamed(folder, capacity=9, **ahead(name, folder, tmp_path)) as model:
            predictor = model.greenroom.predictor
        assert runs_in_worker(predictor, "auto", on_gpu=True) == costly
        assert runs_in_worker(predictor, "worker", on_gpu=False)
        assert not runs_in_worker(predictor, "inline", on_gpu=True)


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_cache_with_nothing_to_spare_is_as_without(capacity, folder, wanted):
    parts = {"prefetch": "auto", "guard": False, "kernels": "eager"}
    with streamed(folder, capacity=capacity, **parts) as model:
        assert equal(answers(model), wanted)
        assert model.greenroom.stats().prefetch["began"] == 0


@pytest.fixture(scope="module")
def without(folder: Path) -> list[torch.Tensor]:
    with streamed(folder, capacity=9) as model:
        return answers(model)


@pytest.mark.parametrize("name", BESIDE)
def test_the_default_kernels_compute_the_same_with_and_without(name, folder, without, tmp_path):
    with streamed(folder, capacity=9, fake=True, seed=3, **ahead(name, folder, tmp_path)) as model:
        assert equal(answers(model), without)


@pytest.mark.parametrize(
    ("name", "fake"),
    [
        *((name, n % 2 == 0) for n, name in enumerate(NAMED)),
        *(pytest.param(name, n % 2 == 1, marks=SLOW) for n, name in enumerate(NAMED)),
    ],
)
def test_every_architecture(name, fake):
    folder = cached_tiny(name, dtype="float32")
    with streamed(
        folder, capacity=8, kernels="eager", prefetch="auto", guard=False, fake=fake
    ) as model:
        assert equal(answers(model), answers(reference(folder)))
        prefetch = model.greenroom.stats().prefetch
        assert prefetch["began"] > 0
        assert prefetch["accuracy"] is not None


def test_scopes_and_policies(folder, wanted):
    for scope, policy in (
        ("per-layer", "lru"),
        ("shared", "lfu"),
        ("per-layer", "moe-infinity"),
        ((3.0, 1.0), "lru"),
    ):
        with streamed(
            folder, capacity=11, kernels="eager", prefetch="next-gate:2", guard=False,
            scope=scope, policy=policy,
        ) as model:  # fmt: skip
            assert equal(answers(model), wanted), (scope, policy)


def test_the_demo_model_says_the_same():
    said = []
    for options in (
        {"prefetch": "off"},
        {},
        {"prefetch": "next-gate:2", "no_guard": True},
        {"prefetch": "markov", "no_guard": True, "device": "fake"},
        {"prefetch": "next-gate", "no_guard": True, "predict_in": "worker"},
        {"prefetch": "markov", "no_guard": True, "prefetch_rule": "top-k"},
        {"prefetch": "markov:2", "no_guard": True, "prefetch_rule": "all"},
    ):
        model, tokenizer = greenroom.load("demo", cache="25%", **options)
        try:
            prompt = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
            said.append(model.generate(prompt, max_new_tokens=24, do_sample=False).tolist())
            began = model.greenroom.stats().prefetch["began"]
            assert (began > 0) == (options.get("prefetch") != "off")
        finally:
            model.greenroom.detach()
    assert all(each == said[0] for each in said)


class Leaves:
    """A streamer whose reader leaves after so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConnectionResetError("the reader left")

    def end(self) -> None: ...


@pytest.mark.parametrize("fake", [False, True], ids=["cpu", "fake"])
def test_a_reader_who_leaves_harms_no_later_answer(folder, wanted, fake):
    parts = {"prefetch": "next-gate", "guard": False, "kernels": "eager"}
    with streamed(folder, capacity=9, fake=fake, **parts) as model:
        for tokens in (0, 2):
            with pytest.raises(ConnectionResetError):
                model.generate(ids(1, 9), streamer=Leaves(tokens), max_new_tokens=6)
            assert equal(answers(model), wanted)
        scheduler = model.greenroom.driver.scheduler
        assert not scheduler.placement.cache.state.pinned.any()


def test_a_layer_that_raises_in_the_middle_of_a_pass_harms_no_later_answer(folder, wanted):
    """With transfers for the layers that never come under way."""
    parts = {"prefetch": "next-gate", "guard": False, "kernels": "eager", "fake": True}
    with streamed(folder, capacity=9, **parts) as model:

        def breaks(*args: Any) -> None:
            raise KeyboardInterrupt

        for layer in model.model.layers[:2]:
            hook = layer.register_forward_hook(breaks)
            with pytest.raises(KeyboardInterrupt):
                model.generate(ids(1, 9), max_new_tokens=6)
            hook.remove()
            assert equal(answers(model), wanted)


@pytest.mark.parametrize(
    "where", ["observe", pytest.param("begin", marks=SLOW), pytest.param("predict", marks=SLOW)]
)
def test_a_predictor_that_raises_ends_prefetching_alone(folder, wanted, where, monkeypatch, caplog):
    parts = {"prefetch": "markov", "guard": False, "kernels": "eager"}
    with streamed(folder, capacity=9, **parts) as model:
        assert equal(answers(model), wanted)

        def breaks(*args: Any) -> list[LayerPrediction]:
            raise IndexError("out of its depth")

        monkeypatch.setattr(model.greenroom.predictor, where, breaks)
        assert equal(answers(model), wanted)
        assert model.greenroom.stats().prefetch["on"] is False
    (said,) = caplog.messages
    assert "markov" in said
    assert "out of its depth" in said


@pytest.mark.parametrize(
    "name",
    ["next-gate", *(pytest.param(n, marks=SLOW) for n in BESIDE if n not in ("next-gate", "none"))],
)
def test_resized_between_all_and_some_while_it_answers(name, folder, wanted, tmp_path, caplog):
    """Where every expert has a slot nothing is foreseen: a pass may end otherwise than it began."""
    parts = ahead(name, folder, tmp_path)
    with streamed(folder, capacity=9, kernels="eager", fake=True, **parts) as model:
        room, stop = model.greenroom, threading.Event()
        sizes = (room.setup.catalog.experts, 9, 3)

        def resize() -> None:
            while not stop.wait(0.003):
                for size in sizes:
                    room.resize(size * room.setup.catalog.slot_bytes)

        thread = threading.Thread(target=resize)
        thread.start()
        try:
            assert equal(answers(model), wanted)
        finally:
            stop.set()
            thread.join()
        assert room.driver.predictions.foresight is not None
    assert caplog.messages == []
