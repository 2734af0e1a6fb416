"""The floor of the host step: ``floor.cpp``, compiled here and now for this very CPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

FLAGS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]


class NotAvailable(Exception):
    """A contestant cannot run on this machine; the message says why and what would help."""


def load_floor(threads: int) -> Callable[[Tensor, Tensor], None]:
    """A function of a buffer ``[3, numel]`` and a fourth array ``[numel]``, all float32; it changes no value.

    Raises:
        NotAvailable: no compiler, or it fails.
    """
    floor_pass = _compiled().floor_pass
    floor_pass.restype = None
    floor_pass.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_float, ctypes.c_float]

    def run(buffer: Tensor, fourth: Tensor) -> None:
        a, b, c = buffer
        floor_pass(a.data_ptr(), b.data_ptr(), c.data_ptr(), fourth.data_ptr(), fourth.numel(), threads, 1.0, 0.0)

    return run


def load_floor_of_two_bytes(threads: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A function of a float32 array, which keeps its values, and of two arrays of 2 bytes an element, of which the
    second becomes the first; all ``[numel]``.

    Raises:
        NotAvailable: no compiler, or it fails.
    """
    floor = _compiled().floor_two_bytes
    floor.restype = None
    floor.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_float]

    def run(array: Tensor, read: Tensor, written: Tensor) -> None:
        floor(array.data_ptr(), read.data_ptr(), written.data_ptr(), array.numel(), threads, 1.0)

    return run


def _compiled() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ["c++", "g++", "clang++"]), None)
    if compiler is None:
        raise NotAvailable("no C++ compiler found; install one or set CXX")
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as folder:
        library_path = Path(folder) / "floor.so"
        command = [*compiler.split(), *FLAGS, str(source), "-o", str(library_path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as failure:
            raise NotAvailable(f"{compiler} does not run: {failure.strerror}") from failure
        if done.returncode != 0:
            raise NotAvailable(f"{compiler} could not compile {source.name}: {done.stderr.strip()[-300:]}")
        return ctypes.CDLL(str(library_path))  # stays mapped when the file is gone
