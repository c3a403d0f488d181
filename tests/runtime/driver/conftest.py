from __future__ import annotations

import pytest

from tests.runtime.rig import Rig


@pytest.fixture
def rig(disk):
    rigs = []

    def make(*args, layers=2, experts=4, **kwargs) -> Rig:
        rigs.append(Rig(disk(layers, experts), *args, **kwargs))
        return rigs[-1]

    yield make
    for each in rigs:
        each.driver.close()
