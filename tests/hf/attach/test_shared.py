"""Shared experts computed in the middle of the experts: found, used where expected, same bits."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from greenroom.core.events import Predicted, Routed
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.attach.shared import SharedModules
from greenroom.hf.index.experts import expert_modules
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.models import cached_tiny, make

# Which module of the block comes after the experts.
AFTER = {
    "deepseek_v2": "shared_experts", "deepseek_v3": "shared_experts", "deepseek_v4":
    "shared_experts", "flint": "shared_expert", "glm4_moe": "shared_experts", "granitemoeshared":
    "shared_mlp", "hy_v3": "shared_experts", "inkling_text": "shared_experts",
}  # fmt: skip
OTHERS = (
    "aria_text", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v32", "dots1", "exaone_moe",
    "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "granitemoehybrid", "hy_v4", "kimi_linear",
    "kolibri1", "nemotron_h", "solar_open",
)  # fmt: skip
NONE = ("afmoe", "ernie4_5_moe", "gemma4_text", "hunyuan_v1_moe", "mixtral", "qwen2_moe")
MORE = {"cohere2_moe": {"num_shared_experts": 1}}


def model_of(name: str) -> nn.Module:
    return make(name, **MORE.get(name, {})).eval()


def ids(*shape: int, seed: int = 5) -> Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(seed))


class Standin:
    """In the driver's place: calls `meanwhile` in the middle of every experts forward."""

    def __init__(self, model: nn.Module, inside: Callable[[int], None] | None = None) -> None:
        self.modules = list(expert_modules(model).values())
        self.shared = SharedModules(model, self.modules)
        self.inside = inside
        for layer, module in enumerate(self.modules):
            module.forward = self._forward(layer, module)

    def _forward(self, layer: int, module: nn.Module) -> Callable[..., Tensor]:
        def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
            with torch.no_grad():
                self.shared.compute_early[layer]()
            if self.inside is not None:
                self.inside(layer)
            return type(module).forward(module, *args, **kwargs)

        return forward

    def end(self) -> None:
        self.shared.detach()
        for module in self.modules:
            del module.forward


@contextmanager
def standing_in(model: nn.Module, **options) -> Iterator[Standin]:
    standin = Standin(model, **options)
    try:
        yield standin
    finally:
        standin.end()


def used(shared: SharedModules) -> int:
    """Calls whose output was there already."""
    return sum(layer.used for layer in shared._layers)


def wasted(shared: SharedModules) -> int:
    """Outputs that were computed ahead and not asked for."""
    return sum(layer.wasted for layer in shared._layers)


def counts(shared: SharedModules) -> tuple[int, int]:
    return used(shared), wasted(shared)


PASSES = (ids(2, 7), ids(1, 1), ids(1, 5))


def logits(model: nn.Module, batches=PASSES) -> list[Tensor]:
    return [model(input_ids=batch, use_cache=False).logits for batch in batches]


def decoded(model: nn.Module) -> Tensor:
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True}
    out = model.generate(ids(1, 6), **options, return_dict_in_generate=True, eos_token_id=None)
    return torch.stack(out.logits)


MODES = (torch.no_grad, torch.inference_mode)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, MODES[n % 2]) for n, name in enumerate(AFTER)),
        *(pytest.param(name, torch.no_grad, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_the_shared_experts_are_found_and_give_the_same_bits(name, mode):
    model = model_of(name)
    layers = len(expert_modules(model))
    with mode():
        wanted = logits(model)
        with standing_in(model) as standin:
            assert standin.shared.modules == {}
            first = logits(model, PASSES[:1])
            assert used(standin.shared) == 0
            found = standin.shared.modules
            names = {id(module): name for name, module in model.named_modules()}
            assert len(found) == layers
            known = {AFTER[name]} if name in AFTER else {"shared_experts", "shared_mlp"}
            assert {names[id(each)].split(".")[-1] for each in found.values()} <= known
            got = first + logits(model, PASSES[1:])
            assert counts(standin.shared) == (2 * layers, 0)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("name", NONE)
def test_what_runs_before_the_experts_is_left_alone(name):
    model = model_of(name)
    with torch.no_grad():
        wanted = logits(model)
        with standing_in(model) as standin:
            assert all(map(torch.equal, logits(model), wanted))
            assert standin.shared.modules == {}
            assert used(standin.shared) == 0
            assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["deepseek_v3", "inkling_text", "granitemoeshared"])
def test_decoding_with_a_cache(name):
    model = model_of(name)
    wanted = decoded(model)
    with standing_in(model) as standin:
        assert torch.equal(decoded(model), wanted)
        assert used(standin.shared) == 4 * len(standin.modules)
        assert wasted(standin.shared) == 0


def test_routers_with_something_between_them_and_the_experts():
    for name, early in (("afmoe", {"router"}), ("deepseek_v3", set()), ("qwen2_moe", set())):
        model = model_of(name)
        with torch.no_grad(), standing_in(model) as standin:
            assert standin.shared.early_routers == {}
            logits(model)
            names = {id(module): name for name, module in model.named_modules()}
            found = {
                names[id(each)].split(".")[-1] for each in standin.shared.early_routers.values()
            }
            assert found == early
            assert len(standin.shared.early_routers) == (len(standin.modules) if early else 0)


def test_a_latent_projection_between_gate_and_experts_is_something():
    model = make("nemotron_h", moe_latent_size=24).eval()
    with torch.no_grad(), standing_in(model) as standin:
        wanted = logits(model)
        assert [type(each).__name__ for each in standin.shared.early_routers.values()] == [
            "NemotronHTopkRouter"
        ] * len(standin.modules)
        assert all(map(torch.equal, logits(model), wanted))
        assert used(standin.shared) > 0


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_was_written_meanwhile_is_computed_anew(mode):
    """A block that changes its own input in place, while the output of the old one is there."""
    model = model_of("deepseek_v3")
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    given: dict[int, Tensor] = {}
    for layer, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda _, args, at=layer: given.update({at: args[0]}))

    def spoil(layer: int) -> None:
        given[layer].mul_(1.5)

    with mode():
        without = Standin(model, spoil)
        without.shared.detach()
        wanted = logits(model)
        without.end()
        with standing_in(model, inside=spoil) as standin:
            assert all(map(torch.equal, logits(model), wanted))
            assert used(standin.shared) == 0
            assert wasted(standin.shared) == 2 * len(blocks)


