"""The build of wheels: the kernels in them, and errors where kernels cannot be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hatch_build
from hatch_build import LIBRARIES, SWITCH, VERSION, KernelBuild, version

ROOT = Path(__file__).parents[1]
# Writes what cmake would: a library into the package's folder.
CMAKE = f"#!/bin/sh\nmkdir -p src/{LIBRARIES}\necho x > src/{LIBRARIES}/greenroom-avx2.so\n"


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """A folder that is all of PATH; return a function that puts scripts into it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(hatch_build.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.chdir(tmp_path)
    for name in ("CXX", SWITCH):
        monkeypatch.delenv(name, raising=False)

    def put(**scripts: str) -> None:
        for name, text in scripts.items():
            (folder / name.replace("cxx", "c++")).write_text(text.replace("mkdir", "/bin/mkdir"))
            (folder / name.replace("cxx", "c++")).chmod(0o755)

    return put


def build(root: Path, kind: str = "standard") -> dict[str, object]:
    """Run the build hook; return what it tells hatchling."""
    data: dict[str, object] = {"force_include": {}, "pure_python": True}
    hook = KernelBuild(str(root), {}, None, None, str(root / "dist"), "wheel")
    hook.initialize(kind, data)
    return data


def said(root: Path) -> str:
    with pytest.raises(SystemExit) as stopped:
        build(root)
    line = str(stopped.value)
    assert line.startswith("greenroom: ")
    assert "\n" not in line
    assert "GREENROOM_KERNELS=off" in line
    return line


GOOD, BAD = "#!/bin/sh\nexit 0\n", "#!/bin/sh\necho what-it-said >&2\nexit 1\n"


def test_a_wheel_has_the_libraries_and_no_python_abi(tools, tmp_path):
    tools(cmake=CMAKE, ninja=GOOD, cxx=GOOD)
    data = build(tmp_path)
    file = tmp_path / "src" / LIBRARIES / "greenroom-avx2.so"
    assert data["force_include"] == {str(file): f"{LIBRARIES}/greenroom-avx2.so"}
    assert data["tag"] == f"py3-none-linux_{os.uname().machine}"
    assert data["pure_python"] is False


def test_an_editable_install_reads_the_folder_of_the_sources(tools, tmp_path):
    tools(cmake=CMAKE, ninja=GOOD, cxx=GOOD)
    assert build(tmp_path, "editable") == {"force_include": {}, "pure_python": True}
    assert (tmp_path / "src" / LIBRARIES / "greenroom-avx2.so").exists()


def test_without_kernels_nothing_runs_and_older_libraries_are_removed(tools, tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    folder = tmp_path / "src" / LIBRARIES
    folder.mkdir(parents=True)
    assert build(tmp_path) == {"force_include": {}, "pure_python": True}
    assert not folder.exists()
    monkeypatch.setenv(SWITCH, "of")
    assert "GREENROOM_KERNELS is on or off, not 'of'" in said(tmp_path)


@pytest.mark.parametrize("scripts", [{}, {"cxx": BAD}, {"cxx": BAD, "clang++": BAD}])
def test_no_compiler_or_an_old_one(tools, tmp_path, scripts):
    tools(cmake=CMAKE, ninja=GOOD, **scripts)
    assert "no C++20 compiler for the kernels of native/ (c++, g++, clang++)" in said(tmp_path)


def test_the_first_compiler_that_is_new_enough_is_used(tools, tmp_path):
    tools(cmake=f"{CMAKE}echo $CXX > used\n", ninja=GOOD, cxx=BAD, **{"clang++": GOOD})
    build(tmp_path)
    assert (tmp_path / "used").read_text() == "clang++\n"


def test_the_user_s_compiler_is_not_replaced(tools, tmp_path, monkeypatch):
    tools(cmake=CMAKE, ninja=GOOD, cxx=GOOD)
    monkeypatch.setenv("CXX", "ccache mine")
    assert "(ccache mine)" in said(tmp_path)


@pytest.mark.parametrize("name", ["cmake", "ninja"])
def test_a_missing_tool(tools, tmp_path, name):
    tools(**dict.fromkeys({"cmake", "ninja", "cxx"} - {name}, GOOD))
    assert f"{name} is missing" in said(tmp_path)


def test_sources_that_do_not_compile(tools, tmp_path, capsys):
    tools(cmake=BAD, ninja=GOOD, cxx=GOOD)
    assert "do not compile: see the compiler's messages above" in said(tmp_path)
    assert "what-it-said" in capsys.readouterr().err


CHANGES = "# Changelog\n\n## 0.2.0 (unreleased)\n- x\n\n## 0.1.0\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a changelog and one commit; return a function that runs git in it."""
    monkeypatch.delenv(VERSION, raising=False)

    def git(*args: str) -> str:
        name = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        command = ["git", "-C", str(tmp_path), *name, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    return git


def test_the_version_is_the_tag_s_and_a_later_one_after_it(checkout, tmp_path):
    name = "g" + checkout("rev-parse", "--short=8", "HEAD")
    assert version(tmp_path) == f"0.2.0.dev0+{name}"
    checkout("tag", "release")  # of another kind
    assert version(tmp_path) == f"0.2.0.dev0+{name}"
    checkout("tag", "v0.2.0")
    assert version(tmp_path) == "0.2.0"
    (tmp_path / "CHANGELOG.md").write_text(CHANGES + "more\n")
    assert version(tmp_path) == f"0.2.1.dev0+{name}.dirty"
    checkout("commit", "--quiet", "-a", "-m", "second")
    assert version(tmp_path) == f"0.2.1.dev1+g{checkout('rev-parse', '--short=8', 'HEAD')}"


def test_the_version_without_a_repository(checkout, tmp_path, monkeypatch):
    """Of sources within another repository, of an sdist, without git, and as the user says."""
    checkout("tag", "v9.9.9")
    folder = tmp_path / "sources"
    folder.mkdir()
    shutil.copy(tmp_path / "CHANGELOG.md", folder)
    assert version(folder) == "0.2.0.dev0"
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: greenroom\nVersion: 0.3.1\n")
    assert version(folder) == "0.3.1"
    monkeypatch.setenv("PATH", str(folder))
    assert version(tmp_path) == "0.2.0.dev0"
    monkeypatch.setenv(VERSION, "1.2.3")
    assert version(folder) == "1.2.3"


def test_a_changelog_without_a_version_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv(VERSION, raising=False)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    with pytest.raises(SystemExit, match="from which the version is read"):
        version(tmp_path)


@pytest.mark.process
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone: git lists no files")
def test_a_real_wheel_and_a_real_sdist(tmp_path):
    """The frontend shows the line; sources are in the sdist alone."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.py", "*.?pp",
         "*.txt", "*.toml", "*.md", "LICENSE", ".gitignore", "models/demo"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    copy = tmp_path / "copy"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)

    def made(target: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(tmp_path)],
            cwd=copy, env={**os.environ, **environment}, capture_output=True, text=True,
        )  # fmt: skip

    refused = made("wheel", CXX="no-compiler")
    assert refused.returncode
    assert refused.stderr.splitlines()[-1].startswith("greenroom: no C++20 compiler")
    for name in ("sdist", "wheel"):
        assert made(name, GREENROOM_KERNELS="off").returncode == 0
    planned = (copy / "CHANGELOG.md").read_text().split()[3]
    assert {path.name.split("-")[1] for path in tmp_path.glob("greenroom*")} == {
        f"{planned}.dev0", f"{planned}.dev0.tar.gz"
    }  # fmt: skip
    wheel = zipfile.ZipFile(next(tmp_path.glob("*-py3-none-any.whl")))
    files = [Path(name) for name in wheel.namelist()]
    assert not {".so", ".cpp", ".hpp"} & {file.suffix for file in files}
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [p.relative_to(ROOT) for p in (ROOT / "native").rglob("*") if p.is_file()]
    assert {str(path) for path in sources} <= names
    assert "hatch_build.py" in names
