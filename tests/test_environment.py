"""What torch and OpenMP are told."""

from __future__ import annotations

import os

import pytest

from greenroom.environment import SPINS, large_pages, wait_briefly


def test_they_spin_for_a_moment_and_sleep_then(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is put back at the end
        monkeypatch.delenv(name)
    wait_briefly()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", str(SPINS))


def test_the_user_s_own_settings_stay(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    wait_briefly()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("said", [None, "0"])
def test_large_tensors_have_large_pages_unless_the_user_says_otherwise(monkeypatch, said):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", said or "")
    if said is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == (said or "1")
