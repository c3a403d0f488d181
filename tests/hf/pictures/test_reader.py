"""Prompts with pictures are those of transformers' processor; limits and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from greenroom.errors import CheckpointError, TooLong, UsageError
from greenroom.hf.pictures import support
from greenroom.hf.pictures.decode import EncodedPicture
from greenroom.hf.pictures.reader import PictureReader
from greenroom.hf.text.dialogue import Dialogue
from tests.hf.check.test_parity import streamed
from tests.models import cached_tiny
from tests.pictures import SIDE, encode, expected_inputs, image_processor, in_base64, picture

SIZES = [(100, 70), (32, 32), (300, 200), (33, 1000), (1, 1), (640, 31)]


def messages(count: int) -> list[dict[str, Any]]:
    parts: list[dict[str, str]] = []
    for number in range(count):
        parts += [{"type": "image"}, {"type": "text", "text": f"Picture {number}?"}]
    return [{"role": "user", "content": parts}]


def sent(*images: Image.Image) -> list[EncodedPicture]:
    return [EncodedPicture(in_base64(encode(each)), "image/png") for each in images]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def prompt(tokenizer: Any, count: int) -> list[int]:
    return Dialogue(tokenizer).chat(messages(count))


@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_is_that_of_the_processor(
    folder: Path, reader: PictureReader, tokenizer: Any, whole: Any, size: tuple[int, int]
) -> None:
    images = [picture(*size), picture(90, 64, 1)]
    ids, pictures = reader.read(prompt(tokenizer, 2), sent(*images))
    wanted = expected_inputs(folder, messages(2), images)
    assert list(ids) == wanted["input_ids"][0].tolist()
    is_picture = wanted["mm_token_type_ids"]
    positions, shift = whole.model.get_rope_index(
        wanted["input_ids"], is_picture, image_grid_thw=wanted["image_grid_thw"]
    )
    assert torch.equal(pictures.positions, positions[:, 0])
    assert pictures.shift == int(shift)
    patches = [image_inputs(reader, each) for each in pictures.pictures]
    assert torch.equal(torch.cat(patches), wanted["pixel_values"])
    places = [i for i, each in enumerate(is_picture[0].tolist()) if each]
    first = pictures.pictures[0].tokens
    assert list(pictures.begins) == [places[0], places[first]]
    assert len(places) == sum(each.tokens for each in pictures.pictures)
    assert pictures.nbytes == len(places) * 3 * SIDE**2


def image_inputs(reader: PictureReader, read: Any) -> torch.Tensor:
    """Return the vision tower's input for a picture."""
    assert reader.tower is not None
    inputs = reader.tower.inputs(read)
    return inputs["pixel_values"]


def test_large_pictures_are_scaled_down_as_the_processor_does(
    model: Any, folder: Path, tokenizer: Any
) -> None:
    image = picture(400, 300)
    reader = PictureReader(model, context=600, most_tokens=16)
    _, pictures = reader.read(prompt(tokenizer, 1), sent(image))
    processor = image_processor()
    processor.size = {"shortest_edge": SIDE**2, "longest_edge": 16 * SIDE**2}
    wanted = processor(images=[image], return_tensors="pt")
    assert pictures.pictures[0].tokens == 12
    assert torch.equal(image_inputs(reader, pictures.pictures[0]), wanted["pixel_values"])
    assert reader.description == "pictures in messages, of up to 16 tokens each"


def test_other_pictures_have_other_keys(reader: PictureReader, tokenizer: Any) -> None:
    ids = prompt(tokenizer, 1)
    keys = [reader.read(ids, sent(each))[1].keys for each in (
        picture(96, 96), picture(96, 96), picture(96, 96, 1))]  # fmt: skip
    assert np.array_equal(keys[0], keys[1])
    assert keys[0].size == keys[2].size
    differ = np.flatnonzero(keys[0] != keys[2])
    begin = ids.index(reader.tower.token)  # type: ignore[union-attr]
    assert differ.tolist() == list(range(begin, begin + 9))
    assert (keys[0][differ] < 0).all()
    assert keys[0].min() >= -(1 << 31)


def test_a_picture_of_few_tokens_shares_no_key(reader: PictureReader, tokenizer: Any) -> None:
    ids = prompt(tokenizer, 1)
    one, other = (reader.read(ids, sent(picture(32, 32)))[1].keys for _ in range(2))
    assert (one != other).sum() == 1


def test_what_is_refused(reader: PictureReader, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="17 pictures: at most 16"):
        reader.read(prompt(tokenizer, 17), sent(*[picture(9, 9)] * 17))
    with pytest.raises(UsageError, match="picture 2: its data are not valid base64"):
        reader.read(prompt(tokenizer, 2), [*sent(picture(9, 9)), EncodedPicture("?")])
    damaged = EncodedPicture(in_base64(encode(picture(99, 99))[:-3000]))
    with pytest.raises(UsageError, match="picture 1: it is damaged"):
        reader.read(prompt(tokenizer, 1), [damaged])
    stray = tokenizer("<|image_pad|>")["input_ids"]
    with pytest.raises(UsageError, match="1 pictures, but the prompt has 2 places"):
        reader.read(prompt(tokenizer, 1) + stray, sent(picture(9, 9)))


def test_a_prompt_that_is_too_long_is_not_decoded(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = PictureReader(model, context=80, most_tokens=64)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was decoded"))
    data = sent(picture(256, 256))  # which is 64 tokens
    with pytest.raises(TooLong, match="tokens with its pictures, too many for the context of 80"):
        reader.read(prompt(tokenizer, 1), data)


def test_models_that_read_no_pictures_say_why(
    model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(cached_tiny("qwen3_moe"), capacity=4) as text:
        reader = PictureReader(text, 100, 64)
        assert reader.obstacle == "this server takes text only: the model's type is qwen3_moe"
        assert reader.description == ""
    off = PictureReader(model, 100, 0)
    assert off.description == "no pictures: --picture-tokens 0 switches pictures off"
    monkeypatch.setattr(model.config, "name_or_path", str(tmp_path))
    assert PictureReader(model, 100, 9).obstacle == "the model has no preprocessor_config.json"
    monkeypatch.setattr(model.config, "name_or_path", str(folder))
    monkeypatch.setattr(support, "missing_decoder", lambda: "Pillow is not installed")
    assert PictureReader(model, 100, 9).obstacle == "Pillow is not installed"
    visual = SimpleNamespace(config=model.config, model=SimpleNamespace(visual=None))
    assert "GGUF" in PictureReader(visual, 100, 9).obstacle


def test_an_image_processor_that_does_not_fit_is_an_error(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "name_or_path", str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="its image processor cannot be loaded"):
        PictureReader(model, 100, 9)
    processor = image_processor()
    processor.patch_size = 8
    processor.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="patches of the image processor"):
        PictureReader(model, 100, 9)
