"""Exact competitive ratios of LRU and LLRU for small shapes of layered paging.

All request sequences are searched. A node of the graph is what the policy's future depends on (its
cache, by age), and what OPT's future depends on (its work function: the fewest misses with which it
can have each cache, less the smallest of them). An edge is a request, with the policy's misses and
the growth of OPT's. The competitive ratio is the largest ratio of the two on a cycle.

A page is an expert; layer l has the pages from l * experts. Needs a graph that fits into memory: up
to about eight pages.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.trace.trace import Trace

Ints = NDArray[np.int64]
Contents = tuple[tuple[int, int], ...]  # (page, age), in a form in which equal futures are equal
CLOSE = 1e-9


class Shape(NamedTuple):
    """Layers, experts of each layer, slots: fewer than there are experts."""

    layers: int
    experts: int
    slots: int


class Graph(NamedTuple):
    """Edges, one for each request in each state, from node `source` to node `target`."""

    source: Ints
    target: Ints
    misses: Ints  # of the policy: 0 or 1
    floor: Ints  # of OPT: 0 or 1
    page: Ints  # the requested one
    first: Ints  # [N] the edge by which a node was found; -1 for node 0


def lru(shape: Shape, cache: Contents, layer: int, page: int) -> tuple[int, Contents]:
    """Serve a request by LRU: misses, and the cache by age (a rank: 0 is the newest)."""
    ages = dict(cache)
    missed = page not in ages
    if missed and len(ages) == shape.slots:
        del ages[max(ages, key=ages.__getitem__)]
    ages[page] = -1
    ranked = sorted(ages, key=ages.__getitem__)
    return int(missed), tuple(sorted((p, i) for i, p in enumerate(ranked)))


def llru(shape: Shape, cache: Contents, layer: int, page: int) -> tuple[int, Contents]:
    """Serve a request by LLRU: misses, and the cache by R at the next request.

    R of a page grows by one whenever its layer begins, so the difference of two pages' R changes by
    one at most: gaps of more than 2 are equivalent to 2.
    """
    rounds = dict(cache)
    missed = page not in rounds
    if missed and len(rounds) == shape.slots:
        ahead = {p: (p // shape.experts - layer) % shape.layers for p in rounds}
        del rounds[max(rounds, key=lambda p: (rounds[p], ahead[p]))]
    rounds[page] = 0
    following = (layer + 1) % shape.layers
    grown = {p: r + (p // shape.experts == following) for p, r in rounds.items()}
    short, before, reached = {}, 0, 0
    for r in sorted(set(grown.values())):
        reached += min(r - before, 2)
        before, short[r] = r, reached
    return int(missed), tuple(sorted((p, short[r]) for p, r in grown.items()))


Serve = Callable[[Shape, Contents, int, int], tuple[int, Contents]]


def search(shape: Shape, serve: Serve) -> Graph:
    """Find all states that can be reached from an empty cache, and the requests between them."""
    grow = work_functions(shape)
    count = len(list(combinations(range(shape.layers * shape.experts), shape.slots)))
    start: tuple[int, Contents, bytes] = (0, (), bytes(count))
    number, nodes, first, edges = {start: 0}, [start], [-1], []
    for source, (layer, cache, work) in enumerate(nodes):  # grows as it is read
        for page in range(layer * shape.experts, (layer + 1) * shape.experts):
            floor, grown = grow(work, page)
            misses, left = serve(shape, cache, layer, page)
            node = ((layer + 1) % shape.layers, left, grown)
            target = number.setdefault(node, len(nodes))
            if target == len(nodes):
                nodes.append(node)
                first.append(len(edges))
            edges.append((source, target, misses, floor, page))
    return Graph(*np.array(edges, np.int64).T, np.array(first))


def work_functions(shape: Shape) -> Callable[[bytes, int], tuple[int, bytes]]:
    """Make the function that adds a request to a work function, a byte for each possible cache.

    It returns by how much the smallest value has grown, and the others less that.
    """
    pages = range(shape.layers * shape.experts)
    caches = [frozenset(some) for some in combinations(pages, shape.slots)]
    index = {some: i for i, some in enumerate(caches)}
    moves = []
    for page in pages:
        having = [i for i, some in enumerate(caches) if page in some]
        lacking = [i for i, some in enumerate(caches) if page not in some]
        before = [[index[caches[i] - {page} | {p}] for p in pages if p not in caches[i]]
                  for i in having]  # fmt: skip
        after = [[index[caches[i] - {p} | {page}] for p in caches[i]] for i in lacking]
        moves.append(tuple(np.array(each, np.int64) for each in (having, before, lacking, after)))

    def grow(work: bytes, page: int) -> tuple[int, bytes]:
        values = np.frombuffer(work, np.uint8).copy()
        having, before, lacking, after = moves[page]
        values[having] = np.minimum(values[having], values[before].min(axis=1) + 1)
        values[lacking] = values[after].min(axis=1) + 1
        least = int(values.min())
        return least, (values - np.uint8(least)).tobytes()

    return grow


def worst_cycle(graph: Graph) -> tuple[float, list[int]]:
    """Find the cycle with the most misses of the policy over OPT's: the ratio, and its edges."""
    ratio, best = 0.0, list[int]()
    while (found := _better_cycle(graph, ratio)) is not None:
        ratio, best = graph.misses[found].sum() / graph.floor[found].sum(), found
    return float(ratio), best


