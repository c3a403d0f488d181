"""What policies have learned comes back in a later run; arrays that do not fit change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.learned import export_learned, restore_learned
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Arrays
from greenroom.policies import POLICIES, policy
from greenroom.policies.helpers import next_use_learned, next_use_network
from greenroom.sim.replay import replay
from tests.policies.reference import Step
from tests.policies.streams import LAYERS, OFFSETS, as_stream, tokens
from tests.policies.test_by_hand import layered_steps

pytestmark = pytest.mark.usefixtures("uncompiled")
LEARNING = sorted(name for name, each in POLICIES.items() if each.learning is not None)
STEPS = tokens(seed=5, count=60)


def caches(name: str, devices: int = 1, capacity: int = 7) -> Cache:
    return Cache(Pieces.unsplit(OFFSETS, [1] * LAYERS, devices=devices), capacity, policy(name))


def serve(cache: Cache, steps: list[Step]) -> list[int]:
    """Serve steps; returns the evicted pieces."""
    evicted = []
    for step in steps:
        pieces = np.array(step.pieces, np.int64)
        served = cache.serve(
            pieces, step.clock, "none", token=step.token, request=step.prompt, prefill=step.prefill
        )
        evicted += served.evicted.tolist()
    return evicted


def test_these_policies_learn_for_later_runs():
    assert LEARNING == ["moe-infinity", "next-use"]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", LEARNING)
def test_what_was_learned_comes_back_as_it_was(name, devices):
    before, after = caches(name, devices), caches(name, devices)
    serve(before, STEPS)
    learned = export_learned(before)
    restore_learned(after, learned)
    again = export_learned(after)
    assert again.keys() == learned.keys()
    for key, array in learned.items():
        np.testing.assert_array_equal(again[key], array, strict=True)
    serve(after, STEPS)  # and works
    changed = export_learned(after)
    assert not all(np.array_equal(changed[key], learned[key]) for key in learned)
    np.testing.assert_array_equal(again[key], learned[key])  # copies


def test_moe_infinity_goes_on_after_its_collection_was_restored():
    """A restart between two prompts changes no decision where the cache is as it was."""
    prompts = sorted({step.prompt for step in STEPS})
    half = [step for step in STEPS if step.prompt < prompts[len(prompts) // 2]]
    for capacity in (1, 3, 100):
        name = f"moe-infinity:capacity={capacity}"
        whole, parts = caches(name), caches(name)
        expected = serve(whole, STEPS)
        got = serve(parts, half)
        restore_learned(parts, export_learned(parts))
        assert got + serve(parts, STEPS[len(half) :]) == expected


def test_moe_infinity_evicts_by_the_prompts_of_an_earlier_run():
    """The earlier run leaves {b 2 | i 2}. At j, a scores 0.001 / 2, i 2.001 * 0.5 / 2, b more.

    Without it, pEAM is this pass's {b 1 | j 1}: i scores 0.001 * 0.5, a 0.001.
    """
    moe_infinity, offsets = policy("moe-infinity"), [0, 8, 16]
    earlier = as_stream(layered_steps(2, "bi", "bi"))
    later = as_stream(layered_steps(2, "ai", "bj", "ai"))
    learned = replay(earlier, offsets, 3, moe_infinity, learned={}).learned
    cold = replay(later, offsets, 3, moe_infinity, detail=True)
    warm = replay(later, offsets, 3, moe_infinity, detail=True, learned=learned)
    assert cold.missed.tolist() == [1, 1, 1, 1, 0, 1]
    assert warm.missed.tolist() == [1, 1, 1, 1, 1, 0]
    assert cold.learned is None


def test_a_smaller_collection_gets_the_last_prompts_of_an_earlier_run():
    before = caches("moe-infinity")
    serve(before, STEPS)
    collection = export_learned(before)["0/decode"]
    assert len(collection) > 3
    for capacity in (3, 500):
        after = caches(f"moe-infinity:capacity={capacity}")
        restore_learned(after, export_learned(before))
        np.testing.assert_array_equal(export_learned(after)["0/decode"], collection[-capacity:])


def test_moe_infinity_replaces_the_nearest_eam_of_a_full_collection():
    """Figure 10: of three EAMs, P4 replaces P3. (The figure rounds 0.45, 0.82 and 0.11.)

    Cosines with P4: 3 / sqrt(10 * 3) of P1, 2 / sqrt(10 * 12) of P2, 8 / sqrt(10 * 8) of P3.
    """
    p1, p2 = [0, 1, 1, 0, 0, 1], [2, 0, 2, 0, 2, 0]  # three layers of two experts
    p3, p4 = [1, 1, 0, 2, 1, 1], [1, 1, 0, 2, 0, 2]
    moe_infinity = policy("moe-infinity:capacity=3")
    cache = Cache(Pieces.unsplit([0, 2, 4, 6], [1] * 3), 6, moe_infinity)
    for prompt, eam in enumerate([p1, p2, p3, p4]):
        for layer in range(3):
            pieces = np.array([p for p in (2 * layer, 2 * layer + 1) if eam[p]])
            rows = np.array([eam[p] for p in pieces], np.int32)
            cache.serve(pieces, 3 * prompt + layer, request=prompt, rows=rows)
            cache.release(pieces)
    assert export_learned(cache)["0/decode"].tolist() == [p1, p2, p4]


def test_moe_infinity_has_separate_collections_for_prefill_and_decode():
    """Section 4.3. Each request has a prompt of two tokens, in one pass, and an answer of one."""
    cache = Cache(Pieces.unsplit([0, 4], [1]), 4, policy("moe-infinity"))
    for prompt, (first, answer) in enumerate([(0, 1), (2, 3)]):
        for number, (piece, rows) in enumerate([(first, 2), (answer, 1)]):
            pieces, prefill = np.array([piece]), number == 0
            cache.serve(
                pieces, 2 * prompt + number, "none", request=prompt, prefill=prefill,
                rows=np.array([rows], np.int32),
            )  # fmt: skip
    learned = export_learned(cache)
    assert learned["0/prefill"].tolist() == [[2, 0, 0, 0], [0, 0, 2, 0]]
    assert learned["0/decode"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


def test_next_use_misses_less_with_the_links_of_an_earlier_run():
    """Expert 2 n + 1 follows 2 n, of eight pairs in random order; only the past tells."""
    rng = np.random.default_rng(1)

    def run(pairs: int) -> list[Step]:
        experts = [e for n in rng.integers(0, 8, pairs).tolist() for e in (2 * n, 2 * n + 1)]
        return [Step([e], t, t, 0, 0, [], []) for t, e in enumerate(experts)]

    earlier, later, offsets = as_stream(run(400)), as_stream(run(40)), [0, 16]
    learned = replay(earlier, offsets, 6, policy("next-use:memory=20"), learned={}).learned
    cold = replay(later, offsets, 6, policy("next-use:memory=20")).misses
    other = policy("next-use:memory=10,discount=0.8")
    warm = replay(later, offsets, 6, other, learned=learned).misses
    assert warm < 0.9 * cold


def test_a_smaller_memory_of_next_use_gets_the_latest_passes_of_an_earlier_run():
    before = caches("next-use:memory=7")
    serve(before, STEPS)
    passes = export_learned(before)["0/passes"]
    assert len(passes) == 7
    last = [sum(1 << p - OFFSETS[s.layer] for p in s.pieces) for s in STEPS[-LAYERS:]]
    assert passes[0, :, 0].tolist() == last
    for count in (3, 500):
        after = caches(f"next-use:memory={count}")
        restore_learned(after, export_learned(before))
        np.testing.assert_array_equal(export_learned(after)["0/passes"], passes[:count])
        serve(after, STEPS)


def test_next_use_recalls_what_followed_in_an_earlier_run():
    """A text of 40 passes in random order comes again: its passes tell which expert comes next."""
    rng, offsets = np.random.default_rng(2), [0, 24]
    text = rng.integers(0, 24, 40).tolist()
    steps = as_stream([Step([e], t, t, 0, 0, [], []) for t, e in enumerate(text)])
    learned = replay(steps, offsets, 8, policy("next-use"), learned={}).learned
    forgotten = {name: a for name, a in learned.items() if name != "passes"}
    forgotten["passes"] = np.zeros((0, 1, 1), np.uint64)
    misses = [
        replay(steps, offsets, 8, policy("next-use"), learned=state).misses
        for state in (learned, forgotten)
    ]
    assert misses[0] < misses[1]


def test_next_use_stores_no_links_of_a_model_where_they_are_too_large(monkeypatch):
    before, after = caches("next-use"), caches("next-use")
    serve(before, STEPS)
    monkeypatch.setattr(next_use_learned, "MOST_LINKS", 10)
    learned = export_learned(before)
    assert "0/links" not in learned
    serve(after, STEPS)
    restore_learned(after, learned)
    assert not after.policy_states[0].links.any()
    np.testing.assert_array_equal(after.policy_states[0].weights, learned["0/weights"])


def test_next_use_ranks_residents_by_restored_estimates():
    before, after = caches("next-use"), caches("next-use")
    serve(before, STEPS)
    serve(after, STEPS[:9])
    restore_learned(after, export_learned(before))
    state, residents = after.policy_states[0], after.residents()
    assert residents.size
    keys = np.full_like(state.key, np.inf)
    for piece in residents.tolist():
        layer = int(state.layer[piece])
        keys[layer, piece - OFFSETS[layer]] = state.value[layer, piece - OFFSETS[layer]]
    np.testing.assert_array_equal(state.key, keys)
    np.testing.assert_array_equal(state.floor, keys.min(axis=1))


BAD = {
    "missing": ("next-use", {"long": None}, "the array long is missing"),
    "shape": ("next-use", {"mean": np.ones(2)}, r"mean is float64\[2\], not float64\[3\]"),
    "type": ("next-use", {"mean": np.ones(3, np.float32)}, "mean is float32"),
    "range": ("next-use", {"mean": np.full(3, 2.0)}, "value that is not from 0 to 1"),
    "no share": ("next-use", {"mean": np.zeros(3)}, "no share for a layer"),
    "not finite": ("next-use", {"weights": np.full((3, 5), np.nan)}, "array weights has a value"),
    "passes": ("next-use", {"passes": np.zeros((2, 3, 2), np.uint64)}, r"'any', 3, 1\]"),
    "expert": ("next-use", {"passes": np.full((2, 3, 1), 16, np.uint64)}, "does not have"),
    "links": ("next-use", {"links": np.zeros(3)}, "the array links is float64"),
    "experts": (
        "moe-infinity",
        {"decode": np.ones((2, 11), np.int32)},
        r"decode is int32\[2, 11\], not int32\['any', 12\]",
    ),
    "negative": ("moe-infinity", {"prefill": np.full((2, 12), -1, np.int32)}, "not from 0"),
    "version": ("next-use", {"version": np.array(7)}, "have version 7, but must have version 2"),
    "versions": ("next-use", {"version": np.ones(2)}, "must have version 2"),
    "no version": ("moe-infinity", {"version": None}, "have no version, but must have version 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(case):
    name, changes, message = BAD[case]
    before, after = caches(name), caches(name)
    serve(before, STEPS)
    changed = {f"0/{key}": array for key, array in changes.items()}
    arrays = {**export_learned(before), **changed}
    fresh = export_learned(after)
    with pytest.raises(ValueError, match=message):
        restore_learned(after, {k: a for k, a in arrays.items() if a is not None})
    for key, array in export_learned(after).items():
        np.testing.assert_array_equal(array, fresh[key])


def test_arrays_of_another_number_of_devices_or_of_no_policy_are_refused():
    before = caches("moe-infinity", devices=2)
    with pytest.raises(ValueError, match="are of 2 devices, but the cache has 1"):
        restore_learned(caches("moe-infinity"), export_learned(before))
    with pytest.raises(ValueError, match="are of 1 devices, but the cache has 2"):
        restore_learned(before, {"decode": np.zeros(1)})
    with pytest.raises(ValueError, match="policy lru stores nothing"):
        restore_learned(caches("lru"), export_learned(caches("next-use")))
    assert export_learned(caches("lru")) == {}


def test_empty_eams_are_left_out():
    cache = caches("moe-infinity")
    collection = np.zeros((3, 12), np.int32)
    collection[1, 4] = 2
    empty = np.zeros((1, 12), np.int32)
    arrays = {"0/version": np.array(2), "0/decode": collection, "0/prefill": empty}
    restore_learned(cache, arrays)
    np.testing.assert_array_equal(export_learned(cache)["0/decode"], collection[1:2])
    assert export_learned(cache)["0/prefill"].shape == (0, 12)
    serve(cache, STEPS)


def test_a_replay_with_resets_has_no_learned_state():
    with pytest.raises(ValueError, match="`reset` and `learned` exclude each other"):
        replay(as_stream(STEPS), OFFSETS, 4, policy("next-use"), reset=True, learned={})


def with_network(cache: Cache) -> Arrays:
    """What a cache's policy has learned, with a network of random weights."""
    random = np.random.default_rng(7)
    shapes = next_use_network.shapes(LAYERS, max(np.diff(OFFSETS)))
    learned = dict(export_learned(cache))
    for name, shape in shapes.items():
        learned[f"0/network.{name}"] = random.standard_normal(shape).astype(np.float32)
    return learned


