"""Containment of errors: an exception in one request's work ends that request alone.

with contain_errors(): ...                 # leaves as a GreenroomError
with contain_errors(give_up): ...          # give_up(error) is called instead, and nothing leaves

A request's own work is its template, tokens, grammar, sampler, the text of its answer, and passes
without other requests. Libraries raise exceptions of any type there; a panic in Rust is no
`Exception`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from greenroom.errors import DeviceError, GreenroomError

PASSES_THROUGH = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class RequestFailed(GreenroomError):
    """The work of one request raised an unexpected exception, which is the cause."""


def as_error(error: BaseException) -> GreenroomError:
    """Convert an exception of any type to an error that clients may see."""
    if isinstance(error, GreenroomError):
        return error
    if isinstance(error, MemoryError):
        failure: GreenroomError = DeviceError("there is not enough memory for the request")
    else:
        failure = RequestFailed(f"the request failed in the server ({type(error).__name__})")
    failure.__cause__ = error
    return failure


@contextmanager
def contain_errors(give_up: Callable[[GreenroomError], object] | None = None) -> Iterator[None]:
    """Run the work of one request, and confine its exceptions to that request.

    Exceptions go to `give_up`, or leave as a GreenroomError.
    """
    try:
        yield
    except PASSES_THROUGH:
        raise
    except BaseException as error:
        failure = as_error(error)
        if give_up is None:
            if failure is error:
                raise
            raise failure from error
        give_up(failure)
