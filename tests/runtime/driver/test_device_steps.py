"""Steps of one token that a device has computed before the scheduler serves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from greenroom.core.predictor import LayerRouting
from greenroom.errors import StoreError
from greenroom.runtime.driver.device_steps import ComputedStep, DeferredSteps


@pytest.mark.parametrize("together", [0, 1, 2])
def test_observers_hear_of_steps_before_one_that_fails(together: int) -> None:
    """They were counted; the failed one and those behind it were not."""
    served, noted = list[int](), list[int]()

    def serve(layer: int) -> Callable[[], None]:
        def serve_one() -> None:
            if layer == 2:
                raise StoreError("Input/output error")
            served.append(layer)

        return serve_one

    def observe(inputs: bool) -> LayerRouting:
        raise NotImplementedError

    deferred = DeferredSteps(lambda steps: together)
    for layer in range(4):
        deferred.add(
            ComputedStep(layer, list, observe, serve(layer), lambda at=layer: noted.append(at))  # type: ignore[misc]
        )
    with pytest.raises(StoreError, match="Input/output error"):
        deferred.settle()
    assert served == [0, 1][together:]
    assert noted == [0, 1]
    deferred.settle()  # there are none any more
    assert noted == [0, 1]
