"""``PYTHONPATH=tests:. python -m checkpoint.write_golden``: keeps checkpoints of this version in ``golden/VERSION``.

It is part of a release, and never replaces what is there: then the version in pyproject.toml has to be a new one.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import torch
from ranks import Ranks
from torch import Tensor

import longshore
from checkpoint import golden_cases as cases


def write_loop(case: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = cases.loop_of(case)
    cases.train_loop(model, optimizer, 0, cases.STEPS)
    longshore.save(folder, model, optimizer, state={"said": "kept"})
    before = cases.found_in_loop(model, optimizer)
    cases.train_loop(model, optimizer, cases.STEPS, cases.MORE)
    return before, cases.found_in_loop(model, optimizer)


def write_all(root: Path) -> None:
    for case in cases.LOOPS:
        keep(root / case, *write_loop(case, root / case / "checkpoint"))
    for case, settings in cases.ENGINES.items():
        ranks = Ranks(settings["ranks"])
        try:
            keep(root / case, *ranks(cases.write_engine, case, str(root / case / "checkpoint"))[0])
        finally:
            ranks.stop()


def keep(folder: Path, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    expected = {"loaded": cases.digests(before)}
    if folder.name not in cases.WITHOUT_MORE:
        expected["continued"] = cases.digests(after)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    version = metadata.version("longshore")
    root = cases.GOLDEN / version
    if root.exists():
        sys.exit(f"{root} is there already, and is never replaced: a new version has a folder of its own")
    torch.set_num_threads(1)
    try:
        write_all(root)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    print(f"wrote {root}")


if __name__ == "__main__":
    main()