def test_another_input_is_computed_as_usual():
    """Somebody else calls the shared module in between: it answers him, and nothing is mixed up."""
    model, other = model_of("glm4_moe"), torch.ones(1, 3, 32)
    with torch.no_grad():
        wanted = logits(model)
        logits(model, PASSES[:1])
        answers: list[Tensor] = []
        holder: list[SharedModules] = []

        def ask(layer: int) -> None:
            if layer in holder[0].modules:
                answers.append(holder[0].modules[layer](other))

        with standing_in(model, inside=ask) as standin:
            holder.append(standin.shared)
            assert all(map(torch.equal, logits(model), wanted))
            found = dict(standin.shared.modules)
            assert used(standin.shared) == 0
            assert wasted(standin.shared) == len(answers) == 2 * len(found)
        expected = [found[layer](other) for layer in sorted(found)] * 2
        assert all(map(torch.equal, answers, expected))


def test_nothing_is_done_where_gradients_or_dropout_would_notice():
    model = model_of("deepseek_v3")
    with standing_in(model) as standin:
        wanted = logits(model)
        assert wanted[0].requires_grad
        with torch.no_grad():
            logits(model)
        before = used(standin.shared)
        assert before > 0
        got = logits(model)
        assert got[0].requires_grad
        assert all(map(torch.equal, got, wanted))
        with torch.no_grad():
            model.train()
            logits(model)
        assert counts(standin.shared) == (before, 0)


def test_a_step_without_stalls_costs_nothing_and_keeps_nothing():
    model = model_of("deepseek_v3")
    with torch.no_grad(), standing_in(model) as standin:
        wanted = logits(model)
        before, kept = used(standin.shared), []
        block = model.model.layers[1].mlp
        hook = block.register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
        for layer in standin.shared.compute_early:
            standin.shared.compute_early[layer] = lambda: None
        assert all(map(torch.equal, logits(model), wanted))
        hook.remove()
        gc.collect()
        assert len(kept) == len(PASSES)
        assert all(each() is None for each in kept)
        assert used(standin.shared) == before


def test_meanwhile_may_be_called_at_any_time_and_often():
    model = model_of("deepseek_v3")
    with torch.no_grad():
        wanted = logits(model)
        with standing_in(model) as standin:

            def again(layer: int) -> None:
                standin.shared.compute_early[layer]()

            standin.inside = again
            again(0)
            assert all(map(torch.equal, logits(model), wanted))
            again(1)
            assert used(standin.shared) == 2 * len(standin.modules)
            assert wasted(standin.shared) == 0
        again(0)


def test_a_pass_that_fails_halfway_does_no_harm():
    model = model_of("glm4_moe")
    armed = []

    def fail(layer: int) -> None:
        if armed and layer == 1:
            raise OSError("in the middle of the second layer")

    with torch.no_grad():
        wanted = logits(model)
        with standing_in(model, inside=fail) as standin:
            for _ in range(3):  # also while it still watches
                armed.append(1)
                with pytest.raises(OSError, match="in the middle"):
                    logits(model)
                armed.clear()
                assert all(map(torch.equal, logits(model), wanted))
            assert used(standin.shared) > 0


