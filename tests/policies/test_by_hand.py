"""Traces worked by hand, and what each policy evicts on them. One layer, nothing pinned.

"." is a hit, "-" a miss that finds a free slot, a letter the piece that a miss evicts.
"""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.policies import POLICIES, policy
from tests.policies.reference import Step
from tests.policies.streams import as_stream

pytestmark = pytest.mark.usefixtures("uncompiled")


def evictions(
    name: str, capacity: int, steps: list[Step], layers: int, seed: int = 0, width: int = 8
) -> str:
    """Pieces of layer l are numbers from width * l; letters count from "a"."""
    offsets = [width * i for i in range(layers + 1)]
    pieces = Pieces.unsplit(offsets, [1] * layers)
    cache = Cache(pieces, capacity, policy(name), seed=seed, trace=as_stream(steps))
    result = ""
    for step in steps:
        served = cache.serve(
            np.array(step.pieces, np.int64),
            step.clock,
            "none",
            token=step.token,
            request=step.prompt,
            prefill=step.prefill,
        )
        for hit, slot, evicted in zip(served.hits, served.slots, served.evicted, strict=True):
            if hit:
                result += "."
            elif slot < 0:
                result += "/"  # passed through
            else:
                result += "-" if evicted < 0 else chr(97 + evicted)
    return result


def letters(text: str) -> list[Step]:
    """One request a step and token, all of layer 0 and prompt 0."""
    return [Step([ord(c) - 97], i, i, 0, 0, [], []) for i, c in enumerate(text)]


ONE_LAYER = [
    # a is used again: b is the least recent, then c.
    ("lru", 3, "abcadb", "---.bc"),
    ("fifo", 3, "abcadb", "---.a."),
    # b and c have one request each, b's is older; then b has two, as d and c have one: c is older.
    ("lfu", 3, "abcadbc", "---.bcd"),
    ("lfu-in-cache", 3, "abcadbc", "---.bcd"),
    # History tells the two apart: b comes back with two requests, as many as a, and a's is older.
    ("lfu", 2, "aabcbcbd", "-.-bca.c"),
    ("lfu-in-cache", 2, "aabcbcbd", "-.-bcbcb"),
    # At d: a is next at 6, b at 5, c at 4: a goes. At a: none returns, and c, once asked for at 4,
    # is older than b at 5 but younger than d at 3.
    ("opt", 3, "abcdcba", "---a..d"),
    # K: a 3, b 1. b goes, age 1; c gets 2 and goes, age 2; d gets 3, as a has, and a is older.
    ("lfuda", 2, "aaabcdef", "-..-bcad"),
    # The hand spares a once, evicts b and stands before c.
    ("sieve", 3, "abcadea", "---.bc."),
    # S has one slot's share; a was hit only once and goes from S.
    ("s3fifo", 3, "abcadbd", "---.a.."),
    # a was hit twice and moves to M, b goes; G remembers b, which comes back into M, so that d,
    # alone in S, is next.
    ("s3fifo", 3, "abcaabdcbe", "---...b.cd"),
    # a is in T2. p = 0: T1 gives b. B1 remembers b: p = 1, T1 = c d gives c. d is there.
    ("arc", 3, "abcadbd", "---.bc."),
    # The same; then f: T1 = d e gives d; g: T1 and B1 are full, B1 forgets c, T1 = e f gives e.
    ("arc", 4, "aabcdebfag", "-.---bcd.e"),
    # rho 0.25, omega 2: what a request counts halves every token. At c: a 3/4, b 1/2; at d: a 3/8,
    # c 1/2.
    ("lcp:omega=2", 2, "aaabcd", "-..-ba"),
    # What was requested most, a and b, is there; c and d pass through.
    ("static", 2, "abcabdab", "../../.."),
]


@pytest.mark.parametrize(("name", "capacity", "requests", "expected"), ONE_LAYER)
def test_victims_in_one_layer_are_those_worked_out_by_hand(name, capacity, requests, expected):
    assert evictions(name, capacity, letters(requests), 1) == expected


def layered_steps(layers: int, *tokens: str, prompts: str = "") -> list[Step]:
    """A token a string, a piece a layer: layer l has the letters from 8 * l."""
    return [
        Step([ord(c) - 97], t * layers + layer, t, int(prompts[t]) if prompts else 0, layer, [], [])
        for t, token in enumerate(tokens)
        for layer, c in enumerate(token)
    ]


