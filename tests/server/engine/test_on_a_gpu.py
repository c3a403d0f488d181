"""The server's engine on emulated GPUs: the answers of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from greenroom.config import LoadConfig, ServeConfig
from greenroom.core.speculation import speculation
from greenroom.hf.load.load import load_with
from greenroom.hf.pictures.decode import EncodedPicture
from greenroom.server.engine.loop import ContinuousEngine, LoadedModel
from greenroom.server.engine.requests import Request, Sampling
from tests.adapters import tensors_of
from tests.emulated_gpu import emulated_gpus
from tests.hf.mtp.checkpoints import mtp_folder
from tests.models import cached_tiny
from tests.pictures import encode, in_base64, picture, picture_checkpoint
from tests.server.engine.test_drafts import EagerTimes
from tests.server.rig import GREEDY, PATIENCE, AnswerRecorder, draw

ONE, TWO = "cuda", "cuda:0,cuda:1"
SAMPLED = Sampling(temperature=0.7, seed=5, top_p=0.9, top_k=20, repetition_penalty=1.05)
Engines = Callable[..., ContinuousEngine]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, no_threads_left: None) -> Iterator[Engines]:
    emulated_gpus(monkeypatch)
    made: list[ContinuousEngine] = []

    def make(
        device: str,
        folder: Path | None = None,
        load: dict[str, Any] | None = None,
        context: int = 250,
        **serve: Any,
    ) -> ContinuousEngine:
        folder = folder or cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True)
        config = LoadConfig(device=device, kernels="eager", cache="50%", **(load or {}))
        both = {"mtp": serve.get("speculate") == "mtp", "variants": bool(config.adapter)}

        def read(progress: Any) -> LoadedModel:
            return LoadedModel(*load_with(str(folder), config, remember=False, **both))

        made.append(ContinuousEngine(read, ServeConfig(**serve), context))
        until = time.monotonic() + PATIENCE
        while made[-1].state()[0] == "loading" and time.monotonic() < until:
            time.sleep(0.005)
        assert made[-1].state()[0] == "ready", made[-1].state()
        return made[-1]

    with sdpa_kernel(SDPBackend.MATH):  # the CPU's own kernel rounds otherwise
        yield make
    for each in made:
        each.stop(0.0)


def ask(
    engine: ContinuousEngine,
    ids: list[int],
    new: int = 8,
    sampling: Sampling = GREEDY,
    **request: Any,
) -> AnswerRecorder:
    recorder = AnswerRecorder()
    recorder.ticket = engine.submit(
        Request(tuple(ids), new, sampling=sampling, end_ids=(), **request), recorder
    )
    return recorder


def answers(engine: ContinuousEngine, *requests: tuple[Any, ...], **options: Any) -> list[Any]:
    recorders = [ask(engine, *request, **options) for request in requests]
    assert [each.end().reason for each in recorders] == ["length"] * len(recorders)
    return [each.ids for each in recorders]


def test_batches_samplings_and_reused_prefixes(engines: Engines) -> None:
    found = []
    for each in (ONE, TWO, "cpu"):
        engine = engines(each)
        batch = answers(engine, *((draw(9, n), 8, SAMPLED) for n in range(3)), top_logprobs=2)
        prompt = draw(150, 7)
        first, again = answers(engine, (prompt,)), ask(engine, [*prompt, 5])
        assert again.end().reused_tokens > 100
        found.append((batch, first, again.ids))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["lookup", "mtp"])
def test_drafts_are_verified(engines: Engines, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In float32, whose rounding is too small to change a token."""
    monkeypatch.setattr(speculation, "PassTimes", EagerTimes)
    folder = cached_tiny("qwen3_moe", tokenizer=True)
    if kind == "mtp":
        folder = mtp_folder(0.001, "float32")
    drafted = engines(TWO, folder, speculate=kind, max_batch=1 if kind == "mtp" else 8)
    assert drafted.drafts.description.endswith(", which may change last bits")
    drafted.drafts.speculation.guard.passed = lambda *args: None
    requests = [(draw(12, 1) * 3, 24, sampling) for sampling in (GREEDY, SAMPLED)]
    assert answers(drafted, *requests) == answers(engines("cpu", folder), *requests)
    counts = drafted.drafts.speculation.counts
    assert 0 < counts.accepted <= counts.drafted


@pytest.mark.parametrize("device", [ONE, TWO])
def test_computed_prompts_survive_a_restart(engines: Engines, tmp_path: Path, device: str) -> None:
    prompt, folder = draw(150, 7), str(tmp_path / "prompts")
    first = engines(device, prompt_cache=folder)
    expected = answers(first, (prompt,))
    until = time.monotonic() + PATIENCE
    while not first.stats()["prompt_cache"]["files"] and time.monotonic() < until:
        time.sleep(0.01)
    first.stop(0.0)
    again = engines(device, prompt_cache=folder)
    assert answers(again, (prompt,)) == expected
    assert again.stats()["prompt_cache"]["hits"] == 1


def test_adapters_have_the_answers_of_a_cpu(engines: Engines, tmp_path: Path) -> None:
    """Experts with biases: those of changed experts are on each device, too."""
    folder = cached_tiny("gpt_oss", tokenizer=True)
    name, adapter = "model.layers.1.mlp.experts.down_proj", tmp_path / "adapter"
    adapter.mkdir()
    save_file({name: 2 * tensors_of(folder)[name]}, adapter / "adapter.safetensors")
    found = []
    for each in (ONE, TWO, "cpu"):
        engine = engines(each, folder, {"adapter": (f"twice={adapter}",)})
        asked = [ask(engine, draw(9, n), variant=n % 2) for n in range(3)]
        assert all(one.end().reason == "length" for one in asked)
        found.append([one.ids for one in asked])
    assert found[0] == found[1] == found[2]
    assert found[0] != [answers(engine, (draw(9, n),))[0] for n in range(3)]


@pytest.mark.parametrize("device", [ONE, TWO])
def test_experts_are_read_while_no_request_is_there(engines: Engines, device: str) -> None:
    engine = engines(device, load={"host_memory": "8GiB"})
    until, slots = time.monotonic() + PATIENCE, engine.greenroom.capacity
    while engine.stats()["prefetch"]["idle"] < slots and time.monotonic() < until:
        time.sleep(0.005)
    found = answers(engine, (draw(9, 1),))
    stats = engine.stats()["prefetch"]
    assert stats["idle"] >= slots  # others follow the answer
    assert stats["idle_used"] > 0
    assert found == answers(engines("cpu"), (draw(9, 1),))


def test_pictures_have_the_answers_of_a_cpu(engines: Engines) -> None:
    """Beside a request without pictures, and again from the same pictures."""
    folder, found = picture_checkpoint(), []
    sent = [EncodedPicture(in_base64(encode(picture(128, 128)))) for _ in range(2)]
    for each in (ONE, TWO, "cpu"):
        engine = engines(each, folder, context=600)
        assert engine.pictures is not None
        assert engine.pictures.obstacle == ""
        token = engine.pictures.tower.token
        prompt = [5, token, *draw(100, 1), token, 7]
        ids, pictures = engine.pictures.read(prompt, sent)
        both = ask(engine, list(ids), pictures=pictures), ask(engine, draw(9, 2))
        assert [one.end().reason for one in both] == ["length"] * 2
        ids, pictures = engine.pictures.read([*prompt, 9], sent)
        again = ask(engine, list(ids), pictures=pictures)
        assert again.end().reused_tokens > 0
        found.append([*(one.ids for one in both), again.ids])
    assert found[0] == found[1] == found[2]
