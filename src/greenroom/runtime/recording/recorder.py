"""Recorder of the experts that a running model's routers choose, by forward hooks.

The recorder counts forward passes as a run does: a pass begins with the first MoE layer. So a
replay of the trace (`--order runtime`) accesses the expert cache as the run did. Expert predictors
may be called too: their predictions are recorded, and nothing is fetched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.core.predictor import LayerRouting, PassStart
from greenroom.errors import TraceError
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.probes import GateInputProbe
from greenroom.runtime.recording.forecasts import ForecastRecorder
from greenroom.runtime.recording.outputs import OutputProbe
from greenroom.trace.segments import Header, Segment
from greenroom.trace.tensors import PREDICTED

FLUSH_BYTES = 1 << 20
FLUSH_S = 2.0
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of an experts forward


class SegmentSink(Protocol):
    """Protocol of a destination for recorded routing, such as a trace file's journal.

    `tokens` is the number of tokens that the destination contains.
    """

    header: Header
    tokens: int

    def append(self, segment: Segment) -> None: ...


class Recorder:
    """Context manager that records which experts a model's routers choose, request by request.

    modules: the experts modules, in the model's order
    embedding: the module whose input is the token ids
    journal: the destination of the recording
    seed: seed for the sample of tokens whose router inputs are recorded
    probe: captures router inputs; without a probe the inputs of the experts are recorded instead
    forecasts: runs the predictors that the journal's header names
    outputs: measures experts' outputs; needed if the journal's header asks for output norms

    Routing is recorded only within a `request` context.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        embedding: nn.Module,
        journal: SegmentSink,
        seed: int = 0,
        probe: GateInputProbe | None = None,
        forecasts: ForecastRecorder | None = None,
        outputs: OutputProbe | None = None,
    ) -> None:
        self._journal, self._header = journal, journal.header
        self._probe, self._forecasts, self._outputs = probe, forecasts, outputs
        self._expert_counts = np.array(self._header.experts_per_layer)
        self._seed, self._recording = seed, False
        self._hooks = [
            module.register_forward_pre_hook(self._make_hook(layer), with_kwargs=True)
            for layer, module in enumerate(modules)
        ]
        self._hooks.append(embedding.register_forward_pre_hook(self._capture_ids))
        self.tokens = 0  # recorded, of all requests

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for probe in (self._probe, self._outputs):
            if probe is not None:
                probe.detach()

    @contextmanager
    def request(self, number: int, label: str, prompt_tokens: int) -> Iterator[None]:
        """Record the routing of all forward passes within this context as one request.

        The request's first `prompt_tokens` tokens are recorded as prefill. If an exception ends the
        context, the complete passes are stored. Raises TraceError if a trace cannot store the
        routing.
        """
        self._number, self._label, self._prompt = number, label, prompt_tokens
        self._request_tokens, self._flushed = 0, time.monotonic()
        self._random = np.random.default_rng([self._seed, number])
        self._layers: list[dict[str, NDArray[Any]]] = []
        self._next_ids = self._ids = np.empty(
            0, np.int32
        )  # token ids of the next pass and of this one
        self._passes: list[tuple[int, bool]] = []
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._recording = True
        try:
            yield
            self._end_pass()
            self._flush(last=True)
        except BaseException:
            self._flush(last=False)  # the complete passes, without the current one
            raise
        finally:
            self._recording = False

    @outside_graphs
    def _capture_ids(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._recording and args and not args[0].is_meta:
            self._next_ids = args[0].flatten().cpu().numpy().astype(np.int32)

    def _make_hook(self, layer: int) -> Any:
        @outside_graphs
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recording:
                inputs = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
                if not inputs["hidden_states"].is_meta:
                    self._record_layer(layer, *(inputs[name] for name in _ARGUMENTS))

        return record

    def _record_layer(
        self, layer: int, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> None:
        if layer < len(self._layers):
            self._end_pass()
        if layer != len(self._layers):
            raise TraceError(
                f"a forward pass ran MoE layer {layer} after {len(self._layers)} others: routing"
                " can only be recorded if every pass runs all MoE layers, in order"
            )
        if layer == 0:
            self._begin_pass(len(index))
        inputs = x if self._probe is None else self._probe.take_tensor(layer)
        inputs = inputs.detach().reshape(len(index), -1)
        arrays: dict[str, NDArray[Any]] = {"experts": index.cpu().numpy().astype(np.uint16)}
        if self._header.weights:
            arrays["weights"] = weights.detach().to(torch.float16).cpu().numpy()
        if self._header.gate_inputs:
            arrays["inputs"] = _floats(inputs[torch.from_numpy(self._sampled)])
        self._layers.append(arrays)
        if self._forecasts is not None:
            experts = index.cpu().numpy().astype(np.int64, copy=False)
            self._forecasts.layer(LayerRouting(layer, experts, _floats(weights), _floats(inputs)))

    def _begin_pass(self, tokens: int) -> None:
        self._ids = self._next_ids
        if rate := self._header.gate_inputs:
            self._sampled = np.flatnonzero(self._random.random(tokens) < rate)
        if self._forecasts is not None:
            ids = self._ids.astype(np.int64) if len(self._ids) == tokens else None
            first, prefill = self._journal.tokens + self.tokens, self._request_tokens < self._prompt
            self._forecasts.begin(PassStart(self._number, first, tokens, prefill, ids))

    def _end_pass(self) -> None:
        """Check the recorded routing of the pass that has ended, and stack its layers."""
        if not self._layers:
            return
        layers, self._layers = self._layers, []
        if len(layers) != len(self._expert_counts):
            raise TraceError(
                f"a forward pass used {len(layers)} of the {len(self._expert_counts)} MoE layers:"
                " routing can only be recorded if every pass runs all MoE layers"
            )
        if len({layer["experts"].shape for layer in layers}) > 1:
            raise TraceError(
                "the MoE layers of a forward pass chose different numbers of experts per token: a"
                " trace cannot store different top-k"
            )
        part = {name: np.stack([layer[name] for layer in layers], 1) for name in layers[0]}
        self._check(part["experts"])
        if self._forecasts is not None:
            predicted = self._forecasts.end()
            part |= {PREDICTED + name: predicted[name] for name in self._header.predictions}
        if self._outputs is not None:
            part |= self._outputs.take()
        tokens = len(part["experts"])
        if self._header.token_ids:
            if len(self._ids) != tokens:
                raise TraceError(
                    f"the token ids of a forward pass are unknown: its embedding got"
                    f" {len(self._ids)} ids for {tokens} tokens"
                )
            part["token_ids"] = self._ids
        size = sum(array.nbytes for part in self._parts for array in part.values())
        if size > FLUSH_BYTES or time.monotonic() > self._flushed + FLUSH_S:
            self._flush(
                last=False
            )  # before this pass is added, since a request must end with a pass
        if self._header.gate_inputs:
            part["sampled"] = self._sampled + sum(n for n, _ in self._passes)
        self._passes.append((tokens, self._request_tokens < self._prompt))
        self._parts.append(part)
        self._request_tokens += tokens
        self.tokens += tokens

    def _check(self, experts: NDArray[np.uint16]) -> None:
        """Raise TraceError for recorded routing that `Trace` would refuse later."""
        rows = np.sort(experts, axis=2)
        if (rows[..., -1] >= self._expert_counts).any() or (rows[..., 1:] == rows[..., :-1]).any():
            raise TraceError(
                "a router chose an expert twice for one token, or an expert that the layer does not"
                " have: a trace cannot store this"
            )

    def _flush(self, last: bool) -> None:
        if self._passes:
            names = self._header.fields()
            arrays = {name: np.concatenate([p[name] for p in self._parts]) for name in names}
            self._journal.append(Segment(self._number, self._label, self._passes, last, arrays))
            self._passes, self._parts = [], []
        self._flushed = time.monotonic()


def _floats(values: torch.Tensor) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = values.detach().to("cpu", torch.float32).numpy()
    return floats
