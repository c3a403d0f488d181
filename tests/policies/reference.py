"""Every policy again, slow and obvious: what the compiled ones must equal.

A policy here is a class over dictionaries and lists, written from its definition and not from the
compiled code. `key` policies evict the candidate with the smallest key; the others find a victim.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import inf, sqrt


@dataclass
class Step:
    """Distinct pieces of one layer, requested in this order."""

    pieces: list[int]
    clock: int
    token: int
    prompt: int
    layer: int
    rows: list[int]
    weights: list[float]
    prefill: bool = False


@dataclass
class World:
    """State that a reference policy may read."""

    offsets: list[int]
    sizes: list[int]  # slots of each group
    steps: list[Step]  # all of them: the future, for those that know it
    options: dict[str, object]
    time: int = 0  # index of the request that is served
    step: Step | None = None
    last: dict[int, int] = field(default_factory=dict)  # piece -> index of its last request
    last_clock: dict[int, int] = field(default_factory=dict)
    last_token: dict[int, int] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # since the start

    @property
    def layers(self) -> int:
        return len(self.offsets) - 1

    def layer_of(self, piece: int) -> int:
        return next(i for i, (a, b) in enumerate(pairwise(self.offsets)) if a <= piece < b)

    def group_of(self, piece: int) -> int:
        return 0 if len(self.sizes) == 1 else self.layer_of(piece)


class KeyPolicy:
    """Evicts the candidate with the smallest key; ties go to the least recently requested."""

    def __init__(self, world: World) -> None:
        self.world = world

    def begin_prompt(self) -> None: ...
    def begin_step(self, step: Step) -> None: ...
    def hit(self, piece: int) -> None: ...
    def insert(self, piece: int) -> None: ...
    def evict(self, piece: int) -> None: ...
    def key(self, piece: int) -> object: ...

    def victim(self, group: int, piece: int, candidates: list[int]) -> int:
        return min(candidates, key=lambda p: (self.key(p), self.world.last[p]))


class LRU(KeyPolicy):
    def key(self, piece):
        return self.world.last[piece]


class FIFO(KeyPolicy):
    def __init__(self, world):
        super().__init__(world)
        self.came = {}

    def insert(self, piece):
        self.came[piece] = self.world.time

    def key(self, piece):
        return self.came[piece]


class LFU(KeyPolicy):
    def key(self, piece):
        return self.world.count[piece]


class LFUInCache(KeyPolicy):
    def __init__(self, world):
        super().__init__(world)
        self.uses = {}

    def insert(self, piece):
        self.uses[piece] = 1

    def hit(self, piece):
        self.uses[piece] += 1

    def key(self, piece):
        return self.uses[piece]


class LFUDA(LFUInCache):
    def __init__(self, world):
        super().__init__(world)
        self.age = defaultdict(int)
        self.value = {}

    def insert(self, piece):
        super().insert(piece)
        self.value[piece] = 1 + self.age[self.world.group_of(piece)]

    def hit(self, piece):
        super().hit(piece)
        self.value[piece] = self.uses[piece] + self.age[self.world.group_of(piece)]

    def key(self, piece):
        return self.value[piece]

    def victim(self, group, piece, candidates):
        chosen = super().victim(group, piece, candidates)
        self.age[group] = self.value[chosen]
        return chosen


class OPT(KeyPolicy):
    def __init__(self, world):
        super().__init__(world)
        self.all = [piece for step in world.steps for piece in step.pieces]

    def key(self, piece):
        later = self.all[self.world.time + 1 :]
        return -later.index(piece) if piece in later else -inf


class LLRU(KeyPolicy):
    def key(self, piece):
        world = self.world
        t, last, layers = world.step.clock, world.last_clock[piece], world.layers
        return (-((t - last) // layers), -((last - t) % layers))


class LCP(KeyPolicy):
    def key(self, piece):
        world = self.world
        nu = world.step.token - world.last_token[piece]
        return world.count[piece] * world.options["rho"] ** (nu / world.options["omega"])


class Hobbit(KeyPolicy):
    def begin_prompt(self):
        self.begin, self.uses, self.at = self.world.step.token, defaultdict(int), {}

    def insert(self, piece):
        self.uses[piece] += 1
        self.at[piece] = self.world.step.token - self.begin + 1

    hit = insert

    def key(self, piece):
        world, o = self.world, self.world.options
        t = world.step.token - self.begin + 1
        ahead = (world.layer_of(piece) - world.step.layer) % world.layers
        return (
            o["recency"] * self.at.get(piece, 0) / t
            + o["frequency"] * self.uses[piece] / t
            + o["distance"] * (1 - ahead / world.layers)
        )


class HybriMoE(KeyPolicy):
    def __init__(self, world):
        super().__init__(world)
        self.score = defaultdict(float)

    def begin_step(self, step):
        alpha = self.world.options["alpha"]
        parts = step.weights or step.rows or [1] * len(step.pieces)
        for piece in range(*self.world.offsets[step.layer : step.layer + 2]):
            self.score[piece] *= 1 - alpha
        for piece, part in zip(step.pieces, parts, strict=True):
            self.score[piece] += alpha * (part / sum(parts))

    def key(self, piece):
        return self.score[piece]


class MoEInfinity(KeyPolicy):
    """EAMs as dictionaries piece -> tokens; distances compared as exact fractions."""

    def __init__(self, world):
        super().__init__(world)
        self.collections = {True: [], False: []}  # of prefill and of decode
        self.prompt = {True: {}, False: {}}
        self.current = None
        self.at = None

    @staticmethod
    def closeness(a, b):
        """Ranks as the cosine with b does, for the same a."""
        dot = sum(n * b.get(piece, 0) for piece, n in a.items())
        return Fraction(dot * dot, sum(n * n for n in b.values()))

    def begin_prompt(self):
        for prefill, collection in self.collections.items():
            eam = self.prompt[prefill]
            if eam and len(collection) < self.world.options["capacity"]:
                collection.append(eam)
            elif eam:
                near = [self.closeness(eam, other) for other in collection]
                collection[near.index(max(near))] = eam
        self.prompt, self.current, self.at = {True: {}, False: {}}, {}, None

    def begin_step(self, step):
        prompt, self.collection = self.prompt[step.prefill], self.collections[step.prefill]
        if self.world.options["matching"] == "request":
            self.current = prompt
        elif (step.token, step.prefill) != self.at:
            self.current = {}
        self.at = step.token, step.prefill
        for eam in (prompt, self.current)[: 1 if self.current is prompt else 2]:
            for piece, rows in zip(step.pieces, step.rows or [1] * len(step.pieces), strict=True):
                eam[piece] = eam.get(piece, 0) + rows

    def key(self, piece):
        world, predicted = self.world, defaultdict(int)
        matched = [self.current]
        if self.collection:
            near = [self.closeness(self.current, other) for other in self.collection]
            least = max(near)
            if world.options["tolerance"]:  # as cosines
                square = sum(n * n for n in self.current.values())
                near = [sqrt(n / square) if square else 0.0 for n in near]
                least = max(near) - world.options["tolerance"]
            matched = [e for e, n in zip(self.collection, near, strict=True) if n >= least]
        for eam in matched:
            for other, n in eam.items():
                predicted[other] += n
        layer = world.layer_of(piece)
        row = sum(predicted[p] for p in range(*world.offsets[layer : layer + 2]))
        if row == 0:
            return 1e-3
        return (predicted[piece] + 1e-3) * (1 - layer / world.layers) / row


class Sieve(KeyPolicy):
    """A list a group, the oldest first, and the piece at which the hand is; None: the oldest."""

    def __init__(self, world):
        super().__init__(world)
        self.queue, self.hand, self.visited = defaultdict(list), {}, {}

    def hit(self, piece):
        self.visited[piece] = True

    def insert(self, piece):
        self.queue[self.world.group_of(piece)].append(piece)
        self.visited[piece] = False

    def victim(self, group, piece, candidates):
        queue, hand = self.queue[group], self.hand.get(group)
        i = 0 if hand is None else queue.index(hand)
        while queue[i] not in candidates or self.visited[queue[i]]:
            if queue[i] in candidates:
                self.visited[queue[i]] = False
            i = (i + 1) % len(queue)
        self.hand[group] = queue[i + 1] if i + 1 < len(queue) else None
        return queue[i]

    def evict(self, piece):
        self.queue[self.world.group_of(piece)].remove(piece)


class S3FIFO(KeyPolicy):
    """Three lists a group, the oldest first."""

    def __init__(self, world):
        super().__init__(world)
        self.s, self.m, self.g = defaultdict(list), defaultdict(list), defaultdict(list)
        self.freq = {}

    def share(self, group):
        return max(1, int(self.world.sizes[group] * self.world.options["small"]))

    def hit(self, piece):
        self.freq[piece] = min(3, self.freq[piece] + 1)

    def insert(self, piece):
        group = self.world.group_of(piece)
        self.freq[piece] = 0
        if piece in self.g[group]:
            self.g[group].remove(piece)
            self.m[group].append(piece)
        else:
            self.s[group].append(piece)

    def victim(self, group, piece, candidates):
        s, m = self.s[group], self.m[group]
        if len(s) >= self.share(group):
            for old in list(s):
                if old in candidates:
                    if self.freq[old] < 2:
                        return old
                    s.remove(old)
                    m.append(old)
                    self.freq[old] = 0
        while any(p in candidates for p in m):
            old = next(p for p in m if p in candidates)
            if self.freq[old] == 0:
                return old
            self.freq[old] -= 1
            m.remove(old)
            m.append(old)
        return next(p for p in s if p in candidates)

    def evict(self, piece):
        group = self.world.group_of(piece)
        if piece in self.m[group]:
            self.m[group].remove(piece)
            return
        self.s[group].remove(piece)
        self.g[group].append(piece)
        while len(self.g[group]) > self.world.sizes[group] - self.share(group):
            self.g[group].pop(0)


class ARC(KeyPolicy):
    """The figure of the paper, case by case; lists with the oldest first."""

    def __init__(self, world):
        super().__init__(world)
        self.t1, self.t2 = defaultdict(list), defaultdict(list)
        self.b1, self.b2 = defaultdict(list), defaultdict(list)
        self.p = defaultdict(float)
        self.forget = False

    def hit(self, piece):
        group = self.world.group_of(piece)
        for t in (self.t1[group], self.t2[group]):
            if piece in t:
                t.remove(piece)
        self.t2[group].append(piece)

    def victim(self, group, piece, candidates):
        t1, t2, b1, b2 = self.t1[group], self.t2[group], self.b1[group], self.b2[group]
        c = self.world.sizes[group]
        self.forget = False
        if piece in b1:
            self.p[group] = min(c, self.p[group] + max(len(b2) / len(b1), 1))
        elif piece in b2:
            self.p[group] = max(0, self.p[group] - max(len(b1) / len(b2), 1))
        elif len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.pop(0)
            else:
                self.forget = True
        elif len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
            b2.pop(0)
        p = self.p[group]
        first = t1 and (self.forget or len(t1) > p or (piece in b2 and len(t1) == p))
        for t in (t1, t2) if first else (t2, t1):
            for old in t:
                if old in candidates:
                    self.forget = self.forget and t is t1
                    return old
        raise AssertionError

    def evict(self, piece):
        group = self.world.group_of(piece)
        t, b = (self.t1, self.b1) if piece in self.t1[group] else (self.t2, self.b2)
        t[group].remove(piece)
        if not self.forget:
            b[group].append(piece)

    def insert(self, piece):
        group = self.world.group_of(piece)
        for b in (self.b1[group], self.b2[group]):
            if piece in b:
                b.remove(piece)
                self.t2[group].append(piece)
                return
        self.t1[group].append(piece)


class Fate(KeyPolicy):
    """ARC's lists in every layer, the oldest first; the layer furthest above its share gives."""

    def __init__(self, world):
        super().__init__(world)
        self.t1, self.t2 = defaultdict(list), defaultdict(list)
        self.b1, self.b2 = defaultdict(list), defaultdict(list)
        self.p = defaultdict(float)

    def share(self, layer):
        world, layers = self.world, self.world.layers
        if len(world.sizes) > 1:
            return world.sizes[layer]
        bias = Fraction(world.options["bias"])
        weights = [1 + bias * (1 - Fraction(i, layers)) for i in range(layers)]
        per_weight = world.sizes[0] / sum(weights)
        return int(per_weight * sum(weights[: layer + 1])) - int(per_weight * sum(weights[:layer]))

    def hit(self, piece):
        layer = self.world.layer_of(piece)
        for queue in (self.t1[layer], self.t2[layer], self.b1[layer], self.b2[layer]):
            if piece in queue:
                queue.remove(piece)
        self.t2[layer].append(piece)

    def insert(self, piece):
        layer = self.world.layer_of(piece)
        t1, t2, b1, b2 = self.t1[layer], self.t2[layer], self.b1[layer], self.b2[layer]
        if piece in b1 or piece in b2:
            self.hit(piece)
            return
        t1.append(piece)
        while b1 and len(t1) + len(b1) > self.share(layer):
            b1.pop(0)
        while b2 and len(t1) + len(t2) + len(b1) + len(b2) > 2 * self.share(layer):
            b2.pop(0)

    def evict(self, piece):
        layer = self.world.layer_of(piece)
        t, b = self.t1[layer], self.b1[layer]
        if piece not in t:
            t, b = self.t2[layer], self.b2[layer]
        t.remove(piece)
        b.append(piece)

    def victim(self, group, piece, candidates):
        own = self.world.layer_of(piece)
        b1, b2 = self.b1[own], self.b2[own]
        known = piece in b1 or piece in b2
        if piece in b1:
            self.p[own] = min(self.share(own), self.p[own] + max(len(b2) / len(b1), 1))
        if piece in b2:
            self.p[own] = max(0, self.p[own] - max(len(b1) / len(b2), 1))

        def surplus(layer):
            return len(self.t1[layer]) + len(self.t2[layer]) - self.share(layer) + (layer == own)

        layer = max({*map(self.world.layer_of, candidates)}, key=lambda i: (surplus(i), i))
        t1, t2, p = self.t1[layer], self.t2[layer], self.p[layer]
        new = layer != own or not known
        from_t1 = len(t1) > p or (layer == own and piece in b2 and len(t1) == p)
        if t1 and (from_t1 or (new and len(t1) >= self.share(layer))):
            return next(x for x in [*t1, *t2] if x in candidates)
        return next(x for x in [*t2, *t1] if x in candidates)