def test_passes_of_shapes_only_teach_nothing():
    """A layer that was run on the meta device is watched until it runs with numbers."""
    model = model_of("deepseek_v3")
    block = model.model.layers[1].mlp
    modules = list(expert_modules(model).values())
    model = nn.ModuleList([block])
    shared = SharedModules(model, modules[:1])

    def forward(x: Tensor, *rest: Tensor) -> Tensor:  # as the streamed experts forward does
        shared.compute_early[0]()
        return torch.empty_like(x) if x.is_meta else type(modules[0]).forward(modules[0], x, *rest)

    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))
    weights = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with torch.no_grad():
        wanted = type(block).forward(block, x)  # past the block's hooks
        modules[0].forward = forward
        model.to("meta")
        block(x.to("meta"))
        assert shared.modules == {}
        model.to_empty(device="cpu")
        block.load_state_dict(weights)
        assert torch.equal(block(x), wanted)
        assert shared.modules == {0: block.shared_experts}
        assert torch.equal(block(x), wanted)
        assert counts(shared) == (1, 0)
    shared.detach()


def test_detaching_takes_everything_out():
    model = model_of("deepseek_v3")

    def state() -> list[tuple[int, int, int, bool]]:
        return [
            (id(m), len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__)
            for m in model.modules()
        ]

    before = state()
    modules = list(expert_modules(model).values())
    with torch.no_grad():
        wanted = logits(model)
        for passes in (0, 1):
            shared = SharedModules(model, modules)
            assert state() != before
            logits(model, PASSES[:passes])
            shared.detach()
            shared.detach()
            assert state() == before
            assert all(map(torch.equal, logits(model), wanted))


def test_a_forward_of_its_own_is_kept_and_given_back():
    """As another mechanism may have given it one."""
    model = model_of("deepseek_v3")
    module, calls = model.model.layers[1].mlp.shared_experts, []

    def forward(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return type(module).forward(module, x)

    module.forward = forward
    with torch.no_grad():
        wanted = logits(model)
        calls.clear()
        with standing_in(model) as standin:
            assert all(map(torch.equal, logits(model), wanted))
            assert used(standin.shared) > 0
            assert len(calls) == len(PASSES)
    assert module.forward is forward


def test_hooks_of_others_see_every_call_once():
    model = model_of("deepseek_v3")
    module, outputs = model.model.layers[1].mlp.shared_experts, []
    module.register_forward_hook(lambda _, args, output: outputs.append(output))
    with torch.no_grad():
        logits(model)
        with standing_in(model):
            logits(model)
    assert len(outputs) == 2 * len(PASSES)
    assert all(map(torch.equal, outputs[: len(PASSES)], outputs[len(PASSES) :]))


def test_threads_do_not_meet():
    model, wrong = model_of("deepseek_v3"), []
    batches = [ids(1, 6, seed=seed) for seed in range(4)]
    with torch.no_grad():
        wanted = logits(model, batches)
    with standing_in(model) as standin:

        def work(number: int) -> None:
            with torch.no_grad():
                for _ in range(8):
                    if not torch.equal(
                        logits(model, batches[number : number + 1])[0], wanted[number]
                    ):
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert wasted(standin.shared) == 0
        assert used(standin.shared) >= (4 * 8 - 8) * len(standin.modules)


@pytest.mark.parametrize(
    ("name", "kernels"), [("deepseek_v3", "eager"), ("deepseek_v3", "native"), ("hy_v3", "native")]
)
def test_streamed_from_disk(name, kernels):
    """The real experts forward: what its driver would call while it waits, called in every step."""
    skeleton = ModelSkeleton.of(cached_tiny(name, dtype="bfloat16"))
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, capacity=4, kernels=kernels))
    modules = [model.get_submodule(path) for path in skeleton.catalog.layers]
    step = model.greenroom.driver.step
    try:
        wanted = decoded(model)
        shared = SharedModules(model, modules)

        def stalling(layer: int, *args, **kwargs) -> None:
            shared.compute_early[layer]()
            step(layer, *args, **kwargs)

        model.greenroom.driver.step = stalling
        assert torch.equal(decoded(model), wanted)
        assert used(shared) == 4 * len(modules)
        shared.detach()
        assert torch.equal(decoded(model), wanted)
    finally:
        model.greenroom.detach()


def test_what_a_router_has_chosen_comes_while_something_else_runs():
    """AFMoE runs its shared experts between router and experts: transfers begin before them."""
    skeleton = ModelSkeleton.of(cached_tiny("afmoe", dtype="bfloat16"))
    model = skeleton.load()
    parts = ModelSetup(
        skeleton.catalog, capacity=8, kernels="eager", prefetch="popularity", guard=False
    )
    model.greenroom = greenroom = Greenroom(model, parts)
    decided, routed = [], []
    try:
        wanted = decoded(model)
        tell, layers = greenroom.driver._handle, len(skeleton.catalog.layers)

        def listening(event) -> None:
            if isinstance(event, Predicted) and event.certain:
                decided.append((event.layer, event.experts.tolist()))
            if isinstance(event, Routed):
                routed.append((event.layer, event.experts.tolist()))
            tell(event)

        greenroom.driver._handle = greenroom.driver.predictions._send = listening
        assert torch.equal(decoded(model), wanted)
        assert len(decided) >= layers
        assert decided == routed
    finally:
        model.greenroom.detach()
