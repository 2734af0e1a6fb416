"""A project that is not this one, for type checkers: its environment has longshore as a wheel has it."""

from __future__ import annotations

import builtins
import dis
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest
from code_blocks import PAGES, ROOT, Block, blocks_of

SOURCE = ROOT / "src" / "longshore"

GIVEN = '''\
"""What code_block_setups.py and its neighbours give the blocks of the pages."""

from collections.abc import Callable
from typing import Any

import longshore
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard
from torch.distributed.tensor.parallel import parallelize_module as parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils.data import Dataset


class Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.head = nn.Linear(2, 2)

    def set_requires_gradient_sync(self, synced: bool) -> None: ...


build_model: Callable[[], nn.Module]
train_one_step: Callable[[], None]
model: Model
loader: list[Any]
batches: list[Any]
data: Dataset[Any]
tokenizer: Any
engine: longshore.Engine
optimizer: longshore.AdamW
offload: longshore.Offload
config: Any
mesh: DeviceMesh
plan: dict[str, ParallelStyle]
rank: int
saved: dict[str, Any]
folder: str
'''


@dataclass(frozen=True)
class Finding:
    """What a type checker says of a line."""

    file: str
    line: int
    code: str
    message: str


def make_project(folder: Path) -> None:
    """Annotations count in it only because of ``py.typed``, and types are not inferred from the bodies of functions."""
    venv.create(folder / "venv")
    packages = folder / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    shutil.copytree(SOURCE, packages / "longshore", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    others = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others))


def pyright(folder: Path) -> Iterator[Finding]:
    """What pyright says in strict mode of all files in the folder."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install -e '.[lint]'")
    settings = {
        "typeCheckingMode": "strict",
        "venvPath": ".",
        "venv": "venv",
        "exclude": ["venv"],
        "pythonVersion": "3.10",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", str(folder)]
    environ = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    for each in found["generalDiagnostics"]:
        yield Finding(
            Path(each["file"]).name, each["range"]["start"]["line"] + 1, each.get("rule", ""), each["message"]
        )


def mypy(folder: Path) -> Iterator[Finding]:
    """What mypy says in strict mode; it has no words for a program that calls an untyped function of torch."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[lint]'")
    there = folder / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--allow-untyped-calls", "--python-executable", str(there)]
    names = sorted(each.name for each in folder.glob("*.py"))
    done = subprocess.run([*command, *names], cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    for name, line, message, code in re.findall(r"^(\w+\.py):(\d+): error: (.*)  \[(.*)\]$", done.stdout, re.MULTILINE):
        yield Finding(name, int(line), code, message)


# -- the blocks of the pages ----------------------------------------------------


def chains() -> Iterator[list[Block]]:
    """Python's blocks of README.md and docs/, and with each those that continue it; also those that are not run."""
    for page in PAGES:
        found: list[list[Block]] = []
        for block in blocks_of(page):
            if block.language == "python":
                if "continues" in block.items and found:
                    found[-1].append(block)
                else:
                    found.append([block])
        yield from found


def module_of(chain: list[Block]) -> str:
    """A module of what a page shows, that imports what the page takes as given."""
    text = "\n".join(block.text for block in chain)
    lines = []
    for name in given_names(text):
        if name in ("torch", "longshore", "transformers"):
            lines.append(f"import {name}")
        else:
            lines.append("from torch import nn" if name == "nn" else f"from given import {name}")
    return "\n".join([*lines, "", text])


def given_names(text: str) -> list[str]:
    """The names that a program uses before it binds them."""
    known, found = set(dir(builtins)) | {"__name__", "__qualname__", "__module__"}, dict[str, None]()

    def read(code: CodeType, bound: set[str]) -> None:
        for each in dis.get_instructions(code):
            if each.opname in ("STORE_NAME", "STORE_GLOBAL"):
                bound.add(each.argval)
            elif each.opname in ("LOAD_NAME", "LOAD_GLOBAL") and each.argval not in bound:
                found[each.argval] = None
            elif isinstance(each.argval, CodeType):
                read(each.argval, set(bound))

    read(compile(text, "a page", "exec", dont_inherit=True), known)
    return list(found)
