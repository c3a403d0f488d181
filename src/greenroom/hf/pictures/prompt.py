"""The pictures of one prompt: their tokens, their positions, and the keys of its prefixes."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from greenroom.hf.pictures.tower import VisionTower

DIGEST_TOKENS = 8  # of a digest, one for each token; they are negative numbers of 32 bits
NEGATIVE = np.int32(-(1 << 31))


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture of the size that the model reads: RGB, [height, width, 3].

    tokens: the number of its tokens in a prompt
    digest: of its pixels, its size, and the settings with which the model reads it
    """

    pixels: NDArray[np.uint8]
    tokens: int
    digest: bytes

    @classmethod
    def of(cls, pixels: NDArray[np.uint8], tokens: int, settings: str) -> Picture:
        digest = hashlib.sha256(repr((pixels.shape, settings)).encode())
        digest.update(pixels.tobytes())
        return cls(pixels, tokens, digest.digest())

    def keys(self) -> NDArray[np.int32]:
        """Return numbers in place of its tokens, which other pictures and texts do not have.

        A picture whose digest needs more tokens than it has gets random numbers.
        """
        digest = (
            self.digest if self.tokens >= DIGEST_TOKENS else secrets.token_bytes(4 * DIGEST_TOKENS)
        )
        return np.resize(np.frombuffer(digest, np.int32) | NEGATIVE, self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class PromptPictures:
    """The pictures of one prompt, in order.

    tower:     encodes the pictures
    begins:    the index of each picture's first token
    positions: rotary positions of the prompt's tokens, [3, tokens]: time, height and width
    shift:     what is added to the index of a token after the prompt, for its position
    keys:      the prompt's tokens, with numbers in place of the pictures' ones: prompts with the
               same tokens and other pictures differ in them
    """

    tower: VisionTower
    pictures: tuple[Picture, ...]
    begins: tuple[int, ...]
    positions: Tensor
    shift: int
    keys: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pictures' pixels."""
        return sum(each.pixels.nbytes for each in self.pictures)


def expand(
    ids: Sequence[int], token: int, pictures: Sequence[Picture]
) -> tuple[list[int], list[int]]:
    """Repeat each picture's token `token` as often as the picture has tokens.

    Returns (token ids, index of each picture's first token). `ids` must have one such token for
    each picture.
    """
    expanded: list[int] = []
    begins: list[int] = []
    for each in ids:
        if each == token:
            begins.append(len(expanded))
            expanded += [token] * pictures[len(begins) - 1].tokens
        else:
            expanded.append(each)
    return expanded, begins


def prefix_keys(
    ids: Sequence[int], pictures: Sequence[Picture], begins: Sequence[int]
) -> NDArray[np.int64]:
    """Return a prompt's token ids, with the pictures' keys in place of their tokens."""
    keys = np.array(ids, np.int64)
    for picture, begin in zip(pictures, begins, strict=True):
        keys[begin : begin + picture.tokens] = picture.keys()
    return keys