class Static(KeyPolicy):
    """Resident from the start: the most requested; nothing else comes in."""

    def residents(self):
        world, part = self.world, self.world.options["part"]
        prompts = max((s.prompt for s in world.steps), default=-1) + 1
        inside = {
            "all": lambda s: True,
            "first-half": lambda s: s.prompt < (prompts + 1) // 2,
            "second-half": lambda s: s.prompt >= (prompts + 1) // 2,
        }[part]
        count, last, i = defaultdict(int), defaultdict(lambda: -1), 0
        for step in world.steps:
            for piece in step.pieces:
                if inside(step):
                    count[piece] += 1
                    last[piece] = i
                i += 1
        chosen = set()
        for group, size in enumerate(world.sizes):
            members = [p for p in range(world.offsets[-1]) if world.group_of(p) == group]
            chosen.update(sorted(members, key=lambda p: (-count[p], -last[p], p))[:size])
        return chosen


REFERENCES = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "lfu-in-cache": LFUInCache,
    "lfuda": LFUDA,
    "opt": OPT,
    "llru": LLRU,
    "fate": Fate,
    "lcp": LCP,
    "hobbit": Hobbit,
    "hybrimoe": HybriMoE,
    "moe-infinity": MoEInfinity,
    "sieve": Sieve,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "static": Static,
}


