"""What a block computes beside its experts: done while their transfers run, where that is possible.

Many blocks call their experts and then a shared expert with an input that they had all along. Which
module that is, how it is called and with what is learned by watching the first pass; nothing is
known of any architecture. From then on `meanwhile[layer]()`, called from within the experts
forward, computes the shared module, and the block's own call finds the output there. It is the same
function of the same input in the same thread, so bits are the same. Where the input is not the one
that the output was made of, the module computes as if nothing had been.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs

WORTH = 16  # vectors of the input's width: a module with fewer weights is not worth the trouble

_LITERALS = (type(None), bool, int, float, str)
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Shared:
    """The shared modules of a model; `modules` are its experts modules, in the model's order.

    Modules have hooks until the first pass is over: give a model its accelerated forwards before.

    meanwhile: a layer's callable, which does nothing where there is nothing to do
    found:     after the first pass, the shared modules by layer
    early:     after the first pass, the routers after which something else runs before the experts
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        paths = {id(module): name for name, module in model.named_modules()}
        taken: set[int] = set()
        self._layers = [
            _Layer([model.get_submodule(name) for name in _above(paths[id(module)])], module, taken)
            for module in modules
        ]
        self.meanwhile: dict[int, Callable[[], None]] = {
            n: layer.meanwhile for n, layer in enumerate(self._layers)
        }

    @property
    def found(self) -> dict[int, nn.Module]:
        return {n: each.call.module for n, each in enumerate(self._layers) if each.call is not None}

    @property
    def early(self) -> dict[int, nn.Module]:
        return {n: each.early for n, each in enumerate(self._layers) if each.early is not None}

    @property
    def used(self) -> int:
        """Calls whose output was there already."""
        return sum(layer.used for layer in self._layers)

    @property
    def wasted(self) -> int:
        """Outputs that were computed ahead and not asked for."""
        return sum(layer.wasted for layer in self._layers)

    def detach(self) -> None:
        """Take out of the model what was put in; a second call does nothing."""
        for layer in self._layers:
            layer.detach()


def _above(path: str) -> list[str]:
    """The modules around one, innermost first, up to the one that is a layer of the model."""
    names = path.split(".")[:-1]
    found = []
    while names:
        found.append(".".join(names))
        if names[-1].isdigit():
            break
        names.pop()
    return found or [""]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Where a tensor can be had before the experts run: an argument of a module, or its output."""

    module: nn.Module
    output: bool
    place: int | str


@dataclass(frozen=True, slots=True)
class _Call:
    """How a block calls its shared module: for each argument a source, or a literal."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def sources(self) -> list[_Source]:
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, _Source)]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A module was entered with `args` and `kwargs`, or left with an output (then its tensors)."""

    module: nn.Module
    output: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> Iterable[tuple[_Source, Tensor]]:
        places: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        for place, value in places:
            if isinstance(value, Tensor):
                yield _Source(self.module, self.output, place), value


class _Pass(threading.local):
    """What one thread's pass has seen of a layer; passes of other threads see their own."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []
        self.tensors: dict[_Source, Tensor] = {}
        self.grad = False
        self.stash: _Stash | None = None


class _Stash:
    """An output, and what it was made of: the same memory, not written since."""

    def __init__(self, output: Tensor, given: _Arguments) -> None:
        self.output, self._given = output, given
        self._marks = [_mark(value) for value in _values(given)]

    def is_of(self, given: _Arguments) -> bool:
        (args, kwargs), (mine, named) = given, self._given
        if len(args) != len(mine) or kwargs.keys() != named.keys():
            return False
        values = (*args, *(kwargs[name] for name in named))
        return all(map(_unchanged, values, _values(self._given), self._marks))


def _values(given: _Arguments) -> tuple[Any, ...]:
    return (*given[0], *given[1].values())


def _mark(value: Any) -> int | Tensor | None:
    """By which later writes are noticed: torch's count of them, or a copy where it keeps none."""
    if not isinstance(value, Tensor):
        return None
    return value.clone() if value.is_inference() else value._version


