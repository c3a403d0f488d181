"""Probes, at the routers of tiny random models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from greenroom.errors import PredictorError
from greenroom.runtime.probes import GateInputProbe, Router, RouterGates, find_routers
from greenroom.runtime.probes import linear as probes
from greenroom.runtime.probes.linear import find_linear
from tests.models import VOCAB, make

TOKENS = 48
# What the router of each architecture computes; None: something else, and it is asked itself.
FORMULAS: dict[str, str | None] = {
    "qwen3_moe": "none",
    "gpt_oss": "none",  # with a bias
    "gemma4_text": "none",  # of normed and scaled states; on the decoder layer
    "ernie4_5_moe": "softmax",
    "minimax_m2": "sigmoid",  # its block hands the correction over
    "afmoe": "sigmoid",  # the same, and it insists on a batch
    "inkling_text": "sigmoid",  # its matrix has rows for shared experts
    "deepseek_v3": None,  # groups of experts
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def experts_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "_apply_gate")]


class Passed:
    """A model's pass: what each router was given, and what it answered."""

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.model = make(name, dtype).eval()
        self.routers = find_routers(self.model, experts_of(self.model))
        self.gates = RouterGates(self.routers)
        inputs = GateInputProbe(self.routers)
        answers: dict[int, Any] = {}
        hooks = [
            router.module.register_forward_hook(
                lambda module, args, out, layer=layer: answers.__setitem__(layer, out)
            )
            for layer, router in enumerate(self.routers)
        ]
        random = torch.Generator().manual_seed(1)
        ids = torch.randint(3, VOCAB, (1, TOKENS), generator=random)
        with torch.no_grad():
            self.model(input_ids=ids, use_cache=False)
        self.inputs = [inputs.take_array(layer) for layer in range(len(self.routers))]
        self.chosen = [
            answers[layer][2].reshape(TOKENS, -1).numpy() for layer in range(len(self.routers))
        ]
        self.logits = [
            answers[layer][0].reshape(TOKENS, -1).float().numpy()
            for layer in range(len(self.routers))
        ]
        inputs.detach()
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", FORMULAS)
def test_rankings_agree_with_the_router_on_its_own_inputs(name: str) -> None:
    passed = Passed(name)
    formula = FORMULAS[name]
    assert passed.gates.compiled == (0 if formula is None else len(passed.routers))
    for layer, (inputs, chosen) in enumerate(zip(passed.inputs, passed.chosen, strict=True)):
        linear = find_linear(passed.routers[layer])
        assert (linear and linear.function) == formula
        top_k = chosen.shape[1]
        batched = passed.gates.rank(layer, inputs, 4)
        one_by_one = [passed.gates.rank(layer, row[None], 4) for row in inputs]
        for ranked in (batched, np.concatenate(one_by_one)):
            assert ranked.dtype == np.int64
            np.testing.assert_array_equal(np.sort(ranked[:, :top_k]), np.sort(chosen))
            assert all(len(set(row)) == 4 for row in ranked.tolist())


def test_where_rounding_makes_ties_it_chooses_one_of_the_tied() -> None:
    passed = Passed("olmoe", "bfloat16")
    different = 0
    for layer, (inputs, chosen) in enumerate(zip(passed.inputs, passed.chosen, strict=True)):
        ranked = passed.gates.rank(layer, inputs, chosen.shape[1])
        for mine, theirs, logits in zip(ranked, chosen, passed.logits[layer], strict=True):
            odd = set(mine.tolist()) ^ set(theirs.tolist())
            different += bool(odd)
            if odd:
                values = logits[list(odd)]
                assert np.ptp(values) <= np.abs(values).max() / 64  # two steps of bfloat16
    assert different < 0.1 * TOKENS * len(passed.routers)


def test_experts_not_chosen_are_ranked_by_score() -> None:
    passed = Passed("deepseek_v3")
    chosen = passed.chosen[0]
    ranked = passed.gates.rank(0, passed.inputs[0], 8)
    assert all(sorted(row) == list(range(8)) for row in ranked.tolist())
    lower_ranks = np.take_along_axis(passed.logits[0], ranked[:, chosen.shape[1] :], axis=1)
    assert (np.diff(lower_ranks) <= 0).all()


@pytest.mark.parametrize("name", ["zaya", "deepseek_v4"])
def test_routers_that_need_what_is_not_known_ahead(name: str) -> None:
    model = make(name)
    routers = find_routers(model, experts_of(model))
    with pytest.raises(PredictorError, match="which only a forward pass has") as error:
        RouterGates(routers)
    assert "\n" not in str(error.value)


def test_experts_without_a_router_are_refused() -> None:
    model = make("qwen3_moe")
    names = experts_of(model)
    block = model.get_submodule(names[0].rpartition(".")[0])
    block.chooser = block.gate
    del block.gate
    with pytest.raises(PredictorError, match="no module `gate` or `router`"):
        find_routers(model, names)