def test_a_network_comes_back_and_chooses_other_victims():
    before, plain, trained = (caches("next-use") for _ in range(3))
    serve(before, STEPS)
    restore_learned(plain, export_learned(before))
    learned = with_network(before)
    restore_learned(trained, learned)
    later = tokens(seed=6, count=60)
    assert serve(plain, later) != serve(trained, later)
    again = export_learned(trained)
    assert again.keys() == learned.keys()
    for name, array in learned.items():
        if "network" in name:
            np.testing.assert_array_equal(again[name], array, strict=True)
        elif name != "0/version":  # the network changes nothing of what is learned online
            np.testing.assert_array_equal(again[name], export_learned(plain)[name], strict=True)
    restore_learned(trained, export_learned(plain))  # without a network
    assert not any("network" in name for name in export_learned(trained))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("output", np.zeros((1, 2, 3), np.float32), "network.output is float32"),
        ("units", None, "network.units is missing"),
        ("linear", np.full((LAYERS, 5), np.nan, np.float32), "network.linear has a value"),
        ("linear", np.full((LAYERS, 5), 2e4, np.float32), "network.linear has a value"),
    ],
)
def test_a_wrong_network_changes_nothing(name, value, words):
    before, after = caches("next-use"), caches("next-use")
    serve(before, STEPS)
    learned = dict(with_network(before))
    if value is None:
        del learned[f"0/network.{name}"]
    else:
        learned[f"0/network.{name}"] = value
    with pytest.raises(ValueError, match=words):
        restore_learned(after, learned)
    assert not after.policy_states[0].network.trained[0]
    assert not after.policy_states[0].layer_steps.any()
