"""Scripts of users, as they are and after the change that a page tells them to make, each in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def written(name: str, folder: Path, *changes: tuple[str, str]) -> str:
    """Write a script to the folder, with each text replaced by another one; every text has to be there."""
    text = (SCRIPTS / name).read_text()
    assert "longshore" not in text.partition('"""\n')[2]
    for old, new in changes:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    path = folder / f"{len(changes)}_{name}"
    path.write_text(text)
    return str(path)


def run(*command: Any, launcher: tuple[str, ...] = ()) -> str:
    """Run Python with these arguments, without an accelerator; return what it printed."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if name not in ranks}
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, command)], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same weights, bit for bit."""
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], weight) for name, weight in expected.items())


def readme_says(*texts: str) -> None:
    """What a walk does is what the README shows."""
    readme = (ROOT / "README.md").read_text()
    assert [text for text in texts if text not in readme] == []
