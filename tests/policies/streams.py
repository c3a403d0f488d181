"""Random and hand-made streams of requests."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import strategies as st

from greenroom.core.stream import Stream
from tests.policies.reference import Step

OFFSETS = [0, 4, 9, 12]  # three layers of 4, 5 and 3 experts
LAYERS = len(OFFSETS) - 1


def tokens(
    seed: int, count: int, wide: bool = False, rows: bool = False, weights: bool = False
) -> list[Step]:
    """Tokens of a few prompts through all layers; `wide` steps ask for up to a whole layer.

    With `rows` the first one or two passes of a prompt are its prefill.
    """
    chance, result, prompt, prefill = Random(seed), [], 0, rows
    for token in range(count):
        begins = token > 0 and chance.random() < 0.2
        prompt += begins
        prefill = rows and (token == 0 or begins or (prefill and token % 2 == 1))
        for layer, (first, end) in enumerate(pairwise(OFFSETS)):
            size = chance.randint(1, end - first if wide else 2)
            pieces = chance.sample(range(first, end), size)
            result.append(
                Step(
                    pieces,
                    token * LAYERS + layer,
                    token,
                    prompt,
                    layer,
                    [chance.randint(1, 3) for _ in pieces] if rows else [],
                    [chance.choice((0.25, 0.5, 1.0)) for _ in pieces] if weights else [],
                    prefill,
                )
            )
    return result


def steps(most: int = 20) -> st.SearchStrategy[list[Step]]:
    """Random tokens from a seed: to draw every expert would take longer than to serve it."""
    yes = st.booleans()
    return st.builds(tokens, st.integers(0, 2**32), st.integers(0, most), yes, yes, yes)


def as_stream(steps: list[Step]) -> Stream:
    """Convert steps to a stream of flat arrays."""
    flat = [piece for step in steps for piece in step.pieces]
    return Stream(
        pieces=np.array(flat, np.int32),
        starts=np.cumsum([0, *(len(step.pieces) for step in steps)]).astype(np.int64),
        now=np.array([step.clock for step in steps], np.int64),
        layer=np.array([step.layer for step in steps], np.int32),
        token=np.array([step.token for step in steps], np.int64),
        request=np.array([step.prompt for step in steps], np.int32),
        prefill=np.array([step.prefill for step in steps], np.bool_),
        rows=np.array([n for step in steps for n in step.rows], np.int32),
        weights=np.array([w for step in steps for w in step.weights], np.float32),
    )


def one_layer(*pieces: int) -> list[Step]:
    """One request a step, one step a token, all of one layer and prompt."""
    return [Step([p], i, i, 0, 0, [], []) for i, p in enumerate(pieces)]
