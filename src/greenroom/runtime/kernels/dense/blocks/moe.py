"""The parts of an MoE block that compiled code computes: router, experts, shared expert.

The block's experts get the router's choice, and the output of a shared expert, an MLP for all
tokens, may be added to theirs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.runtime.kernels.dense.blocks.mlp import CompiledMlp
from greenroom.runtime.kernels.dense.blocks.router import CompiledRouter
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.dense.patterns import BlockParts, find_block_parts


class MoeBlock:
    """An MoE block whose experts are computed apart from its module's forward.

    `MoeBlock.of` makes it for blocks of the supported kind.

    module:  the block
    experts: its module of routed experts
    shared:  its shared expert, or None
    router:  its compiled router; None if its kind is not known
    """

    def __init__(
        self,
        module: nn.Module,
        experts: nn.Module,
        parts: BlockParts,
        shared: CompiledMlp | None,
        dtype: torch.dtype,
    ) -> None:
        """Describe a block; `dtype` is the type of its input."""
        self.module, self.experts, self.shared = module, experts, shared
        self._router_name, self._shape = parts.router, parts.shape
        router: Any = module._modules[parts.router]
        self.router = CompiledRouter.of(router, parts.shape, dtype)
        self.check = ModuleCheck()
        self.check.require_own_hooks(module)
        self.check.require_no_hooks(experts)
        for part in (module, experts):
            self.check.require_same(vars(part), "forward", None)
        if shared is not None:
            self.check.require_same(module._modules, parts.shared, shared.module)
            self.check.include(shared.check)

    @staticmethod
    def of(module: nn.Module, hidden: int, dtype: torch.dtype, kernels: str) -> MoeBlock | None:
        """Describe a decoder layer's block; return None for an MLP, and for other MoE blocks.

        kernels: products with encoded matrices: native, precise or rounded (matrix.py)
        """
        for name, experts in module._modules.items():
            if not (hasattr(experts, "num_experts") and hasattr(experts, "_apply_gate")):
                continue
            parts = find_block_parts(module, name, hidden, dtype)
            if parts is None or experts is None:
                return None
            if not parts.shared:
                return MoeBlock(module, experts, parts, None, dtype)
            added: Any = module._modules[parts.shared]
            shared = CompiledMlp.of(added, dtype, kernels)
            return None if shared is None else MoeBlock(module, experts, parts, shared, dtype)
        return None

    @cached_property
    def observed_check(self) -> ModuleCheck:
        """A check that compiled code can compute the block, whose router may be observed."""
        assert self.router is not None
        return self._with(self.router.observed_check)

    @cached_property
    def unobserved_check(self) -> ModuleCheck:
        """A check like `observed_check` that allows no hooks."""
        assert self.router is not None
        return self._with(self.router.check)

    def _with(self, router: ModuleCheck) -> ModuleCheck:
        guard = ModuleCheck()
        guard.include(router)
        guard.include(self.check)
        return guard

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (expert ids, gate weights), [T, top_k] each, for x [T, hidden]."""
        if len(x) == 1 and self.router is not None and self.router.is_unchanged():
            return self.router(x)
        router_input = x if len(self._shape) == 2 else x[None]
        router: Any = self.module._modules[self._router_name]
        _, weights, index = router(router_input)
        return index, weights
