"""Batch composition: which tokens the next forward passes compute.

Every running answer contributes one token. Prompts add a chunk of tokens to the same pass (chunked
prefill), so that answers go on while a long prompt is computed, and both use the same experts.
The chunk is small while answers run, since their next tokens wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from greenroom.server.engine.sequence import Sequence

Share = tuple[Sequence, int]  # a sequence, and how many of its pending tokens


def compose(running: Many[Sequence], chunk: int, block: int, exact: bool) -> list[list[Share]]:
    """Choose which pending tokens of the running requests the next forward passes compute.

    A pass is a list of (request, number of tokens). Each request that is being answered gets one
    token. Prompts share `chunk` tokens in order, or `block` tokens if no answer is running.

    With `exact`, the first prompt is cut into chunks as if it were alone, in a pass of its own.
    """
    singles = [(each, 1) for each in running if each.pending == 1 and each.computed]
    reading = [each for each in running if each.pending > 1 or not each.computed]
    if exact:
        chunks = [[(each, to_grid(each, chunk))] for each in reading[:1]]
        return [*([singles] if singles else []), *chunks]
    room, shares, scored = chunk if singles else block, list(singles), 0
    for each in reading:
        count = min(each.pending, room)
        if each.scores is not None:
            count = min(count, each.scores.pass_tokens - scored)
            scored += max(0, count)
        if count > 0:
            shares.append((each, count))
            room -= count
    return [shares] if shares else []


def to_grid(sequence: Sequence, chunk: int) -> int:
    """Return the number of tokens that complete a request's current prefill chunk.

    The result is smaller if fewer tokens are pending. `chunk` is the length of a complete chunk.
    """
    return min(sequence.pending, chunk - sequence.computed % chunk)


def split(passes: list[list[Share]], can_batch: Callable[[Many[int]], bool]) -> list[list[Share]]:
    """Split each forward pass that cannot be batched into passes of one request each.

    `can_batch` takes the numbers of tokens of the requests in a pass.
    """
    done: list[list[Share]] = []
    for shares in passes:
        if can_batch([count for _, count in shares]):
            done.append(shares)
        else:
            done += [[share] for share in shares]
    return done