def test_llru_evicts_the_layer_that_comes_latest():
    """The victim has the largest D.

    At q (t = 2, of 3 layers) a has R 0, D 1 and i R 0, D 2: i, whose layer was just served, is
    evicted, though a is older. At i (t = 4): a has D 2, q D 1.
    """
    assert evictions("llru", 2, layered_steps(3, "aiq", "aiq"), 3) == "--i.a."
    assert evictions("lru", 2, layered_steps(3, "aiq", "aiq"), 3) == "--aiqa"


def test_llru_counts_rounds_first():
    """At j (t = 3, of 2 layers): a was requested 3 ago (R 1, D 1), i 2 ago (R 1, D 0), b 1 ago
    (R 0, D 1). Of two pieces one round old, a's layer is further ahead."""
    assert evictions("llru", 3, layered_steps(2, "ai", "bj"), 2) == "---a"


def test_llru_on_the_example_of_the_papers_figure_2():
    """4 layers of 4 experts (letters from 4 * l), 8 slots: the second j is the figure's "reused".

    The figure's "first eviction" is at l (t = 10). There a has R 2, D 2; e R 2, D 3; all others R 1
    or 0: e, where LRU evicts a. At n (t = 11) a has R 2, D 1, and o R 2, D 0: a.
    """
    steps = layered_steps(4, "aejo", "bfjm", "bgln")
    assert evictions("llru", 8, steps, 4, width=4) == "------.-.-ea"
    assert evictions("lru", 8, steps, 4, width=4) == "------.-.-ae"


def test_llru_in_the_situation_of_the_papers_figure_3():
    """6 layers (letters from 3 * l), 11 slots: the fourth layer of the third token is served.

    As in the figure, two experts have R 2 before and after it, four R 1, and five R 0. At l (t =
    15): d (requested at 1) has R 2, D 4, and g (at 2) R 2, D 5: g, where LRU evicts d. At o (t =
    16) d has D 3, and m, now with R 2, D 0: d. At q m has R 2, D 5.
    """
    steps = layered_steps(6, "adgjmp", "aehjnp", "bfhloq")
    assert evictions("llru", 11, steps, 6, width=3) == "------.--.-.--.gdm"
    assert evictions("lru", 11, steps, 6, width=3) == "------.--.-.--.dgm"


def test_llru_knows_the_layer_of_an_expert_that_came_in_out_of_turn():
    """3 layers, 3 slots: q, of the last layer, comes in while the first one is computed (t = 0).

    At b (t = 3): a (requested at 0) has R 1, D 0; i (at 1) R 0, D 1; q R 1, D 2: q. By the clock
    alone q would have a's D, and a, the one requested earlier, would be evicted.
    """
    cache = Cache(Pieces.unsplit([0, 8, 16, 24], [1] * 3), 3, policy("llru"))
    serve(cache, "a", 0)
    slot, _ = cache.borrow(ord("q") - 97)
    cache.admit(ord("q") - 97, slot)
    assert serve(cache, "i", 1) == -1
    assert serve(cache, "b", 3) == ord("q") - 97


def serve(cache: Cache, letter: str, now: int) -> int:
    """Serve a step of one expert; return what it evicts."""
    return int(cache.serve(np.array([ord(letter) - 97]), now, "none").evicted[0])


def test_fate_favours_shallow_layers():
    """7 slots, 2 layers of weights 2 and 1.5: shares 4 and 3. a to d and i to k fill the pool.

    l: layer 1 has its 3 and needs one: its oldest, i. e: layer 0 has its 4: a, which its ghosts
    forget at once, since T1 has 4. j hits and goes to T2. a: b. m: T1 = k l, above p = 0: k.
    With bias 0 the shares are 3 (3.5 rounded down) and 4. l: layer 0 has 4, one more than its
    share: a. e: b. j hits. a is forgotten: c. m: layer 1 has its 4, T1 = i k l: i.
    """
    steps = layered_steps(2, "ai", "bj", "ck", "dl", "ej", "am")
    assert evictions("fate", 7, steps, 2) == "-------ia.bk"
    assert evictions("fate:bias=0", 7, steps, 2) == "-------ab.ci"


def test_fate_takes_a_slot_of_the_layer_that_has_more_than_its_share():
    """4 slots, 2 layers with shares floor(4 * 2 / 3.5) = 2 and 2.

    Layer 1 is asked first and fills the pool. Then each expert of layer 0 takes a slot of layer
    1, until both have 2; from then on each layer gives its own."""
    deep = [Step([8 + i], 2 * i + 1, i, 0, 1, [], []) for i in range(4)]  # i j k l
    shallow = [Step([i], 8 + 2 * i, 4 + i, 0, 0, [], []) for i in range(4)]  # a b c d
    assert evictions("fate", 4, deep + shallow, 2) == "----ijab"


