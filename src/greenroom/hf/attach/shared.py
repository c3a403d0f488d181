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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs

WORTH = 16  # vectors of the input's width: a module with fewer weights is not worth the trouble

_Values = dict[int | str, Any]  # arguments or outputs, by their position or name


class SharedModules:
    """The shared modules of a model; `modules` are its experts modules, in the model's order.

    Modules have hooks until the first pass is over: give a model its accelerated forwards before.

    meanwhile: a layer's callable, which does nothing where there is nothing to do
    modules:   after the first pass, the shared modules by layer
    early:     after the first pass, the routers after which something else runs before the experts
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        paths = {id(module): name for name, module in model.named_modules()}
        taken: set[int] = set()
        self._layers = [
            _Layer([model.get_submodule(name) for name in _above(paths[id(module)])], module, taken)
            for module in modules
        ]
        self.meanwhile = {n: layer.meanwhile for n, layer in enumerate(self._layers)}

    @property
    def modules(self) -> dict[int, nn.Module]:
        return {n: each.shared for n, each in enumerate(self._layers) if each.shared is not None}

    @property
    def early_routers(self) -> dict[int, nn.Module]:
        return {n: each.early for n, each in enumerate(self._layers) if each.early is not None}

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
class _Seen:
    """A module was entered with some values, or left with them as its output."""

    module: nn.Module
    output: bool
    values: _Values

    def tensors(self) -> list[tuple[_Source, Tensor]]:
        return [
            (_Source(self.module, self.output, place), value)
            for place, value in self.values.items()
            if isinstance(value, Tensor)
        ]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Values:
    values: _Values = dict(enumerate(args))
    values.update(kwargs)
    return values


def _outputs(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


class _Pass(threading.local):
    """What one thread's pass has seen of a layer; passes of other threads see their own."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []
        self.tensors: dict[_Source, Tensor] = {}
        self.grad = False
        self.stash: _Stash | None = None


class _Stash:
    """An output, and the tensors that it was made of: the same memory, not written since."""

    def __init__(self, output: Tensor, given: dict[int | str, Tensor]) -> None:
        self.output = output
        self._given = {place: (value, _mark(value)) for place, value in given.items()}

    def is_of(self, given: _Values) -> bool:
        return given.keys() == self._given.keys() and all(
            _unchanged(given[place], *before) for place, before in self._given.items()
        )


def _mark(value: Tensor) -> int | Tensor:
    """By which later writes are noticed: torch's count of them, or a copy where it keeps none."""
    return value.clone() if value.is_inference() else value._version


def _unchanged(value: Any, before: Tensor, mark: int | Tensor) -> bool:
    if not isinstance(value, Tensor) or not _same_memory(value, before):
        return False
    if value.is_inference() != before.is_inference():
        return False
    if isinstance(mark, Tensor):
        return torch.equal(*(each.contiguous().view(torch.uint8) for each in (value, mark)))
    return value._version == mark


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
        and one.device == other.device
    )


class _Layer:
    """One experts module, the modules around it (innermost first), and those beside them."""

    def __init__(self, around: list[nn.Module], experts: nn.Module, taken: set[int]) -> None:
        self._around, self._experts, self._taken = around, experts, taken
        self._pass, self._lock = _Pass(), threading.Lock()
        self.shared: nn.Module | None = None
        self._call: dict[int | str, _Source] = {}  # the arguments of the shared module
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
        self._pass.seen.append(_Seen(module, False, _arguments(args, kwargs)))

    @outside_graphs
    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._pass.seen.append(_Seen(module, True, dict(enumerate(_outputs(output)))))

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
            if self._find_call(before, seen[at[0]], after):
                self._install()

    def _find_call(self, before: list[_Seen], entry: _Seen, after: list[_Seen]) -> bool:
        """Find the first worthwhile call after the experts whose arguments were all there before.
        False where there is none."""
        block = [e for e in before if not e.output and e.module is self._around[0]]
        there = [pair for e in (*block, entry, *before) for pair in e.tensors()]
        results = {id(e.module): [*e.values.values()] for e in after if e.output}
        for event in after:
            module = event.module
            if event.output or module in self._around or id(module) in self._taken:
                continue
            result = results.get(id(module), [])
            if len(result) == 1 and isinstance(result[0], Tensor) and _worthwhile(event):
                try:
                    call = {place: _found(value, there) for place, value in event.values.items()}
                except LookupError:
                    continue
                if call:
                    self.shared, self._call = module, call
                    self._taken.add(id(module))
                    return True
        return False

    def _install(self) -> None:
        """Keep the sources of each pass, and give the shared module a forward that looks first."""
        module: Any = self.shared
        for source in dict.fromkeys(self._call.values()):
            self._hooks.append(self._keep(source))
        here, original = self._pass, module.forward

        @outside_graphs
        def forward(*args: Any, **kwargs: Any) -> Any:
            stash, here.stash = here.stash, None
            if here.tensors:
                here.tensors = {}
            if stash is not None:
                if not torch.is_grad_enabled() and stash.is_of(_arguments(args, kwargs)):
                    self.used += 1
                    return stash.output
                self.wasted += 1
            return original(*args, **kwargs)

        self._shadowed = module.__dict__.get("forward")
        self._forward, self._own = original, forward
        module.forward = forward

    def _keep(self, source: _Source) -> Any:
        """Have a source's tensor noted in every pass. One that is called otherwise than it was has
        none, and then nothing is done ahead."""
        here, place, grad = self._pass, source.place, torch.is_grad_enabled

        @outside_graphs
        def keep(module: nn.Module, args: Any, given: Any) -> None:
            here.grad = grad()
            values = given if isinstance(place, str) else args
            if source.output:
                values = _outputs(given)
            try:
                here.tensors[source] = values[place]
            except LookupError:
                here.tensors.pop(source, None)

        if source.output:
            return source.module.register_forward_hook(keep)
        return source.module.register_forward_pre_hook(keep, with_kwargs=True)

    def meanwhile(self) -> None:
        """Compute the shared module now, with this pass's input; at most once a pass."""
        shared, here = self.shared, self._pass
        if shared is None or here.grad or shared.training or not here.tensors:
            return
        tensors, here.tensors = here.tensors, {}
        try:
            given = {place: tensors[source] for place, source in self._call.items()}
        except LookupError:
            return
        if not all(isinstance(x, Tensor) and not x.is_meta for x in given.values()):
            return
        assert self._forward is not None
        self.wasted += here.stash is not None
        here.stash = None
        args = [value for place, value in given.items() if isinstance(place, int)]
        kwargs = {place: value for place, value in given.items() if isinstance(place, str)}
        here.stash = _Stash(self._forward(*args, **kwargs), given)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def detach(self) -> None:
        with self._lock:
            self._unhook()
            module = self.shared
            if module is not None and module.__dict__.get("forward") is self._own:
                del module.forward
                if self._shadowed is not None:
                    module.forward = self._shadowed
            self.shared, self._own, self.early = None, None, None
            self._pass = _Pass()


def _early_router(before: list[_Seen], entry: _Seen, around: list[nn.Module]) -> nn.Module | None:
    """The module that chose the experts, if something worthwhile runs between it and them."""
    index = entry.values.get(1, entry.values.get("top_k_index"))
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


def _found(value: Any, there: list[tuple[_Source, Tensor]]) -> _Source:
    """The source of an argument; LookupError where it has none."""
    for source, tensor in there:
        if isinstance(value, Tensor) and _same_memory(tensor, value):
            return source
    raise LookupError
