"""Training of the network that corrects the eviction policy `next-use`, from recorded routing.

The policy first learns online from the recorded requests, pass by pass. The network learns to
correct its estimates at every step of a layer: the target of an expert is the optimal value,
discount ** (T - 1), where T is the number of passes until the layer uses the expert. The loss is
the cross entropy of the corrected value and the target. `policies/helpers/next_use_network.py`
explains the network, and computes it in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as keep
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from greenroom.config.study import TrainPolicyConfig
from greenroom.core.cache.state import empty_state
from greenroom.core.compiling.compile_cache import jit
from greenroom.core.pieces import Ints
from greenroom.core.policy import Arrays, CacheState, LogicalTime
from greenroom.core.stream import Stream
from greenroom.errors import TraceError
from greenroom.policies.helpers import next_use_network as net
from greenroom.policies.next_use import next_use, on_request, on_step

CHUNK = 128  # passes: longer requests are cut
BATCH = 8  # chunks
LEARNING_RATE = 3e-3  # of AdamW at its highest
DECAY = 0.3  # of weights
DROPOUT = 0.5  # of the past and of hidden vectors
LEAST_PASSES = 256
MOST_BYTES = 4 << 30  # of inputs; of a longer trace the last passes are taken
MOST_CELLS = 1 << 21  # of a batch: passes times layers times experts

Floats = NDArray[np.float32]
OnEpoch = Callable[[int], None]


class _Steps(NamedTuple):
    """Inputs and targets of the network, for T passes of L layers with E experts.

    used:     for each step 1 / the number of its experts where an expert is used, else 0, [T, L, E]
    features: sum and terms of the policy's estimates, [T, L, F, E]
    targets:  optimal values, [T, L, E]
    """

    used: NDArray[np.float16]
    features: Floats
    targets: NDArray[np.float16]


def train_policy(
    stream: Stream, offsets: Ints, config: TrainPolicyConfig, on_epoch: OnEpoch = lambda done: None
) -> Arrays:
    """Train the policy `next-use` on recorded requests; return what it has learned.

    stream:  the requests, in order `runtime` or `natural`
    offsets: the first expert id of each layer, and the number of all experts, [layers + 1]

    The arrays are those of the policy's learned state, with the network's. `on_epoch` is called
    with the number of finished epochs. TraceError if there are too few passes.
    """
    layers, experts = len(offsets) - 1, int(np.diff(offsets).max())
    passes = stream.layer.size // layers
    if passes < LEAST_PASSES:
        raise TraceError(
            f"the trace has {passes} passes to train on: at least {LEAST_PASSES} are needed"
        )
    first = max(0, passes - MOST_BYTES // (layers * experts * (4 * net.FEATURES + 4)))
    steps, learned = _observe(stream, offsets, first)
    scale = float(np.median(np.diff(stream.starts)))
    network = _Network(layers, experts, scale, config.seed)
    _fit(network, steps, _chunks(stream.request[first * layers :: layers]), config, on_epoch)
    return learned | {net.PREFIX + name: array for name, array in network.arrays().items()}


def _chunks(request: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Cut passes into chunks of one request each: first pass and end."""
    starts = np.flatnonzero(np.concatenate([[True], np.diff(request) != 0]))
    bounds = zip(starts.tolist(), [*starts[1:].tolist(), request.size], strict=True)
    return [
        (begin, min(stop, begin + CHUNK))
        for start, stop in bounds
        for begin in range(start, stop, CHUNK)
    ]


def _observe(stream: Stream, offsets: Ints, first: int) -> tuple[_Steps, dict[str, Any]]:
    """Let the policy learn from all requests, without a cache.

    Returns the steps from pass `first` on, and what the policy has learned at the end.
    """
    layers, experts = len(offsets) - 1, int(np.diff(offsets).max())
    layer = np.repeat(np.arange(layers), np.diff(offsets))
    cache = empty_state(layer, [1])
    state = next_use.build_state(next_use.setup(layer, cache.group_of, (1,), layers, 0, None))
    passes = stream.layer.size // layers - first
    features = np.zeros((passes * layers, net.FEATURES, experts), np.float32)
    _learner()(cache, state, stream, first * layers, features)
    used, targets = _used_and_targets(stream, offsets, first, state.discount)
    shaped = features.reshape(passes, layers, net.FEATURES, experts)
    return _Steps(used, shaped, targets), dict(next_use.export_learned(state))


