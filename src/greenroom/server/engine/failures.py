"""Where the exceptions of one request end: everything that its own work raises becomes one error.

with contained(): ...                 # leaves as a GreenroomError
with contained(give_up): ...          # give_up(error) is called instead, and nothing leaves

A request's own work is its template, tokens, grammar, sampler, the text of its answer, and passes
that it takes alone. Libraries raise there what they like; panics of Rust are no `Exception`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from greenroom.errors import DeviceError, GreenroomError

PASSES_THROUGH = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class RequestFailed(GreenroomError):
    """The work of one request raised an exception that nobody expected; it is the cause."""


def as_error(error: BaseException) -> GreenroomError:
    """An exception of any kind as an error that a client can be told."""
    if isinstance(error, GreenroomError):
        return error
    if isinstance(error, MemoryError):
        made: GreenroomError = DeviceError("there is no memory for the request")
    else:
        made = RequestFailed(f"the request failed in the server ({type(error).__name__})")
    made.__cause__ = error
    return made


@contextmanager
def contain_errors(give_up: Callable[[GreenroomError], object] | None = None) -> Iterator[None]:
    """Run the work of one request. What it raises is given to `give_up`, or raised as an error of
    ours."""
    try:
        yield
    except PASSES_THROUGH:
        raise
    except BaseException as error:
        found = as_error(error)
        if give_up is None:
            if found is error:
                raise
            raise found from error
        give_up(found)
