"""A model with a subset of its experts equals the model with a mask on its routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.config import LoadConfig
from greenroom.core.cache.pins import Pins, Task
from greenroom.errors import CheckpointError, UnsupportedCall, UsageError
from greenroom.hf.check.quality import quality
from greenroom.hf.checkpoint.pack.header_file import read
from greenroom.hf.load.load import load_with
from greenroom.hf.load.report import startup_line
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.packing import pack
from greenroom.hf.pack.subset import Keep
from greenroom.hf.variants.subset import ExpertSubset
from greenroom.sim.pinned import expert_scores
from greenroom.trace import Trace
from tests.hf.attach.test_routers import OPTIONS, routers_of
from tests.hf.check.test_parity import ids
from tests.hf.conftest import one_line
from tests.models import cached_tiny, reference

pytestmark = pytest.mark.usefixtures("no_threads_left")
MODELS = {"qwen3_moe": {"norm_topk_prob": True}, "olmoe": {}, "gpt_oss": {}}


def folder(name: str) -> Path:
    return cached_tiny(name, tokenizer=True, num_experts_per_tok=3, **MODELS[name])


def subset_of(name: str, share: float = 0.5, seed: int = 0) -> ExpertSubset:
    """Random experts, as many in each layer."""
    catalog, random = ModelSkeleton.of(folder(name)).catalog, np.random.default_rng(seed)
    kept = [
        a + random.choice(n, round(share * n), replace=False)
        for a, n in zip(catalog.offsets, catalog.experts_per_layer, strict=False)
    ]
    return ExpertSubset.of(np.concatenate(kept), catalog)


def pins_file(path: Path, subset: ExpertSubset, tasks: int = 1) -> Path:
    offsets = tuple(np.cumsum((0, *subset.model_experts)).tolist())
    numbers = [a + e for a, layer in zip(offsets, subset.experts, strict=False) for e in layer]
    task = Task(np.array(numbers), np.zeros(offsets[-1]))
    path.write_text(json.dumps(Pins({f"task {n}": task for n in range(tasks)}, offsets).as_json()))
    return path


def loaded(source: Path, **options: Any) -> Any:
    config = LoadConfig(**{"cache": "50%", "prefetch": "off", "kernels": "eager", **options})
    return load_with(str(source), config, remember=False)[0]


def masked_answer(name: str, subset: ExpertSubset, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own model, whose routers' scores of all other experts are minus infinity."""
    original = reference(folder(name))
    for router, numbers in zip(routers_of(original), subset.experts, strict=True):
        bias = torch.full((router.weight.shape[0],), -torch.inf)
        bias[list(numbers)] = 0

        def linear(x, weight, given=None, mask=bias, real=torch.nn.functional.linear):
            return real(x, weight, given) + mask

        def forward(x, router=router, call=router.forward, linear=linear):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.nn.functional, "linear", linear)
                out = call(x)
            assert set(out[2].flatten().tolist()) <= set(numbers_of[id(router)])
            return out

        numbers_of[id(router)] = numbers
        monkeypatch.setattr(router, "forward", forward)
    return original.generate(ids(1, 6), **OPTIONS)


numbers_of: dict[int, tuple[int, ...]] = {}