def serve(
    name: str,
    options: dict[str, object],
    steps: list[Step],
    offsets: list[int],
    sizes: list[int],
    pin: str = "step",
) -> list[tuple[bool, int]]:
    """(hit, evicted piece or -1) of every request, one by one, from an empty cache."""
    world = World(offsets, sizes, steps, options)
    policy = REFERENCES[name](world)
    fixed = policy.residents() if name == "static" else None
    resident: list[list[int]] = [[] for _ in sizes]
    results, prompt = [], None
    for step in steps:
        world.step = step
        if step.prompt != prompt:
            prompt = step.prompt
            policy.begin_prompt()
        policy.begin_step(step)
        for piece in step.pieces:
            group = world.group_of(piece)
            hit, evicted = piece in resident[group], -1
            if fixed is not None:
                hit = piece in fixed
            elif not hit and len(resident[group]) == sizes[group]:
                protect = pin == "step" and len(step.pieces) <= sizes[group]
                candidates = [p for p in resident[group] if not (protect and p in step.pieces)]
                evicted = policy.victim(group, piece, candidates)
                policy.evict(evicted)
                resident[group].remove(evicted)
            world.count[piece] += 1
            world.last[piece] = world.time
            world.last_clock[piece], world.last_token[piece] = step.clock, step.token
            if hit:
                policy.hit(piece)
            elif fixed is None:
                resident[group].append(piece)
                policy.insert(piece)
            world.time += 1
            results.append((hit, evicted))
    return results
