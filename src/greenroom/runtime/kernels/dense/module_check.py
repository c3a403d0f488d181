"""Checks that modules are unchanged since code was compiled for them.

The checks run before every token, over a thousand small objects, on CPU caches that the weights
have just evicted. So nothing is looked up by module: a check holds the dictionaries and the
expected values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_globals

from greenroom.runtime.graphs import outside_graphs

# Hooks of all modules.
GLOBAL_HOOKS: tuple[Mapping[Any, Any], ...] = (
    module_globals._global_forward_hooks, module_globals._global_forward_pre_hooks,
)  # fmt: skip


class InputHook:
    """A forward pre-hook that only reads a module's first argument.

    Compiled code that computes the module calls `observe` with the same values instead. Their
    memory is reused for the next token.
    """

    def __init__(self, observe: Callable[[Tensor], None]) -> None:
        self.observe = observe

    @outside_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.observe(args[0] if args else kwargs["hidden_states"])


class OwnForwardHook:
    """A forward pre-hook for a module's own forward: compiled code need not call it."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    @outside_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hook(module, args, kwargs)


class ModuleCheck:
    """Conditions on modules that compiled code relies on.

    The conditions are that modules have no hooks, and the same submodules and weights as before.
    """

    def __init__(self) -> None:
        self._empty: list[Mapping[Any, Any]] = [*GLOBAL_HOOKS]
        self._observed: list[Mapping[Any, Any]] = []
        self._own_hooks: list[Mapping[Any, Any]] = []
        self._dictionaries: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []

    def require_no_hooks(self, module: nn.Module) -> None:
        """Require that a module has no forward hooks."""
        self._empty += (module._forward_hooks, module._forward_pre_hooks)

    def require_input_hooks(self, module: nn.Module) -> None:
        """Require that a module has no forward hooks but `InputHook`s."""
        self._empty.append(module._forward_hooks)
        self._observed.append(module._forward_pre_hooks)

    def require_own_hooks(self, module: nn.Module) -> None:
        """Require that a module has no forward hooks but `OwnForwardHook`s."""
        self._empty.append(module._forward_hooks)
        self._own_hooks.append(module._forward_pre_hooks)

    def require_same(self, dictionary: Any, name: str, value: object) -> None:
        """Require that a dictionary has the same object under a name.

        With the value None, the dictionary must have None or no entry under the name.
        """
        self._dictionaries.append(dictionary)
        self._names.append(name)
        self._values.append(value)

    def require_weight(self, module: nn.Module) -> None:
        """Require that a module's weight remains its present parameter."""
        self.require_same(module._parameters, "weight", module._parameters["weight"])

    def include(self, other: ModuleCheck) -> None:
        """Add all conditions of another check of modules."""
        self._empty += other._empty[len(GLOBAL_HOOKS) :]
        self._observed += other._observed
        self._own_hooks += other._own_hooks
        self._dictionaries += other._dictionaries
        self._names += other._names
        self._values += other._values

    def passes(self) -> bool:
        """Check that all required conditions on modules hold."""
        for hooks in self._observed:
            for hook in hooks.values():
                if type(hook) is not InputHook:
                    return False
        for hooks in self._own_hooks:
            for hook in hooks.values():
                if type(hook) is not OwnForwardHook:
                    return False
        return not any(self._empty) and all(
            map(is_, map(dict.get, self._dictionaries, self._names), self._values)
        )
