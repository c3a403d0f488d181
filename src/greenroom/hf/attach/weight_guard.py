"""Notice dense weights that got other memory behind the back of compiled layers.

`weight.data = other` keeps the parameter and exchanges its memory: compiled kernels would go on
reading the old address. Another parameter under the same name is noticed by the layers themselves
(runtime/kernels/dense/guard.py), and values written in place are seen by all.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import nn

from greenroom.errors import UnsupportedCall


class WeightGuard:
    """The addresses of a model's dense weights, compared at the start of each request."""

    def __init__(
        self, model: nn.Module, experts: Sequence[nn.Module], compiled: Set[nn.Module]
    ) -> None:
        """`experts` are the modules whose own parameters (biases) kernels hold, `compiled` those
        whose weights compiled dense layers read by address."""
        self._held = [
            (module if module in experts else None, name, own, weight, weight.data_ptr())
            for name, module in model.named_modules()
            if module in compiled or module in experts
            for own, weight in module.named_parameters(recurse=False)
        ]

    def check(self) -> None:
        """Raise UnsupportedCall where a weight's memory is another than when this was made."""
        for module, name, own, weight, address in self._held:
            exchanged = module is not None and module._parameters.get(own) is not weight
            if exchanged or weight.data_ptr() != address:
                raise UnsupportedCall(
                    f"{name}.{own} was given other memory, which compiled kernels do not see: write"
                    " values in place (weight.copy_(...) without gradients), or change it before"
                    " the model is attached"
                )