def test_detached_probes_capture_nothing() -> None:
    model = make("qwen3_moe").eval()
    routers = find_routers(model, experts_of(model))
    inputs = GateInputProbe(routers)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    assert inputs.take_array(0).shape == (3, 32)
    with pytest.raises(ValueError, match="no input of the router of layer 0"):
        inputs.take_array(0)  # it was let go of
    assert inputs.take_if_captured(1, copy=False) is None
    assert inputs.take_if_captured(1) is None  # the input was forgotten without a copy
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    assert inputs.take_if_captured(1).shape == (3, 32)
    inputs.detach()
    inputs.detach()
    assert all(not router.module._forward_pre_hooks for router in routers)
    with pytest.raises(ValueError, match="no input of the router"):
        inputs.take_array(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
def test_captured_inputs_are_converted_exactly(tokens: int, dtype: torch.dtype) -> None:
    model = make("qwen3_moe").eval()
    routers = find_routers(model, experts_of(model))
    inputs = GateInputProbe(routers)
    x = (torch.randn(tokens, 32) * 1e3).to(dtype)
    x[0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    (hook,) = routers[0].module._forward_pre_hooks.values()
    hook(routers[0].module, (x,), {})
    wanted = x.float().numpy()
    assert np.array_equal(inputs.take_array(0).view(np.int32), wanted.view(np.int32))


def test_calls_of_a_router_run_no_hooks() -> None:
    model = make("deepseek_v3").eval()
    routers = find_routers(model, experts_of(model))
    gates, inputs = RouterGates(routers), GateInputProbe(routers)
    gates.rank(0, np.zeros((1, 32), np.float32), 2)
    with pytest.raises(ValueError, match="no input of the router"):
        inputs.take_array(0)


class Plain(nn.Module):
    """A router that answers by `choose` of its logits."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(3)))
        self.choose = choose

    def forward(self, hidden_states: Tensor) -> Any:
        logits = hidden_states.reshape(-1, 16) @ self.weight.T
        return self.choose(logits)


def test_a_formula_that_only_nearly_fits_is_not_taken() -> None:
    def choose(logits: Tensor) -> Any:
        """The best of each half: often the two best, but not always."""
        halves = logits.reshape(-1, 2, 4).argmax(2) + torch.tensor([0, 4])
        return logits, logits.gather(1, halves), halves

    router = Router(Plain(choose), nn.Module(), 8)
    assert find_linear(router) is None
    x = torch.randn(20, 16).numpy()
    ranked = RouterGates([router]).rank(0, x, 2)
    assert sorted(map(sorted, ranked.tolist())) == sorted(
        map(sorted, choose(torch.from_numpy(x) @ router.module.weight.detach().T)[2].tolist())
    )


def test_a_choice_that_is_no_expert_is_left_out() -> None:
    """As LongCat-Flash's identity, which has no weights."""

    def choose(logits: Tensor) -> Any:
        ids = torch.stack([logits.argmin(1), torch.full((len(logits),), 9)], 1)
        return logits, ids, ids

    gates = RouterGates([Router(Plain(choose), nn.Module(), 8)])
    ranked = gates.rank(0, np.eye(3, 16, dtype="f"), 8)
    scores = Plain(choose)(torch.eye(3, 16))[0].detach()
    assert (ranked[:, 0] == scores.argmin(1).numpy()).all()
    assert all(sorted(row) == list(range(8)) for row in ranked.tolist())


def test_a_router_that_chooses_too_few_experts_gives_minus_one_for_the_others() -> None:
    def choose(logits: Tensor) -> Any:
        ids = logits.argmin(1, keepdim=True)
        return logits[:, :1], logits.gather(1, ids), ids

    ranked = RouterGates([Router(Plain(choose), nn.Module(), 8)]).rank(
        0, np.eye(3, 16, dtype="f"), 3
    )
    assert (ranked[:, 0] >= 0).all()
    assert (ranked[:, 1:] == -1).all()


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda logits: logits, "does not return scores, weights and ids"),
        (lambda logits: (logits, logits, logits), "third result does not contain ids of experts"),
        (lambda logits: logits.nothing, "has no attribute"),
    ],
)
def test_a_module_that_is_no_router(choose: Any, message: str) -> None:
    with pytest.raises(
        PredictorError,
        match=f"^router Plain cannot be called outside of a forward pass: .*{message}",
    ):
        RouterGates([Router(Plain(choose), nn.Module(), 8)])


def test_hooks_on_a_router_are_left_behind_when_it_is_tried() -> None:
    """Hooks may hold objects that cannot be copied, such as the runtime's threads and locks."""
    model = make("gemma4_text")
    (router, *_) = find_routers(model, experts_of(model))
    lock = threading.Lock()
    for module in router.module.modules():
        module.register_forward_hook(lambda *_, lock=lock: lock.locked())
        module.register_forward_pre_hook(Holding(lock).hook)
    linear = find_linear(router)
    assert linear is not None
    assert linear.weight.data_ptr() == router.module.proj.weight.data_ptr()
    assert all(len(module._forward_hooks) == 1 for module in router.module.modules())


class Ranked(nn.Module):
    """A router that ranks by its logits, or by an object's choice, which no plain value tells."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(2)))
        self.sign, self.rows = [sign], list[int]()

    def forward(self, x: Tensor) -> Any:
        self.rows.append(len(x))
        scores = x @ self.weight.T * self.sign[0]
        return scores, *scores.topk(2)


def test_the_next_router_of_a_kind_is_tried_on_a_few_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "_FORMULAS", {})
    modules = [Ranked(sign) for sign in (1.0, 1.0, -1.0, 1.0)]
    found = [find_linear(Router(module, nn.Module(), 8)) for module in modules]
    few, all_rows = probes.FEW_ROWS, probes.ROWS
    assert [m.rows for m in modules] == [[all_rows], [few], [few, all_rows], [few]]
    assert [each is not None for each in found] == [True, True, False, True]
    assert found[3] is not None
    assert found[3].weight.data_ptr() == modules[3].weight.data_ptr()


def test_a_router_with_more_tensors_is_always_tried_on_all_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A correction of zeros in one layer does not tell which vector it is in the next."""
    monkeypatch.setattr(probes, "_FORMULAS", {})
    modules = [Ranked(1.0), Ranked(1.0)]
    for module in modules:
        module.register_buffer("correction", torch.zeros(8))
        assert find_linear(Router(module, nn.Module(), 8)) is not None
        assert module.rows == [probes.ROWS]


class Holding:
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def hook(self, *_: object) -> None:
        """Bound, so that a copy of the hook is a copy of the lock."""
