"""Real models, tiny and random, with their experts on a GPU: bits, faults, sizes, budgets."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

import greenroom
from greenroom.errors import BudgetError, DeviceError, StoreError, UsageError
from greenroom.runtime.cuda.host import HostMemory
from tests.models import cached_tiny, reference

OPTIONS = {"max_new_tokens": 8, "do_sample": False}
FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")


def prompt() -> torch.Tensor:
    ids = torch.randint(3, 300, (1, 7), generator=torch.Generator().manual_seed(5))
    return ids.cuda()


@pytest.fixture
def loaded():
    models = []

    def make(name: str, **options):
        folder = str(cached_tiny(name, dtype="bfloat16", tokenizer=True))
        options = {"device": "cuda", "cache": "25%", "prefetch": "off", **options}
        models.append(greenroom.load(folder, **options)[0])
        return models[-1]

    yield make
    for model in models:
        if hasattr(model, "greenroom"):
            model.greenroom.detach()


@pytest.mark.parametrize("name", FAMILIES)
def test_eager_kernels_have_the_bits_of_transformers_on_the_same_gpu(name, loaded):
    wanted = reference(cached_tiny(name, dtype="bfloat16", tokenizer=True)).cuda()
    try:
        with torch.inference_mode():
            theirs = wanted.generate(prompt(), **OPTIONS), wanted(prompt()).logits
    finally:
        wanted.cpu()
    for options in ({"host_memory": "auto"}, {"cache": "100%"}, {"prefetch": "auto"}):
        model = loaded(name, kernels="eager", **options)
        assert model.device.type == "cuda"
        assert torch.equal(model.generate(prompt(), **OPTIONS), theirs[0])
        with torch.inference_mode():
            assert torch.equal(model(prompt()).logits, theirs[1])
        model.greenroom.detach()


@pytest.mark.parametrize("name", FAMILIES)
def test_triton_kernels_have_the_same_bits_whatever_the_cache(name, loaded):
    logits = []
    for options in ({"cache": "100%"}, {}, {"cache": "10%", "readers": 1}, {"prefetch": "auto"}):
        model = loaded(name, kernels="triton", **options)
        with torch.inference_mode():
            first = model(prompt(), use_cache=True)
            after = model(prompt()[:, :1], past_key_values=first.past_key_values)
        logits.append(torch.cat([first.logits, after.logits], 1))
        model.greenroom.detach()
    assert logits[0].isfinite().all()
    assert all(torch.equal(each, logits[0]) for each in logits)
    wanted = reference(cached_tiny(name, dtype="bfloat16", tokenizer=True))
    with torch.inference_mode():
        theirs = wanted(prompt().cpu()).logits
    assert (logits[0][:, :-1].cpu().float() - theirs.float()).abs().max() < 0.1 * theirs.abs().max()


def test_keys_and_values_in_host_memory_change_no_bit(loaded):
    """`--kv offloaded`: what a layer attends to is brought in before it and taken out after it."""
    wanted = loaded("qwen3_moe", kernels="triton").generate(prompt(), **OPTIONS)
    model = loaded("qwen3_moe", kernels="triton", kv="offloaded")
    assert torch.equal(model.generate(prompt(), **OPTIONS), wanted)
    assert torch.equal(model.generate(prompt(), **OPTIONS), wanted)  # a cache of its own each time


def test_one_small_copy_a_layer_is_all_that_is_waited_for(loaded):
    """Torch's own check raises where an operation waits for the device unasked."""
    model = loaded("qwen3_moe", cache="100%")
    model.generate(prompt(), **OPTIONS)
    with torch.inference_mode():
        cache = model(prompt(), use_cache=True).past_key_values
        hidden, layer = (
            torch.randn(1, 32, device="cuda").bfloat16(),
            model.greenroom.bindings.modules[0],
        )
        index, weights = torch.tensor([[1, 3]]).cuda(), torch.ones(1, 2, device="cuda").bfloat16()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(hidden, index, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache is not None


def test_resizing_while_it_generates_changes_no_bit(loaded):
    expected = loaded("qwen3_moe", cache="100%").generate(prompt(), **OPTIONS)
    model, stop = loaded("qwen3_moe", cache="100%"), threading.Event()

    def resize() -> None:
        while not stop.is_set():
            for cache in ("13%", "50%", "100%"):
                model.greenroom.resize(cache)
                time.sleep(0.002)

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(3):
            assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    finally:
        stop.set()
        thread.join()


def test_a_read_error_harms_its_answer_alone(loaded, monkeypatch):
    model = loaded("qwen3_moe", cache="13%", host_memory="auto")
    expected = model.generate(prompt(), **OPTIONS)
    model = loaded("qwen3_moe", cache="13%")
    store, count = model.greenroom.driver._copier._store, []
    read = store.read

    def failing(chunk, staging):
        count.append(chunk)
        if len(count) == 5:
            raise StoreError("cannot read shard: Input/output error")
        return read(chunk, staging)

    monkeypatch.setattr(store, "read", failing)
    with pytest.raises(StoreError, match="Input/output error"):
        model.generate(prompt(), **OPTIONS)
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)


