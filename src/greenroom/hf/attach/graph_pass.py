"""A decoder's forward for one token as one CUDA graph, where all experts have slots.

An expert may not be in its slot yet. Then the token is computed again by the decoder's own forward,
and so are the next ones until one misses nothing.

The graph is made of the decoder's own forward, and is compared with it for the first token: if
their results differ, or if the graph cannot be made, the decoder keeps its forward. Attention is
that of `token_attention` in both, so bits do not depend on which of them computes. It may have
sliding windows, sinks and latent keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import output_capturing

from greenroom.errors import DeviceError, StoreError
from greenroom.hf.attach import shared
from greenroom.hf.attach.module_guard import make_change_check
from greenroom.hf.attach.token_attention import (
    GraphCache,
    compile_attention,
    replace_attention,
    restore_attention,
)
from greenroom.hf.kv.single_token import count_token, layer_stamps, layer_states
from greenroom.hf.model.graph_decoder import graph_decoder
from greenroom.runtime.cuda.engine import Engine, device_errors, is_out_of_memory
from greenroom.runtime.cuda.piece_graph import Padded, PieceGraph, ThreadGraphs
from greenroom.runtime.cuda.token_graph import LayerStates, NoGraph, TokenGraph
from greenroom.runtime.forward import BINDING, Binding
from greenroom.runtime.kernels.dense.module_check import GLOBAL_HOOKS, OwnForwardHook
from greenroom.runtime.kernels.resident.decode_pass import ARGUMENTS
from greenroom.runtime.slots.resident_tables import SlotTables
from greenroom.runtime.token_step import serve_token

HIDDEN, CACHE = "last_hidden_state", "past_key_values"  # fields of a decoder's result

log = logging.getLogger(__name__)


class _Token(NamedTuple):
    """One token that a decoder's forward was called for, and its KV cache.

    before: the number of tokens before it
    stamps: those of the KV cache's `layers`
    states: where these store keys and values; None: where the graph knows
    graph:  that of the thread for the cache as it was; None: there is none yet
    """

    ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    layers: Sequence[Any]
    before: int
    stamps: list[int]
    states: Sequence[LayerStates] | None
    cache: Any
    graph: TokenGraph | None


class GraphPass:
    """A decoder's forward that computes single tokens as a graph, where all experts have slots."""

    def __init__(
        self,
        decoder: nn.Module,
        bindings: Sequence[Binding],
        engine: Engine,
        top_k: int,
        room: int,
        exact: bool,
        inputs: Sequence[object] = (),
    ) -> None:
        """Replace the attention of a decoder, and its forward if experts can be found by a device.

        bindings: those of the decoder's experts modules
        top_k:    experts that a token uses in a layer
        room:     the most tokens of a KV cache
        exact:    experts are those that the routers choose; else there is no graph
        inputs:   hooks that do nothing needed while no expert is predicted

        Prefetching is off until it was measured, since tokens that predict are no graphs.
        """
        self._decoder, self._bindings, self._engine = decoder, bindings, engine
        self._by_layer = {binding.layer: binding for binding in bindings}
        self._top_k, self._room = top_k, room
        config: Any = decoder.config
        self._driver = bindings[0].driver
        self._settings: tuple[Any, dict[str, Any]] = config, dict(vars(config))
        self._layers: int = config.num_hidden_layers
        self._original: Callable[..., Any] = decoder.forward
        self._threads, self._refused = ThreadGraphs(), False
        self._changed: Callable[[], bool] | None = None  # since the first graph was compared
        self._version = 0  # of the decoder's weights
        self._output: Callable[..., Any]  # the class of the decoder's result
        self._last_hook, self._hooked = -1, False  # the number of the last hook when they were seen
        self._inputs = inputs
        replace_attention(decoder)  # also without graphs: bits do not depend on a run's options
        if exact and all(binding.token_launches is not None for binding in bindings):
            decoder.forward = self.forward
            self._driver.predictions.start_off()

    @staticmethod
    def of(
        model: nn.Module,
        modules: Sequence[nn.Module],
        engine: Engine,
        top_k: int,
        room: int,
        exact: bool,
        inputs: Sequence[object] = (),
    ) -> GraphPass | None:
        """Replace attention and forward of a model's decoder; None if it cannot be a graph.

        modules: the model's experts modules; the other arguments are those of `GraphPass`
        """
        bindings: list[Binding] = [getattr(module, BINDING) for module in modules]
        decoder = graph_decoder(model, modules)
        if decoder is None:
            return None
        return GraphPass(decoder, bindings, engine, top_k, room, exact, inputs)

    def compile(self) -> None:
        """Compile the attention of single tokens now, by a trial computation."""
        compile_attention(self._decoder, self._bindings[0].experts.dtype, self._engine.device)

    def detach(self) -> None:
        """Give the decoder its own forward and attention back."""
        self._decoder.__dict__.pop("forward", None)
        restore_attention(self._decoder)
        self._threads = ThreadGraphs()  # whose graphs have memory

    def check_weights(self) -> None:
        """Let threads make new graphs if the decoder has other weights or submodules than theirs.

        Each thread drops its own ones: another one may be launching them.
        """
        changed = self._changed  # another thread may set it meanwhile
        if changed is not None and changed():
            self._changed, self._version = None, self._version + 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the decoder's output, as its own forward does."""
        self._threads.follow(self._version)
        token = None if args or self._refused else self._read_call(kwargs)
        if token is None:
            return self._original(*args, **kwargs)
        threads, graph = self._threads, token.graph  # another thread may resize the cache
        if graph is None:
            deferred = self._driver.deferred
            deferred.without_host = True  # a CPU rounds in another way
            try:
                return self._compare(token, kwargs)
            finally:
                deferred.without_host = False
        with device_errors():
            if isinstance(graph, PieceGraph):
                hidden = self._replay_pieces(graph, token)
            else:
                hidden = None if threads.missed else self._replay(graph, token)
        if hidden is None:
            return self._load_missing(kwargs)
        return self._output(**{HIDDEN: hidden, CACHE: token.cache})

    @property
    def _graph(self) -> TokenGraph | None:
        """The calling thread's graph for the present cache."""
        threads = self._threads
        return threads.graph if self._driver.all_have_slots else threads.pieces

    def _load_missing(self, kwargs: dict[str, Any]) -> Any:
        """Compute a token by the decoder's own forward, which loads the experts that it misses."""
        view = self._driver.scheduler.view
        misses = view.misses
        out = self._original(**kwargs)
        self._threads.missed = view.misses > misses
        return out

    def _read_call(self, kwargs: dict[str, Any]) -> _Token | None:
        """Read the arguments of the decoder's forward; None if a graph cannot compute them."""
        ids, cache = kwargs.get("input_ids"), kwargs.get(CACHE)
        driver = self._driver
        if (
            ids is None
            or ids.shape != (1, 1)
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or kwargs.get("use_cache") is False
            or driver.timeline is not None
            or driver.predictions.predicts
            or (driver.all_have_slots and not driver.resident.is_open)  # experts are being loaded
            or vars(self._settings[0]) != self._settings[1]
            or self._has_hooks()
        ):
            return None
        for name, value in kwargs.items():
            unasked = value is False and name.startswith("output_")
            if name not in ARGUMENTS and value is not None and not unasked:
                return None
        layers: Any = getattr(cache, "layers", ())
        if len(layers) != self._layers or not (stamps := layer_stamps(layers)):
            return None
        before, mask = layers[0].get_seq_length(), kwargs.get("attention_mask")
        graph, states = self._graph, None
        moved = graph is None or graph.stamps != stamps or before >= graph.until
        if moved and (states := layer_states(layers)) is None:
            return None
        positions = kwargs.get("position_ids")
        if mask is not None and getattr(mask, "shape", ()) != (1, before + 1):
            return None
        if before + 1 > self._room or (positions is not None and positions.shape != (1, 1)):
            return None
        return _Token(ids, positions, mask, layers, before, stamps, states, cache, graph)

    def _has_hooks(self) -> bool:
        """Check whether a submodule of the decoder has a hook, which a graph would not call."""
        if self._hooked or RemovableHandle.next_id != self._last_hook:  # torch numbers all hooks
            self._last_hook = RemovableHandle.next_id
            modules = list(self._decoder.modules())[1:]
            hooks = [hook for each in modules for hook in each._forward_hooks.values()]
            hooks += [hook for each in modules for hook in each._forward_pre_hooks.values()]
            hooks += [hook for each in GLOBAL_HOOKS for hook in each.values()]
            self._hooked = not all(hook in self._inputs or _does_nothing(hook) for hook in hooks)
        return self._hooked

    def _compare(self, token: _Token, kwargs: dict[str, Any]) -> Any:
        """Compute a token by the decoder's own forward, and compare a graph's pass with it."""
        if token.mask is not None and not token.mask.all():  # waits, until a token was compared
            return self._original(**kwargs)
        # Another thread's request sees it from now on.
        changed = self._changed = self._changed or make_change_check(self._decoder)
        out = self._original(**kwargs)
        if changed():  # another thread has replaced weights
            return out
        self._driver.deferred.settle()
        hidden = getattr(out, HIDDEN, None)
        if set(out) != {HIDDEN, CACHE} or hidden is None or hidden.shape[:2] != (1, 1):
            self._refused = True
            return out
        assert token.states is not None
        rows = [x[:, :, token.before - each.dropped] for each in token.states for x in each[:2]]
        last, success = list[Tensor](), False
        try:
            with device_errors("the graph of a token"):
                last += [row.clone() for row in rows]
                graph = self._try_graph(token, hidden, changed)
            if success := graph is not None:
                self._output = type(out)
                self._threads.keep(graph)  # until another thread has seen other weights
        except NoGraph as reason:
            log.info("--device cuda: single tokens are no graph: %s", reason)
            self._refused = True
        except StoreError as error:  # a later token is compared
            log.info("--device cuda: no graph of this token: %s", error)
        except DeviceError as error:
            if not is_out_of_memory(error.__cause__):
                raise
            log.warning("--device cuda: single tokens are no graph: %s", error)
            self._refused = True
        if not success and last:
            for row, values in zip(rows, last, strict=True):
                row.copy_(values)
        return out

    def _try_graph(
        self, token: _Token, hidden: Tensor, changed: Callable[[], bool]
    ) -> TokenGraph | None:
        """Make a graph; return it if a token has the result `hidden`, and weights have not changed.

        If another thread has taken an expert's slot meanwhile, a later token is compared.
        """
        graph, agrees = self._make_graph(hidden), False
        try:
            agrees = self._agrees(graph, token, hidden, changed)
        finally:
            if not agrees:
                graph.release()
        return graph if agrees else None

    def _agrees(
        self, graph: TokenGraph, token: _Token, hidden: Tensor, changed: Callable[[], bool]
    ) -> bool:
        self._set_token(graph, token)
        results, decode = [], partial(self._decode, graph)
        for compute in (graph.compute, graph.replay):  # kernel by kernel, then as a graph
            if isinstance(graph, PieceGraph):
                results.append(compute(decode))
                continue
            # Under the lock of steps: another thread's `close` must not free slots meanwhile.
            results.append(self._driver.device_steps.launch(compute, decode))
            if not graph.read_reports():
                return False
        if changed():
            return False
        if not all(torch.equal(each, hidden) for each in results):
            what = type(self._decoder).__name__
            log.warning("--device cuda: single tokens of %s have other bits as a graph", what)
            self._refused = True
            return False
        return True

    def _make_graph(self, hidden: Tensor) -> TokenGraph:
        moe, cache = len(self._bindings), GraphCache()
        parts = self._engine, self._layers, moe, self._top_k, self._room, hidden, cache
        if self._driver.all_have_slots:
            return TokenGraph(*parts)
        launch = self._driver.device_steps.launch
        return PieceGraph(*parts, launch=launch, serve=self._serve)

    def _serve(self, layer: int, launches: Any, then: Callable[[], None] | None) -> None:
        """Launch what a layer of a graph in pieces misses, and perhaps what follows."""
        serve_token(self._by_layer[layer], launches, then=then)

    def _decode(self, graph: TokenGraph) -> Tensor:
        """Compute the token that a graph's memory has, by the decoder's own forward."""
        # A mask of four dimensions is taken as it is, and this attention needs none.
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=graph.ids.device)
        out = self._original(
            input_ids=graph.ids, position_ids=graph.positions, attention_mask=mask,
            past_key_values=graph.cache, use_cache=True,
        )  # fmt: skip
        hidden: Tensor = out[HIDDEN]
        return hidden

    def _set_token(self, graph: TokenGraph, token: _Token) -> None:
        """Set what a graph computes next, behind all that the scheduler has yet to serve."""
        self._driver.deferred.settle()
        # The graph may still run on the stream before; no other thread's step may be under way.
        self._driver.device_steps.launch(self._driver.changes.follow_stream)
        if token.states is not None:
            graph.set_cache(token.stamps, token.states)
        graph.set_inputs(token.ids, token.positions, token.mask, token.before)

    def _replay(self, graph: TokenGraph, token: _Token) -> Tensor | None:
        """Compute one token as a graph; None if an expert was missing, or the mask is not full."""
        self._set_token(graph, token)
        results = list[Tensor]()

        def find(tables: SlotTables) -> Sequence[int]:
            results.append(graph.replay(lambda: self._decode(graph)))
            if not graph.read_reports() or not graph.mask_is_full:
                return ()
            chosen, layers = graph.chosen, graph.moe_layers
            numbers = self._driver.resident.record_use(chosen, layers)
            if (observe := self._bindings[0].on_routing) is not None:
                for layer, experts in zip(layers, chosen, strict=True):
                    observe(layer, experts[None].astype(np.int64))
            return numbers

        if not self._driver.resident_steps(graph.moe_layers, find):
            return None
        count_token(token.layers)
        return results[0]

    def _replay_pieces(self, graph: PieceGraph, token: _Token) -> Tensor | None:
        """Compute one token as a graph in pieces; None if the mask is not full."""
        self._set_token(graph, token)
        try:
            hidden = graph.replay(partial(self._decode, graph))
        except Padded:
            return None
        count_token(token.layers)
        return hidden


def _does_nothing(hook: Any) -> bool:
    """Tell whether a hook does nothing for a token whose experts are all in slots.

    Those of transformers stay after a call that asked for more outputs. Those of `shared` are for
    layers that wait for experts.
    """
    owners = {output_capturing.__name__, shared.__name__}
    return isinstance(hook, OwnForwardHook) or getattr(hook, "__module__", "") in owners
