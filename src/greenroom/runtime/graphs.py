"""What `torch.compile` must not trace: code that reads experts, or hands addresses to kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_WHY = "Greenroom loads and computes experts outside of compiled graphs"


def outside_graphs(function: Function) -> Function:
    """Have compiled models call a Python function as it is, between two graphs.

    `torch.compiler.disable` says the same by a wrapper, which costs every call a microsecond and a
    half, compiled or not. Here Dynamo skips the function's code and all that it calls, and ends a
    graph where it is called. A torch without these marks gets the wrapper.
    """
    try:
        from torch._dynamo.eval_frame import set_code_exec_strategy
        from torch._dynamo.types import FrameAction, FrameExecStrategy
    except ImportError:
        return torch.compiler.disable(function, reason=_WHY)
    skip = FrameAction.SKIP
    set_code_exec_strategy(function.__code__, FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    return function
