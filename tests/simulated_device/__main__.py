"""Builds the native part of the simulated accelerator, from the sources in ``native`` to ``build/simulated_device``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torchgen
from torch.utils.cpp_extension import include_paths, library_paths

from simulated_device.registration import EXTENSION, check_torch

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def _write_unchecked(target: Path) -> None:
    """Write the names of operators whose arguments torch lets be on several devices, for its CUDA kernels to say."""
    listed = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    functions = re.split(r"^- func: ", listed.read_text(), flags=re.MULTILINE)
    names = [each.partition("(")[0] for each in functions if re.search("^  device_check: NoCheck", each, re.MULTILINE)]
    lines = "".join(f'"aten::{name}",\n' for name in names)
    if not target.exists() or target.read_text() != lines:
        target.write_text(lines)


def main() -> None:
    check_torch()
    EXTENSION.parent.mkdir(parents=True, exist_ok=True)
    unchecked = EXTENSION.parent / "no_device_check.inl"
    _write_unchecked(unchecked)
    compiler = os.environ.get("CXX", "c++")
    headers = [flag for path in (*include_paths(), sysconfig.get_paths()["include"]) for flag in ("-isystem", path)]
    flags = [
        *_FLAGS,
        f"-I{EXTENSION.parent}",
        f"-DTORCH_EXTENSION_NAME={EXTENSION.stem}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]

    def compiled(source: Path) -> str:
        target = EXTENSION.parent / f"{source.stem}.o"
        newer = [each for each in (*_SOURCES.iterdir(), unchecked) if each == source or each.suffix in (".h", ".inl")]
        if not target.exists() or any(each.stat().st_mtime > target.stat().st_mtime for each in newer):
            subprocess.run([compiler, *flags, *headers, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    # The longest first, so that two processes end at about the same time.
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda each: "torch/" not in each.read_text())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    names = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    subprocess.run([compiler, "-shared", *objects, *libraries, *names, "-o", str(EXTENSION)], check=True)


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}")
