"""GGUF files as checkpoints: config and tokenizer by transformers' own GGUF mapping.

Experts keep the quantised blocks of the GGUF file in memory, and so do other matrices that compiled
kernels can read (hf/model/dense.py). All other tensors are dequantised when they are read. Config
values that the mapping leaves out, such as the experts' intermediate size, are read from the GGUF
file's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.gguf import (
    GGUF_CONFIG_ARCHS,
    get_gguf_config,
)
from transformers.modeling_gguf_pytorch_utils import (
    load_gguf_checkpoint,
)

from greenroom.core.layout import PLAIN
from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.hf.checkpoint.library_errors import check_layers, wrap_library_errors
from greenroom.json_file import printable

# Architectures that the tests compare with transformers.
SERVED = ("gpt-oss", "minimax-m2", "qwen2moe", "qwen35moe", "qwen3moe")
UNMAPPED = {  # metadata that transformers' mapping leaves out -> the config's name for it
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A checkpoint stored in one or several GGUF files.

    `folder` is the path of the first file, `config` is the GGUF metadata, and `tensors` has GGUF's
    tensor names. `hf_config` converts the metadata to a transformers config.
    """

    @classmethod
    def open(cls, path: str | PathLike[str]) -> GgufCheckpoint:
        """Open a GGUF model as a checkpoint, by reading only its headers.

        `path` is any file of the model. Raises NotAModel if it is no GGUF file, UnsupportedModel if
        the architecture is not supported or the package gguf is not installed, CheckpointError if a
        file is missing or damaged.
        """
        if find_spec("gguf") is None:
            raise UnsupportedModel(
                f"{path}: reading GGUF files needs the package gguf: pip install 'greenroom[gguf]'"
            )
        paths, metadata, tensors = read_gguf(Path(path).absolute())
        checkpoint = cls(paths[0], metadata, tuple(map(str, paths)), tensors, dict(tensors))
        if checkpoint.architecture not in SERVED:
            raise UnsupportedModel(
                f"{path}: the architecture {printable(checkpoint.architecture)} is not supported in"
                f" GGUF files; supported are {', '.join(SERVED)}"
            )
        return checkpoint

    @property
    def architecture(self) -> str:
        return str(self.config["general.architecture"])

    @property
    def has_value_mapping(self) -> bool:
        """True if transformers has a GGUF weight conversion for this architecture.

        For others, transformers has only a table of tensor names.
        """
        return self.architecture in GGUF_CONFIG_ARCHS

    @property
    def pretrained_arguments(self) -> dict[str, Any]:
        """Keyword arguments that make transformers' `from_pretrained` load this GGUF model."""
        return {
            "pretrained_model_name_or_path": self.folder.parent,
            "gguf_file": self.folder.name,
            "local_files_only": True,
        }

    @contextmanager
    def read_by_transformers(self) -> Iterator[None]:
        """Context manager that hides RoPE scaling metadata from transformers' GGUF loader.

        transformers reads RoPE scaling from the wrong bytes of the file, as an array, which fails
        from NumPy 2.4 on. `hf_config` sets `rope_scaling` from correctly read values.
        """
        import gguf

        class Reader(gguf.GGUFReader):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                for key in [key for key in self.fields if ".rope.scaling." in key]:
                    del self.fields[key]

        original = gguf.GGUFReader
        gguf.GGUFReader = Reader
        try:
            yield
        finally:
            gguf.GGUFReader = original

    def hf_config(self) -> PreTrainedConfig:
        """Make the transformers config of a GGUF model from its metadata.

        Values that transformers' GGUF mapping leaves out are added, such as the experts'
        intermediate size. Raises CheckpointError if the metadata make no valid config,
        UnsupportedModel if the RoPE scaling is not supported.
        """
        check_layers(self.config, len(self.tensors), str(self.folder))
        with wrap_library_errors(f"{self.folder}: the metadata of this file make no valid config"):
            if self.has_value_mapping:
                values = get_gguf_config(self.config, tuple(self.tensors))
            else:
                with self.read_by_transformers():
                    values = load_gguf_checkpoint(str(self.folder))["config"]
            values |= {"rope_scaling": scaling} if (scaling := self._scaling()) else {}
            config = AutoConfig.for_model(**values)
        for key, name in UNMAPPED.items():
            value = self.config.get(f"{self.architecture}.{key}")
            if value is not None and hasattr(config, name):
                setattr(config, name, value)
        return config

    def _scaling(self) -> dict[str, Any] | None:
        """Return the `rope_scaling` of a GGUF model's config; None without RoPE scaling."""
        prefix = f"{self.architecture}.rope.scaling."
        kind = self.config.get(f"{prefix}type", "none")
        if kind == "none":
            return None
        if kind != "yarn" or self.has_value_mapping:
            raise UnsupportedModel(
                f"{self.folder}: the RoPE scaling {printable(kind)} is not supported for GGUF files"
                f" of the architecture {self.architecture}"
            )
        return {
            "rope_type": "yarn",
            "rope_theta": self.config.get(f"{self.architecture}.rope.freq_base", 1e4),
            "factor": self.config[f"{prefix}factor"],
            "original_max_position_embeddings": self.config[f"{prefix}original_context_length"],
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": self.architecture != "gpt-oss",
        }

    def dtype(self) -> str:
        """Return the dtype in which a GGUF model computes.

        It is bfloat16 if any matrix is quantised or stored in bfloat16, else float16 if any is
        stored in float16, else float32.
        """
        kinds = {(s.encoding, s.dtype) for s in self.tensors.values() if len(s.shape) > 1}
        if any(encoding != PLAIN for encoding, _ in kinds) or (PLAIN, "bfloat16") in kinds:
            return "bfloat16"
        return "float16" if (PLAIN, "float16") in kinds else "float32"
