"""Registration of the simulated accelerator with torch."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "sim"
_ROOT = Path(__file__).parents[2]
EXTENSION = _ROOT / "build" / "simulated_device" / "_simulated_device.so"


def check_torch() -> None:
    """Raise RuntimeError for another torch than that of ``constraints.txt``: the native part uses internal headers."""
    pinned = re.search(r"^torch==(\S+)", (_ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    found = torch.__version__.partition("+")[0]
    if found != pinned[1]:
        raise RuntimeError(
            f"the simulated accelerator is written for torch {pinned[1]}, and this is torch {found}: install that one, "
            "or adapt tests/simulated_device/native to the headers of this one"
        )


def _loaded() -> ModuleType:
    check_torch()
    if not EXTENSION.exists():
        raise RuntimeError(f"{EXTENSION} does not exist: build the simulated accelerator with `make simulated-device`")
    spec = importlib.util.spec_from_file_location(EXTENSION.stem, EXTENSION)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_native: ModuleType | None = None


def native() -> Any:
    """Return the native part. Raises RuntimeError if it is not built, or for another torch."""
    global _native
    if _native is None:
        _native = _loaded()
    return _native


def register() -> None:
    """Make ``sim`` this process's accelerator, with ``torch.sim`` and the backend ``simccl`` of collectives."""
    if NAME in dir(torch):
        return
    native()
    from simulated_device import device_module

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    sys.modules[f"torch.{NAME}"] = device_module
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=False, for_storage=False
    )
    from simulated_device import collectives

    collectives.register()


def counts() -> dict[str, int]:
    """Return what was counted since :func:`reset_counts`: ``launches``, ``copies_to_device``, ``copies_to_host``,
    ``bytes_to_device``, ``bytes_to_host`` and ``host_waits``."""
    return native().counts()
