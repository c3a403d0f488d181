"""Exclusion of expert computation from the graphs of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_WHY = "Greenroom loads and computes experts outside of compiled graphs"


def outside_graphs(function: Function) -> Function:
    """Decorator that excludes a function from `torch.compile`, without cost when called.

    Dynamo ends its graph at a call of the function, and skips the function's code and all that the
    code calls. `torch.compiler.disable` does the same with a wrapper, which costs 1.5 microseconds
    a call; it is used only with versions of torch that cannot do without the wrapper. The functions
    are those of torch._dynamo.eval_frame; importing torch._dynamo takes 0.5 s.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
        from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
    except ImportError:
        return torch.compiler.disable(function, reason=_WHY)
    skip = FrameAction.SKIP
    set_code_exec_strategy(function.__code__, FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    return function
