"""The module check detects each changed assumption of compiled code, and its restoration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from greenroom.runtime.kernels.dense.module_check import InputHook, ModuleCheck


def make_check() -> tuple[nn.Module, ModuleCheck]:
    """A linear layer in a parent, and what is taken for granted of both."""
    parent = nn.Sequential(nn.Linear(2, 2))
    check, part = ModuleCheck(), ModuleCheck()
    part.require_no_hooks(parent[0])
    part.require_weight(parent[0])
    check.require_same(parent._modules, "0", parent[0])
    check.require_same(vars(parent[0]), "forward", None)
    check.include(part)
    return parent, check


@contextmanager
def hooked(register: Callable[..., Any], *args: Any) -> Iterator[None]:
    handle = register(*args, lambda *_: None)
    yield
    handle.remove()


@contextmanager
def other_weight(linear: nn.Linear) -> Iterator[None]:
    original, linear.weight = linear.weight, nn.Parameter(torch.zeros(2, 2))
    yield
    linear.weight = original


@contextmanager
def other_forward(linear: nn.Linear) -> Iterator[None]:
    linear.forward = lambda x: x
    yield
    del linear.forward


@contextmanager
def other_part(parent: nn.Sequential) -> Iterator[None]:
    original, parent[0] = parent[0], nn.Identity()
    yield
    parent[0] = original


@pytest.mark.parametrize(
    "change",
    [
        lambda parent: hooked(parent[0].register_forward_hook),
        lambda parent: hooked(parent[0].register_forward_pre_hook),
        lambda parent: hooked(register_module_forward_hook),
        lambda parent: hooked(register_module_forward_pre_hook),
        lambda parent: other_weight(parent[0]),
        lambda parent: other_forward(parent[0]),
        other_part,
    ],
    ids=["hook", "pre-hook", "all", "all, pre", "weight", "forward", "part"],
)
def test_a_module_check_fails_while_a_module_is_changed(change: Callable[[nn.Module], Any]) -> None:
    parent, check = make_check()
    assert check.passes()
    with change(parent):
        assert not check.passes()
    assert check.passes()


def test_a_module_check_passes_after_weights_change_in_place() -> None:
    parent, check = make_check()
    with torch.no_grad():
        parent[0].weight.zero_()
    assert check.passes()


def test_a_module_check_may_allow_hooks_that_read_the_input() -> None:
    linear, check, seen = nn.Linear(2, 2), ModuleCheck(), []
    check.require_input_hooks(linear)
    handle = linear.register_forward_pre_hook(InputHook(seen.append), with_kwargs=True)
    assert check.passes()
    x = torch.ones(1, 2)
    linear(x)
    assert seen == [x]
    for register in (linear.register_forward_pre_hook, linear.register_forward_hook):
        with hooked(register):
            assert not check.passes()
    handle.remove()
    assert check.passes()
