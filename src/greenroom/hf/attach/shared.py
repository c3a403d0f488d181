"""Compute shared experts while the routed experts' weights are being transferred.

Many MoE blocks call their routed experts first and then a shared expert, which every token uses and
whose input exists before the routed experts run. Hooks on the first forward pass find the shared
expert's module and the source of its arguments, for any architecture. In later passes the module is
computed early, and the block's own call returns the result. Function, input and thread are the
same, so the output is bit-identical. If the block calls the module with another input, the module
computes as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.module_check import OwnForwardHook

WORTHWHILE = 16  # times the input's width: modules with fewer weights are not computed early

_Values = dict[int | str, Any]  # arguments or outputs, by their position or name
_Comparison = Callable[[Tensor, Tensor], bool]


class SharedModules:
    """Modules of a model's shared experts, found by hooks on its first forward pass.

    compute_early: by layer, a function that computes the layer's shared experts now; it does
                   nothing if the layer has none
    modules:       the layer's module of shared experts, by layer; known after the first pass
    early_routers: by layer, the router if another module runs between it and the experts; known
                   after the first pass

    Create the object after compiled layers are installed. It hooks modules until the first pass
    ends, and layers with hooks would not be compiled.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[nn.Module], on_gpu: bool = False
    ) -> None:
        """Register hooks that find the shared experts of each layer in the first pass.

        modules: the experts modules of the MoE layers, in the model's order
        on_gpu:  a GPU computes them, whose values the host should not wait for
        """
        paths = {id(module): name for name, module in model.named_modules()}
        claimed: set[int] = set()
        self._layers = [
            _Layer(
                [model.get_submodule(name) for name in containers(paths[id(module)])],
                module,
                claimed,
                on_gpu,
            )
            for module in modules
        ]
        self.compute_early = {n: layer.compute_early for n, layer in enumerate(self._layers)}

    @property
    def modules(self) -> dict[int, nn.Module]:
        return {n: each.shared for n, each in enumerate(self._layers) if each.shared is not None}

    @property
    def early_routers(self) -> dict[int, nn.Module]:
        return {n: each.early for n, each in enumerate(self._layers) if each.early is not None}

    def detach(self) -> None:
        """Remove hooks and restore forwards of shared experts; a second call does nothing."""
        for layer in self._layers:
            layer.detach()


def containers(path: str) -> list[str]:
    """Return the names of the modules that contain a module, innermost first.

    The last name is that of the decoder layer, whose name ends with a number.
    """
    names = path.split(".")[:-1]
    modules = []
    while names:
        modules.append(".".join(names))
        if names[-1].isdigit():
            break
        names.pop()
    return modules or [""]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Source of a tensor before the experts run: a module's argument or output."""

    module: nn.Module
    output: bool
    place: int | str


@dataclass(frozen=True, slots=True)
class _CallEvent:
    """A module's call with its arguments, or its return with its output."""

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


class _PassState(threading.local):
    """State of one thread's forward pass through a layer."""

    def __init__(self) -> None:
        self.events: list[_CallEvent] = []
        self.tensors: dict[_Source, Tensor] = {}
        self.grad = False
        self.result: _Result | None = None


class _Result:
    """Output of a shared-expert module, with the arguments that it was computed from."""

    def __init__(self, output: Tensor, arguments: dict[int | str, Tensor]) -> None:
        self.output = output
        self._arguments = {place: (value, _version(value)) for place, value in arguments.items()}

    def is_for(self, arguments: _Values, equal: _Comparison) -> bool:
        """Check that arguments are the tensors of the computation, with unchanged values."""
        return arguments.keys() == self._arguments.keys() and all(
            _unchanged(arguments[place], *before, equal)
            for place, before in self._arguments.items()
        )


def _version(value: Tensor) -> int | Tensor:
    """Return torch's count of in-place writes to a tensor, or a copy of the tensor.

    torch does not count writes to inference tensors; they are copied, to compare values later.
    """
    return value.clone() if value.is_inference() else value._version


