"""A GGUF model as a checkpoint.

Experts keep the quantised blocks of the GGUF file in memory, and so do other matrices that compiled
kernels can read (hf/model/dense.py). All other tensors are dequantised when they are read.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, NotMoE, UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.gguf.architectures import served_names
from greenroom.hf.checkpoint.gguf.config import config_of
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.hf.checkpoint.gguf.origin import Origin, find_origin
from greenroom.hf.checkpoint.gguf.scales import with_matrix_scales
from greenroom.hf.checkpoint.gguf.tokenizer import adapt_tokenizer, check_tokenizer
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.json_file import printable

ANY_TOKENIZER = "minimax_m2"  # a model type with transformers' class for any fast tokenizer


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A checkpoint stored in one or several GGUF files.

    `folder` is the path of the first file, `config` is the GGUF metadata, and `tensors` has GGUF's
    tensor names, and parameters of the model that the metadata have, which `stored` lacks.
    `transformers_config` is the model's config, and `origin` says where it is from.
    """

    transformers_config: PreTrainedConfig = field(kw_only=True)
    origin: Origin = field(kw_only=True)

    @classmethod
    def open(cls, path: str | PathLike[str], config: str | None = None) -> GgufCheckpoint:
        """Open a GGUF model as a checkpoint, by reading only its headers.

        `path` is any file of the model; `config` is a folder, file or hub id with the model's
        config. Raises NotAModel if it is no GGUF file, NotMoE for a dense model, UnsupportedModel
        if the architecture is not supported or the package gguf is not installed, CheckpointError
        if a file is missing or damaged.
        """
        if find_spec("gguf") is None:
            raise UnsupportedModel(
                f"{path}: reading GGUF files needs the package gguf: pip install 'greenroom[gguf]'"
            )
        paths, metadata, tensors = read_gguf(Path(path).absolute())
        architecture = str(metadata["general.architecture"])
        if architecture not in served_names():
            raise UnsupportedModel(
                f"{path}: the architecture {printable(architecture)} is not supported in GGUF"
                f" files; supported are {', '.join(served_names())}"
            )
        if f"{architecture}.block_count" not in metadata:
            raise CheckpointError(
                f"{path}: the metadata name the architecture {printable(architecture)}, but have no"
                f" {architecture}.block_count: download the file again"
            )
        if not metadata.get(f"{architecture}.expert_count"):
            raise NotMoE(f"{path}: this is a dense model without experts: run it with llama.cpp")
        header = Header(paths, metadata, tensors)
        origin = find_origin(header, config)
        model_config, origin = config_of(header, origin)
        stored = {name: tensor for name, tensor in tensors.items() if name not in metadata}
        tensors = with_matrix_scales(paths, architecture, tensors)
        return cls(
            paths[0], metadata, tuple(map(str, paths)), tensors, stored,
            transformers_config=model_config, origin=origin,
        )  # fmt: skip

    @property
    def architecture(self) -> str:
        return str(self.config["general.architecture"])

    @property
    def header(self) -> Header:
        """The header of the model's files."""
        return Header(tuple(map(Path, self.files)), self.config, self.tensors)

    @property
    def config_origin(self) -> str:
        """Words for the config's origin, such as `config of owner/name`."""
        return self.origin.text

    @property
    def tokenizer_arguments(self) -> dict[str, Any]:
        """Keyword arguments that make transformers load this model's tokenizer."""
        if self.origin.tokenizer is not None:
            return {
                "pretrained_model_name_or_path": self.origin.tokenizer,
                "local_files_only": True,
            }
        arguments: dict[str, Any] = {
            "pretrained_model_name_or_path": self.folder.parent,
            "gguf_file": self.folder.name,
            "local_files_only": True,
        }
        check_tokenizer(self.header)
        # transformers would otherwise read the file's header twice more to learn the model type.
        return {**arguments, "tokenizer_type": ANY_TOKENIZER}

    def adapt_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make a tokenizer from the metadata split text as the metadata say."""
        if self.origin.tokenizer is None:
            adapt_tokenizer(tokenizer, self.header)

    def hf_config(self) -> PreTrainedConfig:
        """Return a copy of the transformers config of a GGUF model."""
        return deepcopy(self.transformers_config)

    def dtype(self) -> str:
        """Return the dtype in which a GGUF model computes.

        It is bfloat16 if any matrix is quantised or stored in bfloat16, else float16 if any is
        stored in float16, else float32.
        """
        kinds = {(s.encoding, s.dtype) for s in self.tensors.values() if len(s.shape) > 1}
        if any(encoding != PLAIN for encoding, _ in kinds) or (PLAIN, "bfloat16") in kinds:
            return "bfloat16"
        return "float16" if (PLAIN, "float16") in kinds else "float32"
