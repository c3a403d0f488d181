"""NEXT-USE against a plain reading of its description, on random streams and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.scope import split_capacity
from greenroom.core.pieces import Pieces
from greenroom.core.stream import Stream
from greenroom.policies import policy
from greenroom.policies.next_use import next_use
from greenroom.sim.replay import replay

f32 = np.float32
LEAST, FIRST_WEIGHT_OF_PROMPT, FIRST_WEIGHT_OF_RECALLED = 0.02, 0.5, 0.3
FADE, SHARPNESS, LEAST_WEIGHT, PRIOR, HORIZON = f32(0.9), 10.0, 0.1, 0.1, 6


class Expert:
    """Estimates of one expert of a layer."""

    def __init__(self, share: float) -> None:
        self.short = 0.0  # logarithm, relative to the mean share
        self.long = share
        self.uses = 0
        self.prior = self.long_then = 0.0
        self.features = (0.0, 0.0, 0.0, 0.0)
        self.value = 0.0


class Layer:
    """Estimates of one layer, in dictionaries and lists instead of arrays."""

    def __init__(self, experts: int) -> None:
        self.size = experts
        self.experts: list[Expert] = []
        self.weights = [0.0, 0.0, FIRST_WEIGHT_OF_PROMPT, FIRST_WEIGHT_OF_RECALLED, 0.0]
        self.links: list[dict[tuple[int, int], np.float32]] = [{}, {}, {}]
        self.last: list[int] = []  # the experts of the last step
        self.sets: list[list[int]] = [[], [], []]  # what the estimates were made from
        self.steps = 0
        self.mean = self.level = 0.0

    def step(
        self, used: list[int], below: list[int], memory: Memory, options: dict[str, float]
    ) -> None:
        first, share = not self.experts, len(used) / self.size
        if first:
            share = self.mean = min(share, 0.5)
            self.experts = [Expert(share) for _ in range(self.size)]
            self.weights[4] = (2 * share - 1) / math.sqrt(share - share * share)
        if self.steps == 0:
            self.begin_prompt(options["prior"])
        self.steps += 1
        self.count(used, share, options)
        sets = [used, self.last, below]
        features, scores = self.estimate(sets, memory, options)
        errors = self.errors(used, scores, options["discount"])
        if not first:
            self.learn(errors, options)
        for expert, now in zip(self.experts, features, strict=True):
            expert.features = now
        self.sets, self.last = sets, used

    def begin_prompt(self, prior: float) -> None:
        self.level = self.mean
        for expert in self.experts:
            relative = expert.long / self.mean + LEAST
            expert.uses, expert.prior, expert.long_then = 0, prior * relative, math.log(relative)

    def count(self, used: list[int], share: float, options: dict[str, float]) -> None:
        keep_short, keep_long = (0.5 ** (1 / options[name]) for name in ("short", "long"))
        self.mean += (1 - keep_long) * (share - self.mean)
        for i, expert in enumerate(self.experts):
            expert.long *= keep_long
            expert.short = max(expert.short + math.log(keep_short), math.log(LEAST))
            if i in used:
                expert.long += 1 - keep_long
                expert.uses += 1
                expert.short = math.log(math.exp(expert.short) + (1 - keep_short) / self.level)

    def estimate(
        self, sets: list[list[int]], memory: Memory, options: dict[str, float]
    ) -> tuple[list[tuple[float, ...]], list[np.float32]]:
        features, scores, prior = [], [], options["prior"]
        total = math.log(self.steps + prior)
        short, long, prompt, recalled, constant = self.weights
        weights = memory.weights()
        for i, expert in enumerate(self.experts):
            uses = math.log(expert.prior + expert.uses / self.level)
            share = (expert.prior * self.level + expert.uses) / (self.steps + prior)
            base = (share := min(0.95, share)) / (1 - options["discount"] * (1 - share))
            value = memory.recall(i, weights, base, options["discount"])
            difference = score_of(value) - score_of(base)
            score = f32(
                constant
                - prompt * total
                + (short * expert.short + long * expert.long_then + prompt * uses)
                + recalled * difference
            )
            for links, members in zip(self.links, sets, strict=True):
                strength = f32(1 / math.sqrt(max(len(members), 1)))
                for member in members:
                    score += strength * links.get((member, i), f32(0))
            features.append((expert.short, expert.long_then, uses - total, difference))
            scores.append(score)
        return features, scores

    def errors(
        self, used: list[int], scores: list[np.float32], discount: float
    ) -> list[np.float32]:
        errors = []
        for i, (expert, score) in enumerate(zip(self.experts, scores, strict=True)):
            half = 0.5 * float(score)
            value = 0.5 + 0.5 * (half / math.sqrt(1 + half * half))
            target = 1.0 if i in used else discount * value
            errors.append(f32(target - expert.value))
            expert.value = value
        return errors

    def learn(self, errors: list[np.float32], options: dict[str, float]) -> None:
        step = options["rate"] / self.size
        slopes = [0.0] * 5
        for expert, error in zip(self.experts, errors, strict=True):
            for k, feature in enumerate((*expert.features, 1.0)):
                slopes[k] += float(error) * feature
        for k, slope in enumerate(slopes):
            self.weights[k] += (4.0 if k == 4 else 1.0) * step * slope
        for links, members in zip(self.links, self.sets, strict=True):
            strength = f32(options["link-rate"] / math.sqrt(max(len(members), 1)))
            for member in members:
                for i, error in enumerate(errors):
                    links[member, i] = links.get((member, i), f32(0)) + strength * error


def score_of(value: float) -> float:
    half = 2 * min(max(value, 0.01), 0.99) - 1
    return 2 * half / math.sqrt(1 - half * half)


class Memory:
    """All passes so far, as dictionaries from a layer to its experts; the last is the present."""

    def __init__(self, passes: int) -> None:
        self.most_passes = passes
        self.passes: list[dict[int, set[int]]] = []
        self.match: list[np.float32] = []  # of each pass with the present one
        self.most = f32(0)
        self.now = -1

    def observe(self, now: int, used: list[int]) -> None:
        if not self.passes or now <= self.now:
            # A pass continues with the match of the pass before it.
            self.match = [f32(0), *self.match]
            self.passes.append({})
            self.passes = self.passes[-self.most_passes :]
            self.match = self.match[-len(self.passes) :]
        self.now = now
        self.passes[-1][now] = set(used)
        self.most = FADE * self.most + f32(1)
        own = f32(1 / math.sqrt(len(used)))
        for s, experts in enumerate(self.passes):
            other = experts.get(now, set())
            scale = f32(1 / math.sqrt(len(other))) if other else f32(0)
            common = f32(len(other & set(used)))
            self.match[s] = FADE * self.match[s] + common * (own * scale)
        self.match[-1] = f32(0)

    def weights(self) -> dict[int, float]:
        """The weights of earlier passes, those of small weight left out; latest first."""
        bound = max(0.0, max(self.match) + float(self.most) * math.log(LEAST_WEIGHT) / SHARPNESS)
        return {
            s: math.exp(SHARPNESS * (float(self.match[s]) / float(self.most) - 1))
            for s in reversed(range(len(self.passes)))
            if self.match[s] > bound
        }

    def recall(self, i: int, weights: dict[int, float], base: float, discount: float) -> float:
        total, value = PRIOR, PRIOR * base
        for s, weight in weights.items():
            ahead = min(HORIZON, len(self.passes) - 1 - s)
            later = [d for d in range(ahead) if i in self.passes[s + 1 + d].get(self.now, ())]
            total += weight
            value += weight * (discount ** later[0] if later else discount**ahead * base)
        return value / total


class Reference:
    """The victim is sought among all residents of the pool: one for all layers or one a layer."""

    def __init__(self, sizes: list[int], capacity: int, scope: str, pin: bool, passes: int) -> None:
        self.layers = [Layer(n) for n in sizes]
        self.rooms, self.scope, self.pin = split_capacity(capacity, len(sizes), scope), scope, pin
        self.memory = Memory(passes)
        self.options = {o.name: float(o.default) for o in next_use.options}
        self.residents: set[tuple[int, int]] = set()

    def begin_prompt(self) -> None:
        for layer in self.layers:
            layer.steps = 0

    def step(self, now: int, used: list[int]) -> list[tuple[int, int] | bool | None]:
        """Return for each request True for a hit, else the evicted expert or None."""
        self.memory.observe(now, used)
        self.layers[now].step(used, self.layers[now - 1].last, self.memory, self.options)
        current, results = {(now, e) for e in used}, []
        room = self.rooms[now if self.scope == "per-layer" else 0]
        protected = current if self.pin and len(used) <= room else set()
        for expert in used:
            hit, evicted = (now, expert) in self.residents, None
            pool = {r for r in self.residents if self.scope == "shared" or r[0] == now}
            if not hit and len(pool) == room:
                evicted = min(pool - protected, key=lambda r: self.key(r, now, r in current))
                self.residents.remove(evicted)
            self.residents.add((now, expert))
            results.append(True if hit else evicted)
        return results

    def key(self, resident: tuple[int, int], now: int, needed: bool) -> tuple[float, int, int]:
        layer, expert = resident
        ahead = layer - now if layer > now else layer - now + len(self.layers)
        near = np.exp(-self.options["distance"] * ahead / len(self.layers))
        return self.layers[layer].experts[expert].value * near + needed, layer, expert


def random_steps(seed: int, sizes: list[int], tokens: int) -> list[tuple[bool, int, list[int]]]:
    """(a prompt begins, layer, experts): popular experts, some of them used again at once."""
    rng = np.random.default_rng(seed)
    steps, last = [], {}
    for token in range(tokens):
        for layer, size in enumerate(sizes):
            odds = 1 / np.arange(1, size + 1)
            n = int(rng.integers(1, min(4, size) + 1))
            chosen = rng.choice(size, n, replace=False, p=odds / odds.sum()).tolist()
            if rng.random() < 0.4 and layer in last:
                chosen = list(last[layer])
            last[layer] = chosen
            steps.append((token % 17 == 0 and layer == 0, layer, chosen))
    return steps


def stream_of(steps: list[tuple[bool, int, list[int]]], sizes: list[int]) -> Stream:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    begins, layers, experts = zip(*steps, strict=True)
    return Stream(
        pieces=np.concatenate(
            [np.array(e) + offsets[m] for m, e in zip(layers, experts, strict=True)]
        ).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum([len(e) for e in experts])]).astype(np.int64),
        now=np.arange(len(steps), dtype=np.int64),
        layer=np.array(layers, np.int32),
        token=np.arange(len(steps), dtype=np.int64) // len(sizes),
        request=(np.cumsum(begins) - 1).astype(np.int32),
        prefill=np.zeros(len(steps), np.bool_),
        rows=np.empty(0, np.int32),
        weights=np.empty(0, np.float32),
    )


@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(2, 7), min_size=1, max_size=4),
    share=st.floats(0.2, 0.9),
    scope=st.sampled_from(["shared", "per-layer"]),
    pin=st.booleans(),
    memory=st.sampled_from([2, 5, 30, 1024]),
)
@settings(max_examples=20, deadline=None)
def test_next_use_evicts_as_its_plain_reference(seed, sizes, share, scope, pin, memory):
    capacity = max(len(sizes), int(share * sum(sizes)))
    steps, offsets = random_steps(seed, sizes, 40), np.concatenate([[0], np.cumsum(sizes)])
    pieces = Pieces.unsplit(offsets.tolist(), [1] * len(sizes))
    reference = Reference(sizes, capacity, scope, pin, memory)
    next_use = policy(f"next-use:memory={memory}")
    cache = Cache(pieces, capacity, next_use, scope)
    request, misses = -1, 0
    for clock, (begins, layer, experts) in enumerate(steps):
        if begins:
            request += 1
            reference.begin_prompt()
        ids = np.array(experts, np.int64) + offsets[layer]
        served = cache.serve(ids, clock, "step" if pin else "none", request=request)
        if served.pinned:
            cache.release(ids)
        for result, hit, evicted in zip(
            reference.step(layer, experts), served.hits, served.evicted, strict=True
        ):
            assert (result is True) == bool(hit)
            expected = -1 if result is True or result is None else offsets[result[0]] + result[1]
            assert evicted == expected
            misses += result is not True
    got = replay(
        stream_of(steps, sizes),
        offsets,
        capacity,
        next_use,
        scope=scope,
        pin="step" if pin else "none",
    )
    assert got.misses == misses


def test_next_use_learns_the_values_worked_out_by_hand():
    """One layer of four experts, two slots. The first step uses 0 and 1 of four: share 1/2.

    Both have the same estimate; 2 needs room, and the tie goes to the lowest id: 0 is evicted.
    """
    cache = Cache(Pieces.unsplit([0, 4], [1]), 2, next_use)
    for clock, experts in enumerate(([0, 1], [2])):
        ids = np.array(experts, np.int64)
        served = cache.serve(ids, clock)
        cache.release(ids)
    assert served.evicted.tolist() == [0]
    # Relative to the mean share 1/2: 1 was used once in a prompt of 2 steps that began with
    # 10 * 1.02 uses of each expert, so its prompt share is (10.2 + 2) / 12 of the mean.
    learned = cache.policy_states[0]
    assert learned.current[2, 0, 1] == pytest.approx(math.log(10.2 + 2))
    assert learned.current[2, 0, 3] == pytest.approx(math.log(10.2))
    # Its old score was log(12.2 / 11) / 2, so its old value; now it was not used.
    half = 0.5 * (0.5 * math.log(12.2 / 11))
    old = 0.5 + 0.5 * half / math.sqrt(1 + half * half)
    half = 0.5 * (0.5 * math.log(12.2 / 12))
    new = 0.5 + 0.5 * half / math.sqrt(1 + half * half)
    assert learned.value[0, 1] == pytest.approx(new)
    # Links from 0 and 1, which made the old value: 0.2 / sqrt(2) of the error.
    assert learned.links[0, 0, 1, 1] == pytest.approx(0.2 / math.sqrt(2) * (0.85 * new - old))


def test_next_use_learns_which_expert_follows_which():
    """Two experts take turns with a third one, at random; only the past tells which comes next."""
    rng, sizes = np.random.default_rng(1), [6]
    steps = []
    for _ in range(600):
        pair = [[0], [1]] if rng.random() < 0.5 else [[2], [3]]
        steps += [(not steps, 0, experts) for experts in (*pair, [4])]
    stream = stream_of(steps, sizes)
    ours = replay(stream, np.array([0, 6]), 2, next_use).misses
    lru = replay(stream, np.array([0, 6]), 2, policy("lru")).misses
    opt = replay(stream, np.array([0, 6]), 2, policy("opt"), pin="none").misses
    assert opt <= ours < lru - 0.9 * (lru - opt) + 5
