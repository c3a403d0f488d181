"""Modules that transformers imports at start-up and that a run does not use."""

from __future__ import annotations

import os
import sys

from greenroom.cli.early.deferred import (
    Decorator,
    DeferringFinder,
    Group,
    Placeholder,
    Wrapper,
)

SWITCH = "GREENROOM_DEFER_IMPORTS"

# Groups of modules, with the names that transformers imports from them.
NAMES: tuple[dict[str, str], ...] = (
    {
        "torch._dynamo": "",
        "torch._dynamo._trace_wrapped_higher_order_op": "TransformGetItemToIndex",
    },
    {
        "torch.distributed.tensor": "DTensor Partial Replicate Shard distribute_tensor",
        "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
        "torch.distributed.tensor.placement_types": "Shard _StridedShard",
        "torch.distributed.fsdp":
            "CPUOffloadPolicy FullyShardedDataParallel MixedPrecisionPolicy",
        "torch.distributed._composable": "",
        "torch.distributed._composable.fsdp": "fully_shard",
        "torch.distributed.checkpoint": "",
        "torch.distributed.checkpoint.hf_storage":
            "HuggingFaceStorageReader HuggingFaceStorageWriter",
        "transformers.distributed.expert_parallel": "apply_expert_parallelism",
        "transformers.distributed.parallel_utils":
            "ALL_PARALLEL_STYLES _get_parameter_plan replace_layer_number_by_wildcard",
        "transformers.distributed.tensor_parallel":
            "apply_tensor_parallelism gather_state_dict_for_save get_kv_heads_per_rank"
            " verify_tp_plan",
    },
    {"transformers.models": ""},
)  # fmt: skip
DECORATORS: dict[str, dict[str, type[Placeholder]]] = {
    "torch._dynamo": {
        "allow_in_graph": Decorator, "assume_constant_result": Decorator, "disable": Wrapper,
    },
}  # fmt: skip
FREE = ("transformers.models",)


def groups() -> list[Group]:
    """Make the groups of deferred modules."""
    return [
        Group(
            {
                module: dict.fromkeys(names.split(), Placeholder) | DECORATORS.get(module, {})
                for module, names in modules.items()
            },
            "transformers",
        )
        for modules in NAMES
    ]


def defer_unused_imports() -> None:
    """Defer the imports of these modules, unless GREENROOM_DEFER_IMPORTS is off, 0, no or false."""
    if os.environ.get(SWITCH, "").lower() not in ("off", "0", "no", "false"):
        sys.meta_path.insert(0, DeferringFinder(groups(), FREE))
