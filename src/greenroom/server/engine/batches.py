"""Which tokens go into the next passes.

Every answer that runs takes part with its one token; prompts fill the pass up with a chunk, so that
a long one is read beside answers that go on (chunked prefill), and what it fetches serves their
tokens too. The chunk is small while answers run, since they wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from greenroom.server.engine.sequence import Sequence

BLOCK = 512  # tokens of a pass that reads prompts while nobody else waits; the budget counts on it

Share = tuple[Sequence, int]  # a sequence, and how many of its pending tokens


def compose(running: Many[Sequence], chunk: int, exact: bool) -> list[list[Share]]:
    """The passes of the next round: each takes some tokens of some sequences.

    With `exact` a prompt is cut where it would be cut alone, and read in passes of its own.
    """
    singles = [(each, 1) for each in running if each.pending == 1 and each.computed]
    reading = [each for each in running if each.pending > 1 or not each.computed]
    if exact:
        chunks = [[(each, to_grid(each, chunk))] for each in reading[:1]]
        return [*([singles] if singles else []), *chunks]
    room, shares, scored = chunk if singles else BLOCK, list(singles), 0
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
    """Tokens up to the next multiple of `chunk`, or to the end of what is pending."""
    return min(sequence.pending, chunk - sequence.computed % chunk)


def split(passes: list[list[Share]], together: Callable[[Many[int]], bool]) -> list[list[Share]]:
    """The same passes, with those that cannot be one cut into one for each sequence."""
    done: list[list[Share]] = []
    for shares in passes:
        if together([count for _, count in shares]):
            done.append(shares)
        else:
            done += [[share] for share in shares]
    return done
