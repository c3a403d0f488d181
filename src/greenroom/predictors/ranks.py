"""From scores to guesses: what the predictors that count and learn have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import Guess, Ids
from greenroom.core.ranking import top

Floats = NDArray[np.float32]


def guess(layer: int, scores: Floats, width: int, above: float = 0.0) -> Guess:
    """The guess that scores [rows, E] stand for; those that are not `above` name no expert."""
    return Guess(layer, top(scores, width, above))


def for_all(one: Guess, layers: int, tokens: int) -> Guess:
    """A guess of one row for all tokens of its pass, where that is the pass under way."""
    if one.layer >= layers or tokens == 1:
        return one
    return Guess(one.layer, np.repeat(one.experts, tokens, axis=0))


def as_ids(experts: Ids) -> Ids:
    """In the one layout that compiled functions are compiled for."""
    return np.ascontiguousarray(experts, np.int64)


def taken(name: str, state: Mapping[str, NDArray[Any]], array: NDArray[Any]) -> None:
    """Fill an array from a saved state. ValueError where what is there does not fit."""
    saved = state.get(name)
    if saved is None or saved.shape != array.shape or saved.dtype != array.dtype:
        there = "missing" if saved is None else f"{saved.dtype}{list(saved.shape)}"
        raise ValueError(f"{name} is {there}, not {array.dtype}{list(array.shape)}")
    array[...] = saved


def same(name: str, state: Mapping[str, NDArray[Any]], value: int) -> None:
    """ValueError where a number of a saved state is not this one."""
    saved = state.get(name)
    if saved is None or saved.tolist() != [value]:
        raise ValueError(f"{name} is {saved}, not [{value}]")
