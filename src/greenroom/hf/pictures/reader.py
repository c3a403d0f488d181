"""Pictures of a conversation as a prompt of the model: decoded, resized, with their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from greenroom.errors import CheckpointError, TooLong, UsageError
from greenroom.hf.checkpoint.library_errors import wrap_library_errors
from greenroom.hf.pictures.decode import EncodedPicture, decode, read_base64
from greenroom.hf.pictures.memory import waiting_bytes
from greenroom.hf.pictures.prompt import Picture, PromptPictures, expand, prefix_keys
from greenroom.hf.pictures.support import MODELS, picture_obstacle
from greenroom.hf.pictures.tower import VisionTower

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES = 16  # of a prompt


class PictureReader:
    """Reads the pictures of prompts, for one model.

    obstacle: why the model takes no pictures; "" if it does
    tower:    encodes what was read; None where there is an obstacle
    waiting_bytes: the most bytes of the pixels of all requests together
    """

    def __init__(self, model: Any, context: int, most_tokens: int) -> None:
        """Make the reader of a model's pictures.

        context:     the most tokens of a prompt
        most_tokens: of a picture; larger ones are scaled down. 0: no pictures are read
        """
        self._model, self._context = model, context
        self.tower: VisionTower | None = None
        self.waiting_bytes = 0
        self.obstacle = picture_obstacle(model, most_tokens)
        if not self.obstacle:
            self._open(most_tokens)

    def _open(self, most_tokens: int) -> None:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

        folder = self._model.config.name_or_path
        with wrap_library_errors(f"{folder}: its image processor cannot be loaded"):
            processor: Any = qwen.Qwen2VLImageProcessorPil.from_pretrained(
                folder, local_files_only=True
            )
        vision = self._model.config.vision_config
        if (processor.patch_size, processor.merge_size, processor.temporal_patch_size) != (
            vision.patch_size,
            vision.spatial_merge_size,
            vision.temporal_patch_size,
        ):
            raise CheckpointError(
                f"{folder}: the patches of the image processor are not those of the vision tower:"
                " download the model again"
            )
        self._side = processor.patch_size * processor.merge_size  # pixels of a token
        most = min(processor.size.longest_edge, most_tokens * self._side**2)
        self._limits = {
            "min_pixels": min(processor.size.shortest_edge, most), "max_pixels": most
        }  # fmt: skip
        self.waiting_bytes = waiting_bytes(self._model, self._context)
        self._resize, self._resample = qwen.smart_resize, processor.resample
        self._settings = repr(sorted(processor.to_dict().items(), key=str))
        self.tower = VisionTower(self._model, processor)

    @property
    def description(self) -> str:
        """Describe what is read, for the start-up line; "" for models of text."""
        if self._model.config.model_type not in MODELS:
            return ""
        if self.obstacle:
            return f"no pictures: {self.obstacle}"
        most = self._limits["max_pixels"] // self._side**2
        return f"pictures in messages, of up to {most:,} tokens each"

    def read(
        self, ids: Sequence[int], encoded: Sequence[EncodedPicture]
    ) -> tuple[tuple[int, ...], PromptPictures]:
        """Read the pictures of a prompt; return its token ids, and the pictures.

        `ids` has one token for each picture. Raises UsageError, which names the picture, and
        TooLong if the prompt does not fit into the context.
        """
        assert self.tower is not None
        if len(encoded) > MOST_PICTURES:
            raise UsageError(
                f"the messages have {len(encoded)} pictures: at most {MOST_PICTURES} are read"
            )
        token = self.tower.token
        if (places := list(ids).count(token)) != len(encoded):
            raise UsageError(
                f"the messages have {len(encoded)} pictures, but the prompt has {places} places for"
                " them: a text contains the model's own token for pictures"
            )
        pictures = self._pictures(encoded, len(ids) - places)
        expanded, begins = expand(ids, token, pictures)
        positions, shift = self._positions(expanded, pictures, begins)
        keys = prefix_keys(expanded, pictures, begins)
        prompt = PromptPictures(self.tower, tuple(pictures), tuple(begins), positions, shift, keys)
        return tuple(expanded), prompt

    def _pictures(self, encoded: Sequence[EncodedPicture], others: int) -> list[Picture]:
        """Decode pictures; `others` is the number of the prompt's other tokens."""
        headers = []
        tokens = others
        for number, each in enumerate(encoded, 1):
            with _numbered(number):
                data, header = read_base64(each)
                height, width = self._target(header.height, header.width)
            tokens += height * width // self._side**2
            headers.append((data, header))
        if tokens >= self._context:
            raise TooLong(
                f"the prompt has {tokens:,} tokens with its pictures, too many for the context of"
                f" {self._context:,} tokens: send fewer or smaller pictures, or raise --context"
            )
        pictures = []
        for number, (data, header) in enumerate(headers, 1):
            with _numbered(number):
                pixels = np.asarray(decode(data, header, self._resized))
            count = pixels.shape[0] * pixels.shape[1] // self._side**2
            pictures.append(Picture.of(pixels, count, self._settings))
        return pictures

    def _target(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which a picture is resized, as the image processor does it."""
        target: tuple[int, int] = self._resize(height, width, self._side, **self._limits)
        return target

    def _resized(self, image: Image) -> Image:
        height, width = self._target(image.height, image.width)
        return image.resize((width, height), self._resample)

    def _positions(
        self, ids: Sequence[int], pictures: Sequence[Picture], begins: Sequence[int]
    ) -> tuple[torch.Tensor, int]:
        """Return a prompt's rotary positions [3, tokens], and the shift of those after it."""
        is_picture = torch.zeros(1, len(ids), dtype=torch.long)
        for picture, begin in zip(pictures, begins, strict=True):
            is_picture[0, begin : begin + picture.tokens] = 1
        patch = self._side // self._model.config.vision_config.spatial_merge_size
        grids = [[1, *(side // patch for side in each.pixels.shape[:2])] for each in pictures]
        positions, shift = self._model.model.get_rope_index(
            torch.tensor([list(ids)]),
            image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=is_picture,
        )
        return positions[:, 0], int(shift)


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Context in which a UsageError gets the number of the picture that it is about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"picture {number}: {error}") from error