def test_fate_is_arc_within_a_layer():
    """One layer: a is in T2, p = 0, so T1 gives b; B1 remembers b, p = 1, and T1 gives c."""
    for name, capacity, requests, expected in ONE_LAYER:
        if name == "arc":
            assert evictions("fate", capacity, letters(requests), 1) == expected


def test_moe_infinity_evicts_the_expert_that_a_similar_prompt_used_least():
    """The first prompt leaves the EAM {a 1, b 1 | i 2}. At j: a and b score 1.001 / 2, i
    2.001 * 0.5 / 2, a little less. At i: j scores 0.001 * 0.5 / 2."""
    steps = layered_steps(2, "ai", "bi", "aj", "bi", prompts="0011")
    assert evictions("moe-infinity", 3, steps, 2) == "---..i.j"


def test_moe_infinity_falls_back_to_the_current_eam():
    """The first prompt is not over, so the collection is empty.

    At j the pass's EAM is {b 1 | j 1}: a scores 0.001 / 1, b 1.001 / 1, i 0.001 * 0.5 / 1. The
    prompt's is {a 1, b 1 | i 1, j 1}: a and b score 1.001 / 2, i 1.001 * 0.5 / 2.
    """
    for name in ("moe-infinity", "moe-infinity:matching=request"):
        assert evictions(name, 3, layered_steps(2, "ai", "bj"), 2) == "---i"


def test_moe_infinity_matches_an_answer_with_answers_only():
    """Section 4.3. The first prompt leaves {a 1 | j 1} for prefill and {b 1 | i 1} for decode.

    The second prompt uses a, i and j. In its answer, at c, j scores 0.001 * 0.5, a 0.001, and i
    1.001 * 0.5. By one EAM for both, i and j would be equal, and i the older one.
    """
    steps = layered_steps(2, "aj", "bi", "ai", "aj", "c", prompts="00111")
    for number in (0, 1, 4, 5, 6, 7):
        steps[number].prefill = True
    for name in ("moe-infinity", "moe-infinity:matching=request"):
        assert evictions(name, 4, steps, 2) == "----....j"


def test_moe_infinity_evicts_by_the_eam_of_figure_6():
    """An earlier request leaves {a 1, b 2 | j 3 | r 3}. This one used a, j and q; now it is at i.

    a scores 1.001 / 3, b 2.001 / 3, j 3.001 * (2 / 3) / 3, r 3.001 * (1 / 3) / 3, and q
    0.001 * (1 / 3) / 3. LRU evicts b.
    """
    steps = layered_steps(3, "ajr", "bjr", "bjr", "ajq", "ai", prompts="00011")
    assert evictions("moe-infinity", 5, steps, 3) == "----.......-.q"
    assert evictions("lru", 5, steps, 3)[-1] == "b"


def test_moe_infinity_sums_the_eams_within_the_tolerance():
    """The prompts leave {a 2 | i 2} and {a 1, b 1 | j 2}. At k this pass's EAM is {a 1 | k 1}.

    Its cosines are 2 / sqrt(8 * 2) = 0.5 and 1 / sqrt(6 * 2) = 0.29. By the first EAM alone, j has
    the least score, 0.001 * 0.5 / 2. By the sum {a 3, b 1 | i 2, j 2}, i and j score
    2.001 * 0.5 / 4, and b 1.001 / 4, a little more; i was requested before j.
    """
    steps = layered_steps(2, "ai", "ai", "aj", "bj", "ak", prompts="00112")
    for tolerance, victim in (("0", "j"), ("0.2", "j"), ("0.22", "i"), ("1", "i")):
        done = evictions(f"moe-infinity:tolerance={tolerance}", 4, steps, 2)
        assert done == "--...--.." + victim


def test_marking_draws_the_victim_from_unmarked_pieces():
    """c ends a phase: a and b lose their marks. Then one of them is there and unmarked, so that d
    must evict it."""
    orders = set()
    for seed in range(40):
        done = evictions("marking", 2, letters("abcd"), 1, seed)
        assert done in ("--ab", "--ba")
        orders.add(done)
    assert len(orders) == 2


def test_random_evicts_each_piece_as_often_as_the_others():
    done = [evictions("random", 4, letters("abcde"), 1, seed)[-1] for seed in range(400)]
    assert {letter: 60 <= done.count(letter) <= 140 for letter in "abcd"} == dict.fromkeys(
        "abcd", True
    )


def test_every_policy_of_a_paper_with_a_formula_is_worked_out_by_hand():
    by_hand = {name.partition(":")[0] for name, *_ in ONE_LAYER}
    by_hand |= {"llru", "fate", "moe-infinity", "marking", "random"}
    assert set(POLICIES) - by_hand <= {"hobbit", "hybrimoe", "next-use"}