@keep
def _learner() -> Any:
    return jit(_learn, _nrt=False)


def _learn(cache: CacheState, state: Any, stream: Stream, first: int, features: Floats) -> None:
    """Let the policy learn from a stream; write its features from step `first` on, [S, F, E]."""
    request = -1
    for s in range(stream.layer.size):
        a, b, layer = stream.starts[s], stream.starts[s + 1], stream.layer[s] + 0
        now = LogicalTime(stream.now[s], stream.token[s], stream.request[s] + 0, layer, 0, a)
        if stream.request[s] != request:
            request = stream.request[s] + 0
            on_request(cache, state, now)
        on_step(cache, state, stream.pieces[a:b], stream.rows[a:b], stream.weights[a:b], now)
        if s >= first:
            for i in range(state.begin[layer + 1] - state.begin[layer]):
                features[s - first, 0, i] = net.score_of(state.value[layer, i])
                for k in range(net.FEATURES - 1):
                    features[s - first, 1 + k, i] = state.features[k, layer, i]


def _used_and_targets(
    stream: Stream, offsets: Ints, first: int, discount: float
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Return used experts and optimal values from pass `first` on, [T, L, E]."""
    layers, experts = len(offsets) - 1, int(np.diff(offsets).max())
    sizes = np.diff(stream.starts)
    step = np.repeat(np.arange(sizes.size), sizes)
    used = np.zeros((sizes.size, experts), np.float16)
    used[step, stream.pieces - offsets[stream.layer[step]]] = 1 / sizes[step]
    used = used.reshape(-1, layers, experts)[first:]
    targets, value = np.zeros_like(used), np.zeros((layers, experts), np.float32)
    for at in range(len(used) - 1, -1, -1):
        targets[at] = value
        value = np.where(used[at] > 0, np.float32(1), np.float32(discount) * value)
    return used, targets


class _Network(nn.Module):
    """The network of `next_use_network.py` in torch, with vectors of expert sets times `scale`."""

    def __init__(self, layers: int, experts: int, scale: float, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale, hidden = scale, net.HIDDEN
        self.vectors = nn.Parameter(0.1 * torch.randn(layers, experts, 3, hidden))
        self.recurrent = nn.Parameter(0.05 * torch.randn(layers, hidden, hidden))
        self.offset = nn.Parameter(torch.zeros(layers, hidden))
        self.output = nn.Parameter(torch.zeros(layers, hidden, experts))
        self.constant = nn.Parameter(torch.zeros(layers, experts))
        self.linear = nn.Parameter(torch.zeros(layers, net.FEATURES))
        self.feature_weights = nn.Parameter(0.3 * torch.randn(layers, net.FEATURES, net.UNITS))
        self.feature_offsets = nn.Parameter(torch.zeros(layers, net.UNITS))
        self.units = nn.Parameter(torch.zeros(layers, net.UNITS))
        self.gates = nn.GRU(hidden, hidden, batch_first=True)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, used: Tensor, features: Tensor) -> Tensor:
        """Return corrected sums [B, T, L, E] of used [B, T, L, E] and features [B, T, L, F, E]."""
        batch, passes, layers, experts = used.shape
        share = layers**-0.5 * self.vectors[:, :, net.SO_FAR]
        so_far = torch.bmm(_by_layer(used), share).cumsum(0)
        past, _ = self.gates(self.drop(so_far[-1]).view(batch, passes, -1))
        past = self.drop(_later(past).reshape(1, batch * passes, -1)).expand(layers, -1, -1)
        hidden = (
            so_far
            + torch.bmm(_by_layer(used), self.vectors[:, :, net.STEP])
            + torch.bmm(_by_layer(_later(used)), self.vectors[:, :, net.BEFORE])
            + torch.bmm(past, self.recurrent)
            + self.offset[:, None]
        )
        sums = torch.bmm(self.drop(torch.relu(hidden)), self.output) + self.constant[:, None]
        sums = sums.view(layers, batch, passes, experts).permute(1, 2, 0, 3)
        units = torch.einsum("btlfe,lfu->btleu", features, self.feature_weights)
        units = units + self.feature_offsets[:, None]
        units = torch.einsum("btleu,lu->btle", nn.functional.softsign(units), self.units)
        linear = torch.einsum("btlfe,lf->btle", features, self.linear)
        return features[:, :, :, 0] + linear + units + sums

    def arrays(self) -> dict[str, Floats]:
        """Return the trained arrays as a run reads them."""
        arrays: dict[str, Floats] = {
            name: each.detach().cpu().numpy().copy()
            for name, each in self.named_parameters()
            if name in net.TRAINED
        }
        arrays["vectors"] *= self.scale
        arrays["vectors"][:, :, net.SO_FAR] *= len(arrays["vectors"]) ** -0.5
        gates = {name: each.cpu() for name, each in self.gates.state_dict().items()}
        for name, end in (("gates_input", "ih_l0"), ("gates_past", "hh_l0")):
            weight = gates[f"weight_{end}"].view(3, net.HIDDEN, net.HIDDEN)
            arrays[name] = weight.transpose(1, 2).contiguous().numpy()
            arrays[f"{name}_offset"] = gates[f"bias_{end}"].view(3, -1).numpy().copy()
        return arrays


def _by_layer(sets: Tensor) -> Tensor:
    """Reorder [B, T, L, E] to [L, B * T, E]."""
    return sets.flatten(0, 1).transpose(0, 1)


def _later(values: Tensor) -> Tensor:
    """Shift values along the second dimension, the passes, by one; the first ones are zero."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)


def _batch_size(steps: _Steps) -> int:
    """Return the number of chunks in a batch."""
    return max(1, min(BATCH, MOST_CELLS // (CHUNK * steps.used[0].size)))


def _batches(
    steps: _Steps, chunks: list[tuple[int, int]], scale: float
) -> Iterator[tuple[Tensor, ...]]:
    """Yield used experts, features, targets, and a mask of passes, of some chunks each."""
    number = _batch_size(steps)
    for at in range(0, len(chunks), number):
        some = chunks[at : at + number]
        length = max(end - begin for begin, end in some)
        sources: list[NDArray[Any]] = [steps.used, steps.features, steps.targets]
        arrays = [np.zeros((len(some), length, *each.shape[1:]), np.float32) for each in sources]
        mask = np.zeros((len(some), length), bool)
        for row, (begin, end) in enumerate(some):
            for array, each in zip(arrays, sources, strict=True):
                array[row, : end - begin] = each[begin:end]
            mask[row, : end - begin] = True
        arrays[0] *= scale
        yield tuple(torch.from_numpy(each) for each in (*arrays, mask))


def _loss(sums: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean cross entropy of the values that sums give, and their targets."""
    half = 0.5 * sums[mask]
    values = (0.5 + 0.5 * half * torch.rsqrt(1 + half**2)).clamp(1e-4, 1 - 1e-4)
    return nn.functional.binary_cross_entropy(values, targets[mask])


def _fit(
    network: _Network,
    steps: _Steps,
    chunks: list[tuple[int, int]],
    config: TrainPolicyConfig,
    on_epoch: OnEpoch,
) -> None:
    """Train a network on chunks of requests."""
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=DECAY)
    number = -(-len(chunks) // _batch_size(steps))
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=config.epochs * number + 1, pct_start=0.1
    )
    random, order = np.random.default_rng(config.seed), list(chunks)
    network.train()
    for epoch in range(config.epochs):
        random.shuffle(order)
        for used, features, targets, mask in _batches(steps, order, network.scale):
            loss = _loss(network(used, features), targets, mask)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            rates.step()
        on_epoch(epoch + 1)
