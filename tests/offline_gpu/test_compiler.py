"""What the offline compiler makes is what Triton makes, although architectures share its stages."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton

from tests.offline_gpu import elf
from tests.offline_gpu.compiler import compile_launch, specialize
from tests.offline_gpu.launches import FIRST, launches_of

SAMPLE = "few down", "many down"


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [89, 90, 120])
def test_machine_code_is_that_of_triton(architecture, tmp_path, monkeypatch):
    """These architectures take layouts that were made for another one."""
    assert not triton.knobs.runtime.interpret, "run it by make check-gpu-offline"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for launch in launches_of(FIRST, "q4_0", architecture):
        if launch.label in SAMPLE:
            code, special = compile_launch(launch, architecture), specialize(launch, architecture)
            options = dict(vars(special.options))
            own = triton.compile(special.source, target=special.target, options=options)
            assert elf.function(code.cubin) == elf.function(own.asm["cubin"])
            assert (code.shared, code.threads) == (own.metadata.shared, 32 * own.metadata.num_warps)