def test_memory_that_cannot_be_registered_is_said_and_changes_no_bit(loaded, monkeypatch, caplog):
    expected = loaded("qwen3_moe").generate(prompt(), **OPTIONS)
    monkeypatch.setattr(
        "greenroom.runtime.cuda.engine.Cuda.register", lambda self, address, nbytes: "refused"
    )
    model = loaded("qwen3_moe")
    assert "could not be registered with the GPU (refused)" in caplog.text
    between = model.greenroom.driver.host_memory
    assert isinstance(between, HostMemory)
    assert not between.kernels_can_read
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)


def test_a_budget_of_the_gpu_s_memory_becomes_slots(loaded):
    stats = loaded("qwen3_moe", cache=None, memory="2GiB").greenroom.stats()
    assert stats.budget_bytes == 2 << 30
    assert stats.capacity == stats.experts
    with pytest.raises(BudgetError, match="of the GPU's memory, more than the budget of 20 MiB"):
        loaded("qwen3_moe", cache=None, memory="20MiB")
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(BudgetError, match="more than the GPU has free"):
        loaded("qwen3_moe", cache=None, memory=free + (8 << 30))


@pytest.mark.fills_memory
def test_a_gpu_that_others_fill_says_so(loaded):
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (300 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises((BudgetError, DeviceError)) as caught:
            loaded("qwen3_moe", cache=None, memory="1GiB")
        assert "\n" not in str(caught.value)
    finally:
        del held
        torch.cuda.empty_cache()


def test_kernels_for_cpus_are_refused(loaded):
    with pytest.raises(UsageError, match="native runs on a CPU only"):
        loaded("qwen3_moe", kernels="native")


LOST = """
import sys, torch, greenroom
from greenroom.errors import DeviceError
model, _ = greenroom.load(sys.argv[1], device="cuda", cache="25%", prefetch="off")
ids = torch.tensor([[5, 6, 7]]).cuda()
model.generate(ids, max_new_tokens=2, do_sample=False)
group = model.greenroom.kernel.compute_group
def crash(step, experts, slots):
    torch.zeros(4, device="cuda")[torch.tensor([1 << 40]).cuda()] = 1  # an assertion on the device
    group(step, experts, slots)
model.greenroom.kernel.compute_group = crash
try:
    model.generate(ids, max_new_tokens=2, do_sample=False)
except DeviceError as error:
    assert "\\n" not in str(error), error
    print("one line:", error)
except RuntimeError as error:  # the model's own operations met it first
    print("one line:", str(error).splitlines()[0])
sys.stdout.flush()
"""


def test_a_gpu_that_is_lost_in_the_middle_of_an_answer_ends_it_and_hangs_nothing():
    folder = str(cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True))
    done = subprocess.run(
        [sys.executable, "-c", LOST, folder],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "one line:" in done.stdout, done.stderr[-2000:]