@pytest.mark.parametrize("name", MODELS)
def test_a_run_with_a_subset_has_the_output_of_a_mask(name, tmp_path, monkeypatch):
    subset = subset_of(name)
    model = loaded(folder(name), only_experts=str(pins_file(tmp_path / "pins.json", subset)))
    assert model.greenroom.setup.catalog.experts == subset.count
    answer = model.generate(ids(1, 6), **OPTIONS)
    stats = model.greenroom.stats()
    model.greenroom.detach()
    expected = masked_answer(name, subset, monkeypatch)
    assert torch.equal(answer.sequences, expected.sequences)
    assert torch.allclose(
        torch.stack(answer.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-5
    )
    assert stats.subset == {"experts": subset.count, "model_experts": sum(subset.model_experts)}


def test_a_pack_of_a_subset_computes_what_a_run_with_it_does(tmp_path):
    subset = subset_of("gpt_oss")
    packed = pack(str(folder("gpt_oss")), tmp_path / "pack", "same", keep=Keep(lambda _: subset))
    assert packed.experts == subset.count
    answers = []
    for source, options in (
        (tmp_path / "pack", {}),
        (folder("gpt_oss"), {"only_experts": str(pins_file(tmp_path / "pins.json", subset))}),
    ):
        model = loaded(source, **options)
        answers.append(model.generate(ids(1, 6), **OPTIONS))
        assert model.greenroom.setup.fingerprint.endswith(f"-subset-{subset.digest}")
        model.greenroom.detach()
    assert torch.equal(*(torch.stack(each.logits) for each in answers))


def test_all_experts_are_the_exact_model(tmp_path):
    subset = subset_of("qwen3_moe", 1.0)
    pack(str(folder("qwen3_moe")), tmp_path / "pack", "same", keep=Keep(lambda _: subset))
    model = loaded(tmp_path / "pack")
    answer = model.generate(ids(1, 6), **OPTIONS)
    model.greenroom.detach()
    expected = reference(folder("qwen3_moe")).generate(ids(1, 6), **OPTIONS)
    assert torch.equal(torch.stack(answer.logits), torch.stack(expected.logits))


def test_a_pack_is_judged_against_the_complete_model(tmp_path):
    subset = subset_of("qwen3_moe", 0.75)
    pack(str(folder("qwen3_moe")), tmp_path / "pack", "same", keep=Keep(lambda _: subset))
    result = quality(str(tmp_path / "pack"), "An expert waits on disk until its cue." * 3)
    assert result.original == str(folder("qwen3_moe"))
    assert result.kl_mean > 1e-3


def test_a_pack_is_repaired_without_its_recording(tmp_path):
    subset, out = subset_of("qwen3_moe"), tmp_path / "pack"
    pack(str(folder("qwen3_moe")), out, "same", keep=Keep(lambda _: subset))
    before = (out / "experts.greenroom").read_bytes()
    damaged = bytearray(before)
    damaged[5000] ^= 1
    (out / "experts.greenroom").write_bytes(damaged)
    assert subset.count - pack(str(folder("qwen3_moe")), out, "same", repair=True).unchanged == 1
    assert (out / "experts.greenroom").read_bytes() == before


def recording(layers: int, experts: int) -> Trace:
    """A random recording of 40 tokens, with gate weights."""
    random = np.random.default_rng(0)
    order = np.argsort(random.random((40, layers, experts)), axis=2)[:, :, :3]
    return Trace(
        experts=order.astype(np.uint16),
        experts_per_layer=np.full(layers, experts),
        request_starts=np.array([0, 40]),
        pass_starts=np.arange(41),
        pass_prefill=np.zeros(40, np.bool_),
        labels=("",),
        weights=random.random((40, layers, 3)).astype(np.float16),
    )


def test_a_recording_chooses_the_experts_of_the_highest_scores():
    catalog = ModelSkeleton.of(folder("qwen3_moe")).catalog
    trace = recording(len(catalog.layers), catalog.experts_per_layer[0])
    subset = ExpertSubset.of_trace(trace, 0.5, "tcess", catalog)
    scores = expert_scores(trace, "tcess")
    for layer, numbers in enumerate(subset.experts):
        row = scores[catalog.offsets[layer] : catalog.offsets[layer + 1]]
        assert len(numbers) == len(row) // 2
        assert row[list(numbers)].min() >= np.delete(row, list(numbers)).max()
    with pytest.raises(UsageError, match="other numbers of experts"):
        ExpertSubset.of_trace(recording(len(catalog.layers), 5), 0.5, "counts", catalog)


def test_the_start_up_line_says_that_the_output_changes(tmp_path):
    subset = subset_of("qwen3_moe")
    config = LoadConfig(cache="50%", only_experts=str(pins_file(tmp_path / "pins.json", subset)))
    model, _ = load_with(str(folder("qwen3_moe")), config, remember=False)
    lines = [startup_line("m", model, config, verbose=verbose) for verbose in (False, True)]
    with pytest.raises(UnsupportedCall, match="load the complete model"):
        model.greenroom.materialize()
    model.greenroom.detach()
    for line in lines:
        assert subset.description in line
        assert "CHANGES THE OUTPUT" in line
    assert "--only-experts" in lines[1]


# Mistakes


def test_too_few_experts_and_several_tasks_are_refused(tmp_path):
    few = pins_file(tmp_path / "few.json", subset_of("qwen3_moe", 0.25))
    several = pins_file(tmp_path / "several.json", subset_of("qwen3_moe"), tasks=2)
    for path, message in ((few, "a token uses 3 experts"), (several, "of 2 tasks")):
        with pytest.raises(UsageError) as error:
            loaded(folder("qwen3_moe"), only_experts=str(path))
        assert message in one_line(error)


def test_routers_of_another_kind_are_refused_by_name(tmp_path):
    source = cached_tiny("deepseek_v3", tokenizer=True)
    catalog = ModelSkeleton.of(source).catalog
    path = pins_file(tmp_path / "pins.json", ExpertSubset.of(np.arange(catalog.experts), catalog))
    with pytest.raises(UsageError) as error:
        loaded(source, only_experts=str(path))
    assert "DeepseekV3TopkRouter of DeepseekV3ForCausalLM does not" in one_line(error)


def test_a_subset_of_a_pack_and_of_an_adapter_is_refused(tmp_path):
    subset = subset_of("qwen3_moe")
    path = pins_file(tmp_path / "pins.json", subset)
    pack(str(folder("qwen3_moe")), tmp_path / "pack", "same")
    with pytest.raises(UsageError) as error:
        loaded(tmp_path / "pack", only_experts=str(path))
    assert "needs the original of a pack" in one_line(error)
    with pytest.raises(UsageError, match="--only-experts and --adapter exclude each other"):
        LoadConfig(only_experts=str(path), adapter="a")


@pytest.mark.parametrize(
    "subset",
    [
        {"experts": [0, 0, 1, 2], "of": 8},
        {"experts": [3, 2, 1, 0], "of": 8},
        {"experts": [0, 1, 2], "of": 8},
        {"experts": [0, 1, 2, 8], "of": 8},
        {"experts": [0, 1, 2, 3], "of": 0},
        None,
    ],
)
def test_a_damaged_subset_in_a_header_is_one_error(tmp_path, subset):
    out = tmp_path / "pack"
    pack(str(folder("qwen3_moe")), out, "same", keep=Keep(lambda _: subset_of("qwen3_moe")))
    header = json.loads((out / "greenroom.json").read_text())
    header["layers"][-1]["subset"] = subset
    if subset is None:
        del header["layers"][-1]["subset"]
    (out / "greenroom.json").write_text(json.dumps(header))
    with pytest.raises(CheckpointError) as error:
        read(out)
    assert "make the pack again" in one_line(error)
