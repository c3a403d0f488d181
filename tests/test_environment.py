"""Environment variables that Greenroom sets for torch and OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from greenroom import environment
from greenroom.environment import SPINS, late_import_warning, limit_spinning, request_large_pages

UNSET = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setattr(environment, "_late", False)
    for name in UNSET:
        monkeypatch.setenv(name, "")  # so that it is put back at the end
        monkeypatch.delenv(name)


def test_they_spin_for_a_moment_and_sleep_then(unset):
    limit_spinning()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", str(SPINS))


def test_the_user_s_own_settings_stay(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    limit_spinning()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in os.environ


def test_after_torch_it_is_too_late_which_is_said_once(unset, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", os)
    limit_spinning()
    message = late_import_warning()
    assert "import greenroom first, or set OMP_WAIT_POLICY=PASSIVE" in message
    assert "\n" not in message
    limit_spinning()
    assert late_import_warning() == ""


@pytest.mark.parametrize("name", [*UNSET, "torch"])
def test_nothing_is_said_where_the_user_chose_or_torch_is_yet_to_come(unset, monkeypatch, name):
    if name == "torch":
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", os)
        monkeypatch.setenv(name, "1")
    limit_spinning()
    assert late_import_warning() == ""


def test_importing_greenroom_is_enough():
    """And not only the first use of a name, which may come after torch."""
    code = "import greenroom, os; print(os.environ['OMP_WAIT_POLICY'])"
    env = {name: value for name, value in os.environ.items() if name not in UNSET}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.stdout == "PASSIVE\n", ran.stderr


@pytest.mark.parametrize("value", [None, "0"])
def test_large_tensors_have_large_pages_unless_the_user_says_otherwise(monkeypatch, value):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", value or "")
    if value is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    request_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == (value or "1")


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_other_systems_are_refused_before_anything_is_imported(platform):
    code = (
        f"import sys; sys.platform = '{platform}'\n"
        "for name in ('torch', 'numpy', 'numba', 'fcntl'): sys.modules[name] = None\n"
        "import greenroom\n"
        "from greenroom.cli import main\n"
        "try: greenroom.load\n"
        "except greenroom.GreenroomError as error: print(error)\n"
        "sys.argv = ['greenroom', 'run', 'demo', 'x']\n"
        "sys.exit(main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr == f"greenroom: {ran.stdout}"
    assert ran.stdout.startswith(f"Greenroom runs on Linux only, and this is {platform}: ")
    assert ran.stdout.count("\n") == 1
