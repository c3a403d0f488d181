"""Names of transformers that are not promised to stay: each says what changed when it fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import moe

from greenroom.hf.index.experts import FLAGS, is_experts


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def small(**values: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        num_hidden_layers=1,
        num_experts=2,
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=8,
        **values,
    )


def test_signatures() -> None:
    from transformers import conversion_mapping, core_model_loading, modeling_utils
    from transformers.models.auto import auto_factory

    expected: list[tuple[Callable[..., Any], list[str], str]] = [
        (
            PreTrainedModel._load_pretrained_model,
            ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"],
            "dense weights are loaded through it, from a state dict of tensors still on disk",
        ),
        (
            PreTrainedModel._finalize_model_loading,
            ["model", "load_config", "loading_info"],
            "it ties weights and computes the buffers that are not saved",
        ),
        (
            PreTrainedModel.get_init_context,
            ["dtype", "is_quantized", "_is_ds_init_called", "allow_all_kernels"],
            "the model is constructed on the meta device inside of these contexts",
        ),
        (PreTrainedModel._get_dtype_plan, ["self", "dtype"], "it says what stays in float32"),
        (
            modeling_utils._get_dtype,
            [
                "dtype",
                "checkpoint_files",
                "config",
                "sharded_metadata",
                "state_dict",
                "weights_only",
                "hf_quantizer",
            ],
            "it decides what dtype='auto' means",
        ),
        (
            core_model_loading.rename_source_key,
            [
                "source_key",
                "weight_renamings",
                "weight_converters",
                "base_model_prefix",
                "meta_state_dict",
                "reverse",
            ],
            "it says which parameter a checkpoint's tensor belongs to",
        ),
        (
            core_model_loading.WeightConverter.convert,
            ["self", "layer_name", "model", "config", "hf_quantizer", "loading_info"],
            "it is run on the numbers of one expert's elements",
        ),
        (
            core_model_loading.WeightConverter.add_tensor,
            ["self", "target_key", "source_key", "source_pattern", "future"],
            "it collects what is converted",
        ),
        (
            conversion_mapping.get_model_conversion_mapping,
            ["model", "key_mapping", "hf_quantizer", "add_legacy"],
            "it lists the conversions of a model",
        ),
        (auto_factory._get_model_class, ["config", "model_mapping"], "it picks the model's class"),
    ]
    for function, names, why in expected:
        name = function.__qualname__
        assert parameters(function) == names, f"{name} takes other arguments now; {why}"


def test_load_options() -> None:
    from transformers.modeling_utils import LoadStateDictConfig

    fields = set(LoadStateDictConfig.__dataclass_fields__)
    used = {"pretrained_model_name_or_path", "device_map", "dtype", "dtype_plan"}
    used |= {"weight_mapping", "use_safetensors"}
    assert used <= fields, f"LoadStateDictConfig lost {used - fields}"


def test_loading_info() -> None:
    from transformers.utils.loading_report import LoadStateDictInfo

    fields = set(LoadStateDictInfo.__dataclass_fields__)
    assert {"conversion_errors", "mismatched_keys", "missing_keys"} <= fields, (
        "what went wrong while loading is reported under other names now"
    )


def test_values_are_asked_for_with_an_index() -> None:
    """Weights on disk are read when transformers writes `tensor[...]`; no other method is used."""
    from transformers.core_model_loading import _materialize_copy

    class OnDisk:
        def __getitem__(self, whole: object) -> torch.Tensor:
            assert whole is Ellipsis
            return torch.ones(2)

    assert torch.equal(_materialize_copy(OnDisk(), "cpu", torch.float16), torch.ones(2).half())  # type: ignore[arg-type]


def test_converters_show_their_patterns_and_operations() -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter

    mapping = get_checkpoint_conversion_mapping("qwen3_moe")
    (first, second) = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    assert first.source_patterns == [
        "mlp.experts.*.gate_proj.weight",
        "mlp.experts.*.up_proj.weight",
    ], "experts stored one by one were known by a * in the pattern"
    assert second.target_patterns == ["mlp.experts.down_proj"]
    assert all(isinstance(op, ConversionOps) for op in first.operations)
    assert ConversionOps.supports_many_to_many is False


def test_operations_ask_the_model_for_nothing_but_a_parameters_shape() -> None:
    from transformers import core_model_loading

    source = inspect.getsource(core_model_loading)
    used = source.count('kwargs["model"].') + source.count("model.get_parameter(")
    assert used == 2, "Transpose and Split asked the model for shapes; something else does now too"


def test_decorated_experts_classes_are_recognised() -> None:
    assert set(FLAGS) <= set(parameters(moe.use_experts_implementation)), (
        "use_experts_implementation sets other flags now"
    )
    config = small()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    found = [name for name, module in model.named_modules() if is_experts(module)]
    assert found == ["model.layers.0.mlp.experts"], "experts modules are marked in another way now"


def test_experts_implementations_are_registered() -> None:
    assert callable(moe.ALL_EXPERTS_FUNCTIONS.register), "implementations register differently now"
    config = small()
    config._experts_implementation = "nonesuch"
    with torch.device("meta"), pytest.raises(ValueError, match="nonesuch"):
        Qwen3MoeForCausalLM(config)


def test_a_module_can_be_marked_as_initialised() -> None:
    source = inspect.getsource(PreTrainedModel._initialize_weights)
    assert 'getattr(module, "_is_hf_initialized", False)' in source, (
        "experts without parameters were skipped by weight initialisation through this flag"
    )


def test_tied_and_ignored_names() -> None:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(small(tie_word_embeddings=True))
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    for name in ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"):
        assert hasattr(model, name), f"{name} told which names may be missing or extra"


def test_generation_config_is_loaded_by_the_model() -> None:
    names = parameters(Qwen3MoeForCausalLM.adjust_generation_fn)
    assert names[1:5] == [
        "generation_config",
        "from_auto_class",
        "from_pipeline",
        "pretrained_model_name_or_path",
    ]
    assert names[-1] == "kwargs"


def test_output_recorders_are_patched_in_place() -> None:
    from transformers.monkey_patching import patch_output_recorders

    assert parameters(patch_output_recorders) == ["model"]


def test_a_parameter_may_be_none() -> None:
    """Torch: None in `_parameters` is skipped by state_dict, parameters and to."""
    module = nn.Linear(2, 2)
    module.register_parameter("weight", None)
    assert list(module.state_dict()) == ["bias"]
    assert module.to(torch.float16).weight is None


def test_version() -> None:
    assert transformers.__version__.startswith("5.23."), "read all of this file again"


def test_gguf() -> None:
    from transformers import core_model_loading
    from transformers.integrations.gguf import gguf_conversion_mapping as mapping
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_TOKENIZER_TYPES,
        get_gguf_tokenizer,
    )

    assert {"llama3", "qwen2", "gpt-4o"} <= {*GGUF_PRE_TOKENIZER_SPLITS}, "how text is split"
    assert {"gpt2", "llama", "gemma4"} <= {*GGUF_TOKENIZER_TYPES}, "tokenizers of GGUF metadata"

    expected: list[tuple[Callable[..., Any], list[str], str]] = [
        (get_gguf_tokenizer, ["gguf_path"], "the tokenizer that a GGUF file's metadata make"),
        (
            mapping.TiledToGroupedRows,
            ["num_k_heads", "heads_per_k", "head_dim", "offset"],
            "order of the value heads of Qwen3.5",
        ),
        (
            mapping.TiledToGroupedInputs,
            ["num_k_heads", "heads_per_k", "head_dim"],
            "order of the value heads of Qwen3.5",
        ),
        (mapping.LogNegate, [], "the decay of state spaces"),
        (mapping.SubtractOne, ["offset"], "norms that are stored plus one"),
        (core_model_loading.apply_renamings, ["source_key", "weight_renamings"], "names in GGUF"),
        (core_model_loading.apply_converters, ["source_key", "weight_converters"], "the same"),
    ]
    for function, names, why in expected:
        name = function.__qualname__
        assert parameters(function) == names, f"{name} takes other arguments now; {why}"


def test_quantisers_dequantise_if_configured_so() -> None:
    """`verify` has transformers expand a quantised checkpoint: `dequantize` in its config."""
    from transformers.utils import quantization_config as configs

    for name in ("FineGrainedFP8Config", "Mxfp4Config", "CompressedTensorsConfig"):
        assert "dequantize" in parameters(getattr(configs, name)), name


def test_attention_can_be_ours_for_a_pass() -> None:
    """Several sequences lie in one pass; what makes them is in hf/kv/batch.py."""
    from transformers import DynamicCache
    from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    config = small()
    config._attn_implementation_internal = "another"
    assert config._attn_implementation == "another", "an attention is chosen by another name now"
    assert "another" not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    given = ["module", "query", "key", "value", "attention_mask"]
    for own in (sdpa_attention_forward, modeling_qwen3_moe.eager_attention_forward):
        assert parameters(own)[:5] == given, "attention functions take other arguments now"
    chosen = inspect.unwrap(ALL_ATTENTION_FUNCTIONS["sdpa"])  # a token's graph wraps it
    assert chosen is sdpa_attention_forward
    assert parameters(Cache.update)[:4] == ["self", "key_states", "value_states", "layer_idx"]
    assert "logits_to_keep" in parameters(Qwen3MoeForCausalLM.forward)
    assert Cache(layers=[]).layers == [], "a cache cannot be made without layers any more"
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    assert (layer.cumulative_length, layer.sliding_window) == (0, 4)
    assert DynamicCache(config=config).layers, "layers of a cache are made later now"