def _unchanged(
    value: Any, before: Tensor, version: int | Tensor, equal: _Comparison = torch.equal
) -> bool:
    if not isinstance(value, Tensor) or not _same_memory(value, before):
        return False
    if value.is_inference() != before.is_inference():
        return False
    if isinstance(version, Tensor):
        return equal(*(each.contiguous().view(torch.uint8) for each in (value, version)))
    return value._version == version


def _assert_equal(one: Tensor, other: Tensor) -> bool:
    """Have the device fail if the values of two tensors differ, without waiting for it."""
    message = "a shared expert's input changed before its module was called"
    torch._assert_async((one == other).all(), message)
    return True


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
        and one.device == other.device
    )


class _Layer:
    """One experts module, and the modules that contain it (innermost first)."""

    def __init__(
        self, around: list[nn.Module], experts: nn.Module, claimed: set[int], on_gpu: bool
    ) -> None:
        self._around, self._experts, self._claimed = around, experts, claimed
        self._on_gpu = on_gpu
        self._state, self._lock = _PassState(), threading.Lock()
        self.shared: nn.Module | None = None
        self._arguments_from: dict[int | str, _Source] = {}  # the arguments of the shared module
        self.early: nn.Module | None = None
        self.used = self.wasted = 0
        self._original: Callable[..., Any] | None = None  # the shared module's forward before
        self._replacement: Callable[..., Any] | None = None  # its forward now
        self._instance_forward: Callable[..., Any] | None = None  # the instance's own, if any
        self._hooks: list[Any] = []
        self._record_events()

    def _record_events(self) -> None:
        """Record the calls of all modules in the layer during one forward pass."""
        first, last = self._around[-1], self._around[0]
        children = [child for module in self._around for child in module.children()]
        add = self._hooks.append
        add(first.register_forward_pre_hook(lambda *_: self._state.events.clear()))
        for module in dict.fromkeys((last, *children)):
            add(module.register_forward_pre_hook(self._on_enter, with_kwargs=True))
            add(module.register_forward_hook(self._on_exit))
        add(first.register_forward_hook(lambda *_: self._analyse()))

    @outside_graphs
    def _on_enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._state.events.append(_CallEvent(module, False, _arguments(args, kwargs)))

    @outside_graphs
    def _on_exit(self, module: nn.Module, args: Any, output: Any) -> None:
        self._state.events.append(_CallEvent(module, True, dict(enumerate(_outputs(output)))))

    @outside_graphs
    def _analyse(self) -> None:
        """Find the shared experts and the early router from the recorded calls; stop recording.

        After a pass on the meta device, recording goes on for another pass.
        """
        events, self._state.events = self._state.events, []
        if any(x.is_meta for event in events for _, x in event.tensors()):
            return  # shapes only: record the next pass
        at = [n for n, event in enumerate(events) if event.module is self._experts]
        with self._lock:
            if self._replacement is not None or not self._hooks:
                return  # another thread's pass was quicker
            self._unhook()
            if len(at) != 2:
                return  # the experts are called twice, or not at all
            before, after = events[: at[0]], events[at[1] + 1 :]
            self.early = _early_router(before, events[at[0]], self._around)
            if self._find_shared_module(before, events[at[0]], after):
                self._install()

    def _find_shared_module(
        self, before: list[_CallEvent], entry: _CallEvent, after: list[_CallEvent]
    ) -> bool:
        """Find a large enough module that is called after the experts and can run before them.

        All of its arguments must exist before the experts run. Returns whether there is one.
        """
        block = [e for e in before if not e.output and e.module is self._around[0]]
        sources = [pair for e in (*block, entry, *before) for pair in e.tensors()]
        results = {id(e.module): [*e.values.values()] for e in after if e.output}
        for event in after:
            module = event.module
            if event.output or module in self._around or id(module) in self._claimed:
                continue
            result = results.get(id(module), [])
            if len(result) == 1 and isinstance(result[0], Tensor) and _worthwhile(event):
                try:
                    arguments = {
                        place: _source_of(value, sources) for place, value in event.values.items()
                    }
                except LookupError:
                    continue
                if arguments:
                    self.shared, self._arguments_from = module, arguments
                    self._claimed.add(id(module))
                    return True
        return False

    def _install(self) -> None:
        """Capture the shared module's arguments in each pass, and replace its forward."""
        module: Any = self.shared
        for source in dict.fromkeys(self._arguments_from.values()):
            self._hooks.append(self._capture(source))
        state, original = self._state, module.forward

        @outside_graphs
        def forward(*args: Any, **kwargs: Any) -> Any:
            result, state.result = state.result, None
            if state.tensors:
                state.tensors = {}
            if result is not None:
                # What the model's code once left unchanged is not waited for again.
                equal = _assert_equal if self._on_gpu and self.used else torch.equal
                if not torch.is_grad_enabled() and result.is_for(_arguments(args, kwargs), equal):
                    self.used += 1
                    return result.output
                self.wasted += 1
            return original(*args, **kwargs)

        self._instance_forward = module.__dict__.get("forward")
        self._original, self._replacement = original, forward
        module.forward = forward

    def _capture(self, source: _Source) -> Any:
        """Register a hook that captures one argument of the shared module in every pass.

        If a module is called with other arguments than in the first pass, nothing is captured, and
        the shared module is not computed early in that pass.
        """
        state, place, grad = self._state, source.place, torch.is_grad_enabled

        @outside_graphs
        def capture(module: nn.Module, args: Any, kwargs_or_output: Any) -> None:
            state.grad = grad()
            values = kwargs_or_output if isinstance(place, str) else args
            if source.output:
                values = _outputs(kwargs_or_output)
            try:
                state.tensors[source] = values[place]
            except LookupError:
                state.tensors.pop(source, None)

        if source.output:
            return source.module.register_forward_hook(capture)
        # Compiled layers compute their shared expert themselves.
        hook = OwnForwardHook(capture)
        return source.module.register_forward_pre_hook(hook, with_kwargs=True)

    def compute_early(self) -> None:
        """Compute a layer's shared experts now, at most once per forward pass."""
        shared, state = self.shared, self._state
        if shared is None or state.grad or shared.training or not state.tensors:
            return
        tensors, state.tensors = state.tensors, {}
        try:
            values = {place: tensors[source] for place, source in self._arguments_from.items()}
        except LookupError:
            return
        if not all(isinstance(x, Tensor) and not x.is_meta for x in values.values()):
            return
        assert self._original is not None
        self.wasted += state.result is not None
        state.result = None
        args = [value for place, value in values.items() if isinstance(place, int)]
        kwargs = {place: value for place, value in values.items() if isinstance(place, str)}
        state.result = _Result(self._original(*args, **kwargs), values)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def detach(self) -> None:
        with self._lock:
            self._unhook()
            module = self.shared
            if module is not None and module.__dict__.get("forward") is self._replacement:
                del module.forward
                if self._instance_forward is not None:
                    module.forward = self._instance_forward
            self.shared, self._replacement, self.early = None, None, None
            self._state = _PassState()


def _early_router(
    before: list[_CallEvent], entry: _CallEvent, around: list[nn.Module]
) -> nn.Module | None:
    """Return a layer's router if another large module runs between it and the experts."""
    index = entry.values.get(1, entry.values.get("top_k_index"))
    if not isinstance(index, Tensor):
        return None
    for n, event in enumerate(before):
        chose = event.output and any(_same_memory(x, index) for _, x in event.tensors())
        if chose and event.module not in around:
            between = [e for e in before[n + 1 :] if not e.output and e.module not in around]
            return event.module if any(map(_worthwhile, between)) else None
    return None


def _worthwhile(event: _CallEvent) -> bool:
    width = max((x.shape[-1] for _, x in event.tensors() if x.ndim), default=0)
    return sum(p.numel() for p in event.module.parameters()) > WORTHWHILE * width > 0


def _source_of(value: Any, sources: list[tuple[_Source, Tensor]]) -> _Source:
    """Return the call that a shared module's argument comes from; LookupError if there is none."""
    for source, tensor in sources:
        if isinstance(value, Tensor) and _same_memory(tensor, value):
            return source
    raise LookupError
