"""Hidden states of pictures by a vision tower, and arguments of passes with them.

A prompt may be computed in chunks, each in a pass with tokens of other requests. So a picture is
encoded once, when a pass needs its first token, and each pass gets the rows of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greenroom.hf.pictures.prompt import Picture, PromptPictures
from greenroom.runtime.kernels.resident.fused_layers import BETWEEN_LAYERS


class Rows(NamedTuple):
    """Hidden states of consecutive picture tokens, [tokens, hidden] each.

    input: in place of the tokens' embeddings
    deep:  added to the output of the first decoder layers, one for each
    """

    input: Tensor
    deep: tuple[Tensor, ...]

    def part(self, begin: int, end: int) -> Rows:
        return Rows(self.input[begin:end], tuple(each[begin:end] for each in self.deep))


class EncoderOutput(NamedTuple):
    """Hidden states of all pictures of a pass, as transformers' models take them."""

    pooler_output: tuple[Tensor, ...]
    deepstack_features: list[tuple[Tensor, ...]]


class VisionTower:
    """The vision tower of a model, with the image processor that prepares its input.

    token: id of the token that stands for pictures in a prompt
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self._model, self._processor = model, processor
        self.token = int(model.config.image_token_id)
        self.deep_layers = len(model.config.vision_config.deepstack_visual_indexes)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    def inputs(self, picture: Picture) -> Any:
        """Return the tower's input for a picture, as the image processor makes it."""
        return self._processor(
            images=[picture.pixels], do_resize=False, input_data_format="channels_last",
            return_tensors="pt",
        ).to(self.device)  # fmt: skip

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Rows:
        """Compute the hidden states of a picture's tokens."""
        out = self._model.get_image_features(**self.inputs(picture), return_dict=True)
        deep = tuple(torch.cat(each) for each in out.deepstack_features)
        return Rows(torch.cat(out.pooler_output), deep)

    def embed(self, count: int) -> Rows:
        """Return rows that leave `count` picture tokens without a picture as they are."""
        ids = torch.full((count,), self.token, device=self.device)
        rows = self._model.get_input_embeddings()(ids)
        return Rows(rows, (torch.zeros_like(rows),) * self.deep_layers)


class Part(NamedTuple):
    """Positions and hidden states of one sequence with pictures, for one pass.

    tower:     encodes its pictures
    positions: rotary positions of its new tokens, [3, tokens]
    rows:      (index of the first new token, hidden states) of pictures among the new tokens
    """

    tower: VisionTower
    positions: Tensor
    rows: tuple[tuple[int, Rows], ...]


class PictureFeatures:
    """Hidden states of one sequence's pictures, while passes need them."""

    def __init__(self, prompt: PromptPictures) -> None:
        self.prompt = prompt
        self._rows: dict[int, Rows] = {}  # by the number of the picture

    def part(self, begin: int, count: int) -> Part:
        """Return what a pass needs that computes `count` tokens from index `begin` on.

        Pictures among them are encoded, if the pass before has not done it. The hidden states of
        all others are freed.
        """
        prompt, end = self.prompt, begin + count
        rows: dict[int, Rows] = {}
        parts: list[tuple[int, Rows]] = []
        for number, (picture, first) in enumerate(zip(prompt.pictures, prompt.begins, strict=True)):
            last = first + picture.tokens
            if last <= begin or end <= first:
                continue
            cached = self._rows.get(number)
            rows[number] = prompt.tower.encode(picture) if cached is None else cached
            start = max(begin, first)
            part = rows[number].part(start - first, min(end, last) - first)
            parts.append((start - begin, part))
        self._rows = rows
        return Part(prompt.tower, self._positions(begin, end), tuple(parts))

    def _positions(self, begin: int, end: int) -> Tensor:
        stored = self.prompt.positions[:, begin:end]
        if stored.shape[1] == end - begin:
            return stored
        after = torch.arange(begin + stored.shape[1], end) + self.prompt.shift
        return torch.cat([stored, after.expand(3, -1)], 1)


def pass_options(
    ids: Sequence[Sequence[int]], begins: Sequence[int], parts: Sequence[Part | None]
) -> dict[str, Any]:
    """Return the arguments of a model's forward for new tokens of sequences with pictures.

    ids:    the new tokens of each sequence, of which the pass computes all in one row
    begins: how many tokens each sequence had before
    parts:  of the sequences with pictures, and None for the others
    """
    tower = next(part.tower for part in parts if part is not None)
    positions = [
        torch.arange(begin, begin + len(each)).expand(3, -1) if part is None else part.positions
        for each, begin, part in zip(ids, begins, parts, strict=True)
    ]
    joined = torch.cat(positions, 1)[:, None].to(tower.device)
    options: dict[str, Any] = {"position_ids": joined}
    if not any(part is not None and part.rows for part in parts):
        return options
    all_rows: list[Rows] = []
    for each, part in zip(ids, parts, strict=True):
        all_rows += _rows_of(tower, each, () if part is None else part.rows)
    deep = zip(*(each.deep for each in all_rows), strict=True)
    image = EncoderOutput(tuple(each.input for each in all_rows), list(deep))
    return {**options, "mm_encoder_outputs": {"image": image}, BETWEEN_LAYERS: True}


def _rows_of(
    tower: VisionTower, ids: Sequence[int], rows: Sequence[tuple[int, Rows]]
) -> list[Rows]:
    """Return rows for all picture tokens among `ids`, also for those without a picture.

    A model may write the token, and a text that is no message may contain it.
    """
    all_rows: list[Rows] = []
    at = 0
    for begin, each in (*rows, (len(ids), None)):
        if stray := list(ids[at:begin]).count(tower.token):
            all_rows.append(tower.embed(stray))
        if each is not None:
            all_rows.append(each)
            at = begin + len(each.input)
    return all_rows
