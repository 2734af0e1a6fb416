"""A machine that is not here: aarch64's C library, Python and torch in a folder, run by qemu's user mode."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts import commands

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "aarch64"
TOOLS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "aarch64-linux-gnu-objdump": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "apt-get": "apt",
    "apt-cache": "apt",
    "dpkg-deb": "dpkg",
    "cmake": "cmake",
    "ninja": "ninja-build",
}
"""Programs that are needed, and the Debian packages that have them."""
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
# torch is installed without what it requires: pip takes the requirements of this machine for it, which are CUDA's.
PACKAGES = (
    *("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec"),  # torch's
    *("numpy>=1.24", "typer>=0.12", "rich>=13", "pydantic>=2.7", "safetensors>=0.4"),  # longshore's
    *("nanobind>=2.2", "scikit-build-core>=0.10"),  # of its build
)
FULL_WIDTH = ("-cpu", "max")
"""qemu's processor with everything, whose SVE registers have 64 bytes: torch then takes its NEON kernels."""
SVE256 = ("-cpu", "max,sve-default-vector-length=32")
"""The same with registers of 32 bytes, as on Graviton 3, for which torch has kernels of their own."""


class Aarch64Error(Exception):
    """A step failed; the message says which, and what to do."""


def run(command: Sequence[str | Path], what: str, folder: Path = ROOT, **environment: str) -> str:
    """Run a command in a folder and return what it printed; Aarch64Error with all of that if it fails."""
    return commands.run(command, what, Aarch64Error, environment={**os.environ, **environment}, folder=folder)


def check_tools() -> None:
    """Raise Aarch64Error unless all programs are here, and apt knows packages of arm64."""
    missing = sorted({package for program, package in TOOLS.items() if shutil.which(program) is None})
    if missing:
        raise Aarch64Error(f"programs are missing: on Debian, as root, apt-get install {' '.join(missing)}")
    if "arm64" not in run(["dpkg", "--print-foreign-architectures"], "dpkg").split():
        raise Aarch64Error(
            "apt does not know packages for arm64: on Debian, as root, dpkg --add-architecture arm64 && apt-get update"
        )


class Machine:
    """Its files are below ``build/aarch64``, and stay there; a folder that exists is taken as it is.

    Args:
        torch: the version of torch.
    """

    def __init__(self, torch: str) -> None:
        self.torch = torch
        self.sysroot = BUILD / "sysroot"
        self.packages = BUILD / "packages"
        self.torch_folder = BUILD / f"torch-{torch}"
        self.python = self.sysroot / "usr" / "bin" / "python-emulated"
        """A program of this machine that runs Python there. It is beside the real one, so that Python finds its own
        library from its name, and other programs can call what ``sys.executable`` names."""

    def make(self) -> None:
        """Download and unpack what is not there yet."""
        if not self.python.exists():
            self._unpack_debian()
        version = self._version()
        for folder, wanted in ((self.packages, PACKAGES), (self.torch_folder, ("--no-deps", f"torch=={self.torch}"))):
            if not folder.exists():
                self._install(folder, wanted, version)

    def _unpack_debian(self) -> None:
        found = run(["apt-cache", "depends", "python3:arm64"], "asking apt for the version of Python")
        versions = re.findall(r"Depends: (python3\.\d+):arm64", found)
        if not versions:
            raise Aarch64Error("apt knows no python3 for arm64: as root, apt-get update")
        (python, *_) = versions
        kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        left_out = [f"--no-{kind}" for kind in kinds]
        roots = [f"{python}:arm64", f"lib{python}-dev:arm64", "libstdc++6:arm64"]
        depends = run(["apt-cache", "depends", "--recurse", *left_out, *roots], "asking apt what Python needs")
        needed = [name for name in set(depends.split()) if re.fullmatch(r"(lib|python3|zlib1g)\S*:arm64", name)]
        needed = sorted(name for name in needed if "-dev" not in name or name.startswith(f"lib{python}"))
        folder = BUILD / "debian"
        folder.mkdir(parents=True, exist_ok=True)
        run(["apt-get", "download", "-q", *needed], "downloading Debian's packages", folder=folder)
        for package in sorted(folder.glob("*.deb")):
            run(["dpkg-deb", "-x", package, self.sysroot], "unpacking a package")
        qemu = shutil.which("qemu-aarch64")
        lines = f'exec "{qemu}" -0 "$0" $EMULATED -L "{self.sysroot}" "{self.sysroot}/usr/bin/{python}" "$@"'
        self.python.write_text(f"#!/bin/sh\n# EMULATED: options of qemu\n{lines}\n")
        self.python.chmod(0o755)

    def _version(self) -> str:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        return run([self.python, "-c", code], "Python on aarch64").strip()

    def _install(self, folder: Path, wanted: Sequence[str], version: str) -> None:
        platforms = [word for each in PLATFORMS for word in ("--platform", each)]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:", *platforms]
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        run([*pip, "--python-version", version, "--target", new, *wanted], f"installing {' '.join(wanted)}")
        new.rename(folder)

    def call(self, arguments: Sequence[str | Path], what: str, path: Sequence[Path], qemu: Sequence[str]) -> str:
        """Run Python there with these folders on its path, and return what it printed."""
        return run([self.python, *arguments], what, **self.environment(path, qemu))

    def environment(self, path: Sequence[Path], qemu: Sequence[str] = FULL_WIDTH) -> Mapping[str, str]:
        folders = [*path, self.torch_folder, self.packages]
        return {"PYTHONPATH": os.pathsep.join(map(str, folders)), "EMULATED": " ".join(qemu)}
