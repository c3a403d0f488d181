"""The recorder: listens at the experts modules of a running model, and keeps what they are asked.

It sees the same passes as the driver (a pass begins where the layers begin again), so a trace
replayed in `runtime` order is what the run asked of its cache. Predictors run beside it, on their
own: what they say is recorded, nothing is fetched.
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
from greenroom.trace.segments import Header, Segment
from greenroom.trace.tensors import PREDICTED

FLUSH_BYTES = 1 << 20
FLUSH_S = 2.0
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of an experts forward


class SegmentSink(Protocol):
    """Where segments go: a journal, or memory. `tokens` were there before."""

    header: Header
    tokens: int

    def append(self, segment: Segment) -> None: ...


class Recorder:
    """Records one request after another into a journal; used with `with`, which ends listening.

    `modules` are the experts modules in the model's order, `embedding` the module that is given
    the token ids. Nothing is kept outside of a `request`. Gate inputs are those of a sample of
    tokens, drawn by `seed`; `probe` listens at the gates, without it they are what the experts are
    given. `forecasts` are of the predictors that the journal's header names.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        embedding: nn.Module,
        journal: SegmentSink,
        seed: int = 0,
        probe: GateInputProbe | None = None,
        forecasts: ForecastRecorder | None = None,
    ) -> None:
        self._journal, self._header = journal, journal.header
        self._probe, self._forecasts = probe, forecasts
        self._most = np.array(self._header.experts_per_layer)
        self._seed, self._open = seed, False
        self._hooks = [
            module.register_forward_pre_hook(self._listener(layer), with_kwargs=True)
            for layer, module in enumerate(modules)
        ]
        self._hooks.append(embedding.register_forward_pre_hook(self._embed))
        self.tokens = 0  # of all requests of this recorder

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._probe is not None:
            self._probe.detach()

    @contextmanager
    def request(self, number: int, label: str, prompt_tokens: int) -> Iterator[None]:
        """What runs inside is request `number`; its first `prompt_tokens` tokens are prefill."""
        self._number, self._label, self._prompt = number, label, prompt_tokens
        self._seen, self._flushed = 0, time.monotonic()
        self._random = np.random.default_rng([self._seed, number])
        self._layers: list[dict[str, NDArray[Any]]] = []
        self._given = self._ids = np.empty(0, np.int32)  # of the next pass, and of this one
        self._passes: list[tuple[int, bool]] = []
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._open = True
        try:
            yield
            self._end_pass()
            self._flush(last=True)
        except BaseException:
            self._flush(last=False)  # the passes that were whole; the one under way is not
            raise
        finally:
            self._open = False

    @outside_graphs
    def _embed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._open and args and not args[0].is_meta:
            self._given = args[0].flatten().cpu().numpy().astype(np.int32)

    def _listener(self, layer: int) -> Any:
        @outside_graphs
        def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._open:
                given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
                if not given["hidden_states"].is_meta:
                    self._take(layer, *(given[name] for name in _ARGUMENTS))

        return listen

    def _take(
        self, layer: int, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> None:
        if layer < len(self._layers):
            self._end_pass()
        if layer != len(self._layers):
            raise TraceError(
                f"a pass went to MoE layer {layer} after {len(self._layers)} others: a trace needs"
                " every layer in every pass"
            )
        if layer == 0:
            self._begin_pass(len(index))
        inputs = x if self._probe is None else self._probe.take_tensor(layer)
        inputs = inputs.detach().reshape(len(index), -1)
        taken: dict[str, NDArray[Any]] = {"experts": index.cpu().numpy().astype(np.uint16)}
        if self._header.weights:
            taken["weights"] = weights.detach().to(torch.float16).cpu().numpy()
        if self._header.gate_inputs:
            taken["inputs"] = _floats(inputs[torch.from_numpy(self._sampled)])
        self._layers.append(taken)
        if self._forecasts is not None:
            experts = index.cpu().numpy().astype(np.int64, copy=False)
            self._forecasts.layer(LayerRouting(layer, experts, _floats(weights), _floats(inputs)))

    def _begin_pass(self, tokens: int) -> None:
        self._ids = self._given
        if rate := self._header.gate_inputs:
            self._sampled = np.flatnonzero(self._random.random(tokens) < rate)
        if self._forecasts is not None:
            ids = self._ids.astype(np.int64) if len(self._ids) == tokens else None
            first, prefill = self._journal.tokens + self.tokens, self._seen < self._prompt
            self._forecasts.begin(PassStart(self._number, first, tokens, prefill, ids))

    def _end_pass(self) -> None:
        """Put the layers of the pass that is over side by side, and check them."""
        if not self._layers:
            return
        layers, self._layers = self._layers, []
        if len(layers) != len(self._most):
            raise TraceError(f"a pass used {len(layers)} of the {len(self._most)} MoE layers")
        if len({layer["experts"].shape for layer in layers}) > 1:
            raise TraceError("a pass has layers of different top-k, which a trace cannot hold")
        part = {name: np.stack([layer[name] for layer in layers], 1) for name in layers[0]}
        self._check(part["experts"])
        if self._forecasts is not None:
            said = self._forecasts.end()
            part |= {PREDICTED + name: said[name] for name in self._header.predictions}
        tokens = len(part["experts"])
        if self._header.token_ids:
            if len(self._ids) != tokens:
                raise TraceError("the model's tokens are not those of its embedding: no token ids")
            part["token_ids"] = self._ids
        size = sum(array.nbytes for part in self._parts for array in part.values())
        if size > FLUSH_BYTES or time.monotonic() > self._flushed + FLUSH_S:
            self._flush(last=False)  # before this pass is added: a request ends with one at hand
        if self._header.gate_inputs:
            part["sampled"] = self._sampled + sum(n for n, _ in self._passes)
        self._passes.append((tokens, self._seen < self._prompt))
        self._parts.append(part)
        self._seen += tokens
        self.tokens += tokens

    def _check(self, experts: NDArray[np.uint16]) -> None:
        """What `Trace` would refuse is refused now, and not when an hour has been recorded."""
        rows = np.sort(experts, axis=2)
        if (rows[..., -1] >= self._most).any() or (rows[..., 1:] == rows[..., :-1]).any():
            raise TraceError("a token has no expert at some rank, or one twice: not to be recorded")

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