def _better_cycle(graph: Graph, ratio: float) -> list[int] | None:
    """Find a cycle whose ratio is larger, by Bellman and Ford's search for positive cycles."""
    value = graph.misses - ratio * graph.floor
    nodes = graph.first.size
    reached, by = np.zeros(nodes), np.full(nodes, -1)
    for turn in range(nodes + 1):
        along = reached[graph.source] + value
        most = reached.copy()
        np.maximum.at(most, graph.target, along)
        better = most > reached + CLOSE
        if not better.any():
            return None
        used = np.flatnonzero((along >= most[graph.target] - CLOSE / 10) & better[graph.target])
        by[graph.target[used]] = used
        reached = most
        if turn % 10 == 9 and (cycle := _cycle(graph, by)):
            return cycle
    return _cycle(graph, by)


def _cycle(graph: Graph, by: Ints) -> list[int] | None:
    """Find a cycle among the edges `by` which nodes were reached last."""
    seen = np.full(by.size, -1)
    for begin in np.flatnonzero(by >= 0).tolist():
        node = begin
        while by[node] >= 0 and seen[node] < 0:
            seen[node], node = begin, int(graph.source[by[node]])
        if by[node] >= 0 and seen[node] == begin:
            edges, end = [int(by[node])], node
            while (node := int(graph.source[edges[-1]])) != end:
                edges.append(int(by[node]))
            return edges[::-1]
    return None


def worst_trace(shape: Shape, graph: Graph, cycle: list[int], times: int) -> Trace:
    """The requests that lead from an empty cache to a cycle, and those of the cycle, repeated."""
    lead, node = list[int](), int(graph.source[cycle[0]])
    while node:
        lead.append(int(graph.first[node]))
        node = int(graph.source[lead[-1]])
    pages = graph.page[[*lead[::-1], *cycle * times]]
    rounds = pages.size // shape.layers
    rows = pages[: rounds * shape.layers].reshape(rounds, shape.layers) % shape.experts
    return Trace(
        experts=rows[..., None].astype(np.uint8),
        experts_per_layer=np.full(shape.layers, shape.experts, np.int64),
        request_starts=np.array([0, rounds], np.int64),
        pass_starts=np.arange(rounds + 1, dtype=np.int64),
        pass_prefill=np.zeros(rounds, np.bool_),
        labels=("worst cycle",),
    )