def _unchanged(value: Any, before: Any, mark: int | Tensor | None) -> bool:
    if not isinstance(value, Tensor) or not isinstance(before, Tensor):
        return value is before or (type(value) is type(before) and value == before)
    if not _same_memory(value, before) or value.is_inference() != before.is_inference():
        return False
    if isinstance(mark, Tensor):
        return torch.equal(_bits(value), _bits(mark))
    return value._version == mark


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
        and one.device == other.device
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class _Layer:
    """One experts module, the modules around it (innermost first), and those beside them."""

    def __init__(self, around: list[nn.Module], experts: nn.Module, taken: set[int]) -> None:
        self._around, self._experts, self._taken = around, experts, taken
        self._pass, self._lock = _Pass(), threading.Lock()
        self.call: _Call | None = None
        self.early: nn.Module | None = None
        self.used = self.wasted = 0
        self._forward: Callable[..., Any] | None = None  # what the shared module's was
        self._own: Callable[..., Any] | None = None  # what it is now
        self._shadowed: Callable[..., Any] | None = None  # what its instance had, if anything
        self._hooks: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        """Listen to everything that runs in the layer, for one pass."""
        first, last = self._around[-1], self._around[0]
        beside = [child for module in self._around for child in module.children()]
        add = self._hooks.append
        add(first.register_forward_pre_hook(lambda *_: self._pass.seen.clear()))
        for module in dict.fromkeys((last, *beside)):
            add(module.register_forward_pre_hook(self._entered, with_kwargs=True))
            add(module.register_forward_hook(self._left))
        add(first.register_forward_hook(lambda *_: self._learn()))

    @outside_graphs
    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pass.seen.append(_Seen(module, False, args, kwargs))

    @outside_graphs
    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        self._pass.seen.append(_Seen(module, True, outputs, {}))

    @outside_graphs
    def _learn(self) -> None:
        """The pass through the layer is over: find what can be done earlier, and stop watching."""
        seen, self._pass.seen = self._pass.seen, []
        if any(x.is_meta for event in seen for _, x in event.tensors()):
            return  # shapes only: watch the next one
        at = [n for n, event in enumerate(seen) if event.module is self._experts]
        with self._lock:
            if self._own is not None or not self._hooks:
                return  # another thread's pass was quicker
            self._unhook()
            if len(at) != 2:
                return  # called twice, or not at all: not of this kind
            before, after = seen[: at[0]], seen[at[1] + 1 :]
            self.early = _early_router(before, seen[at[0]], self._around)
            self.call = self._find_call(before, seen[at[0]], after)
            if self.call is not None:
                self._taken.add(id(self.call.module))
                self._install(self.call)

    def _find_call(self, before: list[_Seen], entry: _Seen, after: list[_Seen]) -> _Call | None:
        """The first worthwhile call after the experts whose arguments were all there before."""
        block = [e for e in before if not e.output and e.module is self._around[0]]
        there = [pair for e in (*block, entry, *before) for pair in e.tensors()]
        results = {id(e.module): e.args for e in after if e.output}
        for event in after:
            result = results.get(id(event.module), ())
            if event.output or event.module in self._around or id(event.module) in self._taken:
                continue
            if len(result) == 1 and isinstance(result[0], Tensor) and _worthwhile(event):
                try:
                    args = tuple(_found(value, there) for value in event.args)
                    kwargs = {name: _found(value, there) for name, value in event.kwargs.items()}
                except LookupError:
                    continue
                if (call := _Call(event.module, args, kwargs)).sources:
                    return call
        return None

    def _install(self, call: _Call) -> None:
        """Keep the sources of each pass, and give the shared module a forward that looks first."""
        for source in dict.fromkeys(call.sources):
            self._hooks.append(self._keep(source))
        here, module = self._pass, call.module
        original = self._forward = module.forward

        @outside_graphs
        def forward(*args: Any, **kwargs: Any) -> Any:
            stash, here.stash = here.stash, None
            if here.tensors:
                here.tensors = {}
            if stash is not None:
                if not torch.is_grad_enabled() and stash.is_of((args, kwargs)):
                    self.used += 1
                    return stash.output
                self.wasted += 1
            return original(*args, **kwargs)

        self._shadowed = module.__dict__.get("forward")
        self._own = module.forward = forward

    def _keep(self, source: _Source) -> Any:
        """Have a source's tensor noted in every pass. One that is called otherwise than it was has
        none, and then nothing is done ahead."""
        here, place, grad = self._pass, source.place, torch.is_grad_enabled

        @outside_graphs
        def keep(values: Any) -> None:
            here.grad = grad()
            try:
                here.tensors[source] = values[place]
            except LookupError:
                here.tensors.pop(source, None)

        module = source.module
        if source.output:
            return module.register_forward_hook(
                lambda _, args, output: keep(output if isinstance(output, tuple) else (output,))
            )
        if isinstance(place, str):
            return module.register_forward_pre_hook(
                lambda _, args, kwargs: keep(kwargs), with_kwargs=True
            )
        return module.register_forward_pre_hook(lambda _, args: keep(args))

    def meanwhile(self) -> None:
        """Compute the shared module now, with this pass's input; at most once a pass."""
        call, here = self.call, self._pass
        if call is None or here.grad or call.module.training or not here.tensors:
            return
        tensors, here.tensors = here.tensors, {}
        try:
            args = tuple(_filled(value, tensors) for value in call.args)
            kwargs = {name: _filled(value, tensors) for name, value in call.kwargs.items()}
        except LookupError:
            return
        if any(isinstance(x, Tensor) and x.is_meta for x in (*args, *kwargs.values())):
            return
        assert self._forward is not None
        self.wasted += here.stash is not None
        here.stash = None
        here.stash = _Stash(self._forward(*args, **kwargs), (args, kwargs))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def detach(self) -> None:
        with self._lock:
            self._unhook()
            module = None if self.call is None else self.call.module
            if module is not None and module.__dict__.get("forward") is self._own:
                if self._shadowed is None:
                    del module.forward
                else:
                    module.forward = self._shadowed
            self.call, self._own, self.early = None, None, None
            self._pass = _Pass()


def _early_router(before: list[_Seen], entry: _Seen, around: list[nn.Module]) -> nn.Module | None:
    """The module that chose the experts, if something worthwhile runs between it and them."""
    index = entry.args[1] if len(entry.args) > 1 else entry.kwargs.get("top_k_index")
    if not isinstance(index, Tensor):
        return None
    for n, event in enumerate(before):
        chose = event.output and any(_same_memory(x, index) for _, x in event.tensors())
        if chose and event.module not in around:
            between = [e for e in before[n + 1 :] if not e.output and e.module not in around]
            return event.module if any(map(_worthwhile, between)) else None
    return None


def _worthwhile(event: _Seen) -> bool:
    width = max((x.shape[-1] for _, x in event.tensors() if x.ndim), default=0)
    return sum(p.numel() for p in event.module.parameters()) > WORTH * width > 0


def _found(value: Any, there: list[tuple[_Source, Tensor]]) -> Any:
    """The source of an argument, or the argument where it is a literal; LookupError for others."""
    if isinstance(value, _LITERALS):
        return value
    if isinstance(value, Tensor):
        for source, tensor in there:
            if _same_memory(tensor, value):
                return source
    raise LookupError


def _filled(value: Any, tensors: Mapping[_Source, Tensor]) -> Any:
    return tensors[value] if isinstance(value, _Source) else value
