"""Facts about the served model that no request changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and formats of a loaded model.

    nbytes:      bytes of the weights in the checkpoint
    digest:      the checkpoint's fingerprint, of its config and the shapes of its weights
    stored_type: the type of most weights in the checkpoint, or the quantisation method
    gpu_bytes:   bytes of expert slots in GPU memory
    """

    architecture: str
    parameters: int
    experts: int  # of a layer, the largest number
    nbytes: int
    digest: str
    file_format: str
    stored_type: str
    gpu_bytes: int


def model_facts(engine: Any) -> ModelFacts | None:
    """Return facts about a serving engine's model; None before it is loaded."""
    if not engine.was_ready:
        return None
    model, greenroom = engine.model, engine.greenroom
    setup = greenroom.setup
    checkpoint, catalog = setup.source.checkpoint, setup.catalog
    types: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        types[str(tensor.dtype)] += tensor.nbytes
    packed = catalog.all_experts_bytes if checkpoint.pack is not None else 0
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    return ModelFacts(
        architecture=engine.model_type,
        parameters=model.num_parameters(),
        experts=max(catalog.experts_per_layer),
        nbytes=sum(types.values()) + packed,
        digest=setup.fingerprint,
        file_format="gguf" if checkpoint.files[0].endswith(".gguf") else "safetensors",
        stored_type=method or ("unknown" if packed else types.most_common(1)[0][0]),
        gpu_bytes=greenroom.capacity * catalog.slot_bytes if setup.cuda else 0,
    )
