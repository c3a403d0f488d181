"""Steps of one token that a device has computed before the scheduler serves them."""

from __future__ import annotations

import pytest

from greenroom.errors import StoreError
from greenroom.runtime.driver.device_steps import DeferredSteps


@pytest.mark.parametrize("together", [0, 1, 2])
def test_observers_hear_of_steps_before_one_that_fails(together: int) -> None:
    """They were counted; the failed one and those behind it were not."""
    served, noted = list[int](), list[int]()

    class Step:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def serve(self) -> None:
            if self.layer == 2:
                raise StoreError("Input/output error")
            served.append(self.layer)

        def note(self) -> None:
            noted.append(self.layer)

    deferred = DeferredSteps(lambda steps: together)
    for layer in range(4):
        deferred.add(Step(layer))  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="Input/output error"):
        deferred.settle()
    assert served == [0, 1][together:]
    assert noted == [0, 1]
    deferred.settle()  # there are none any more
    assert noted == [0, 1]
