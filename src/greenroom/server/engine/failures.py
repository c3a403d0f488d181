"""Containment of errors: an exception in one request's work ends that request alone.

with contain_errors(): ...                 # raises a GreenroomError
with contain_errors(give_up): ...          # calls give_up(error) instead of raising it

A request's own work is its template, tokens, grammar, sampler, the text of its answer, and forward
passes without other requests. Libraries raise exceptions of any type there; a Rust panic is a
`BaseException`, but not an `Exception`. KeyboardInterrupt, SystemExit, GeneratorExit and
CancelledError are raised unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from greenroom.errors import DeviceError, GreenroomError
from greenroom.refusals import refusal_of

PASSES_THROUGH = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class RequestFailed(GreenroomError):
    """An unexpected exception in the work of one request; `__cause__` is that exception."""


def as_error(error: BaseException) -> GreenroomError:
    """Convert an exception of any type to a GreenroomError.

    A GreenroomError is returned unchanged, memory or a thread that the system refuses becomes a
    DeviceError, and any other exception becomes a RequestFailed whose message has only the
    exception's type.
    """
    if isinstance(error, GreenroomError):
        return error
    failure: GreenroomError | None = refusal_of(error)
    if isinstance(error, MemoryError):
        failure = DeviceError("there is not enough memory for the request: shorten it")
    if failure is None:
        failure = RequestFailed(f"the request failed in the server ({type(error).__name__})")
    failure.__cause__ = error
    return failure


@contextmanager
def contain_errors(give_up: Callable[[GreenroomError], object] | None = None) -> Iterator[None]:
    """Run the work of one request, and confine its exceptions to that request.

    An exception is converted by `as_error`, then passed to `give_up`, or raised if there is no
    `give_up`. KeyboardInterrupt, SystemExit, GeneratorExit and CancelledError are raised unchanged.
    """
    try:
        yield
    except PASSES_THROUGH:
        raise
    except BaseException as error:
        failure = as_error(error)
        try:
            if give_up is None:
                if failure is error:
                    raise
                raise failure from error
            give_up(failure)
        finally:
            del failure  # its traceback has this frame: a cycle would keep the request's KV cache
