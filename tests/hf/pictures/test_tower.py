"""Passes with pictures have transformers' bits, in one chunk or in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from greenroom.hf.kv.batch import Batch
from greenroom.hf.pictures.reader import PictureReader
from greenroom.hf.pictures.tower import PictureFeatures, pass_options
from greenroom.hf.text.dialogue import Dialogue
from greenroom.runtime.kernels.resident.fused_layers import FusedLayers
from tests.hf.check.test_parity import streamed
from tests.hf.pictures.test_reader import messages, sent
from tests.pictures import expected_answer, picture, picture_checkpoint

IMAGES = [picture(100, 70), picture(300, 200, 1)]


@pytest.fixture(scope="module")
def prompt(folder: Path, reader: PictureReader) -> Any:
    ids = Dialogue(AutoTokenizer.from_pretrained(folder)).chat(messages(2))
    return reader.read(ids, sent(*IMAGES))


def answer(batch: Batch, prompt: Any, chunks: list[int], new: int) -> tuple[list[int], list[Any]]:
    """Return the greedy answer to a prompt that is computed in chunks, with its logits."""
    ids, features = list(prompt[0]), PictureFeatures(prompt[1])
    caches, at, logits, count = [batch.cache()], 0, [], len(ids)
    with torch.inference_mode():
        for chunk in [*chunks, count - sum(chunks), *[1] * (new - 1)]:
            part = ids[at : at + chunk]
            options = pass_options([part], [at], [features.part(at, chunk)])
            found = batch([part], caches, None, options)[0]
            at += chunk
            if at >= count:
                logits.append(found)
                ids.append(int(found.argmax()))
    return ids[count:], logits


def test_logits_have_transformers_bits(
    model: Any, whole: Any, folder: Path, reader: PictureReader
) -> None:
    ids = Dialogue(AutoTokenizer.from_pretrained(folder)).chat(messages(1))
    one = reader.read(ids, sent(IMAGES[1]))
    wanted = expected_answer(whole, folder, messages(1), IMAGES[1:], 6)
    tokens, logits = answer(Batch(model), one, [], 6)
    assert tokens == wanted.sequences[0, len(one[0]) :].tolist()
    assert all(map(torch.equal, logits, (each[0] for each in wanted.logits)))
    assert model.greenroom.stats().expert_hits < model.greenroom.stats().expert_requests


@pytest.mark.parametrize("chunks", [[], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [30, 1, 30], [17] * 5])
def test_chunks_do_not_change_the_answer(
    model: Any, whole: Any, folder: Path, prompt: Any, chunks: list[int]
) -> None:
    wanted = expected_answer(whole, folder, messages(2), IMAGES, 6)
    tokens, logits = answer(Batch(model), prompt, chunks, 6)
    assert tokens == wanted.sequences[0, len(prompt[0]) :].tolist()
    for mine, theirs in zip(logits, wanted.logits, strict=True):
        torch.testing.assert_close(mine, theirs[0], rtol=1e-4, atol=1e-4)


def test_layers_of_resident_experts_stay_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture's token alone in a pass would look like a token of an answer."""
    folder, fused = picture_checkpoint("bfloat16"), []
    compute = FusedLayers.compute
    monkeypatch.setattr(
        FusedLayers, "compute", lambda *args: fused.append(out := compute(*args)) or out
    )
    ids = Dialogue(AutoTokenizer.from_pretrained(folder)).chat(messages(2))
    with streamed(folder, capacity=24, policy="lru") as model:
        prompt = PictureReader(model, 600, 64).read(ids, sent(*IMAGES))
        batch = Batch(model)
        answer(batch, prompt, [], 3)  # which shows the order of layers
        fused.clear()
        whole = answer(batch, prompt, [], 4)
        assert [len(out) for out in fused] == [3, 3, 3]
        fused.clear()
        single = answer(batch, prompt, [1] * (len(prompt[0]) - 1), 4)
        texts = len(prompt[0]) - sum(each.tokens for each in prompt[1].pictures)
        assert len(fused) == texts + 3
    assert single[0] == whole[0]
    for mine, theirs in zip(single[1], whole[1], strict=True):
        assert (mine - theirs).norm() < 0.05 * theirs.norm()


def test_pictures_are_encoded_once_and_freed(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, encoded = prompt[1], []
    encode = type(pictures.tower).encode
    monkeypatch.setattr(
        type(pictures.tower), "encode",
        lambda self, one: encoded.append(one) or encode(self, one),
    )  # fmt: skip
    features = PictureFeatures(pictures)
    first, second = pictures.begins
    for at in range(len(prompt[0])):
        part = features.part(at, 1)
        held = {id(each) for each in features._rows.values()}
        is_picture = any(
            begin <= at < begin + each.tokens
            for begin, each in zip(pictures.begins, pictures.pictures, strict=True)
        )
        assert len(part.rows) == len(held) == is_picture
    assert encoded == list(pictures.pictures)
    assert first < second


def test_picture_tokens_without_a_picture_keep_their_embedding(model: Any, prompt: Any) -> None:
    """A model may write the token that stands for pictures, beside a prompt with pictures."""
    ids, pictures = prompt
    token, batch = pictures.tower.token, Batch(model)
    with torch.inference_mode():
        plain = [batch.cache()]
        batch([[5, token, 7]], plain)
        alone = batch([[token]], [*plain])[0]
        plain = [batch.cache()]
        batch([[5, token, 7]], plain)
        features = PictureFeatures(pictures)
        options = pass_options([ids, [token]], [0, 3], [features.part(0, len(ids)), None])
        both = batch([list(ids), [token]], [batch.cache(), *plain], None, options)
    torch.testing.assert_close(both[1], alone, rtol=1e-4, atol=1e-4)
