"""``python -m scripts.docs.versions VERSION [ALIAS]``: put this version's documentation beside that of others.

mike builds it and commits it to the branch ``gh-pages`` of this repository, with the list of versions that the pages'
switch reads. Nothing is pushed.

Hosts of such branches show one page for whatever does not exist, the 404.html at its root, where mike puts none: it is
the one of the version with the alias, or else of this one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BRANCH = "gh-pages"
NOT_FOUND = "404.html"


def _git(*arguments: str, environment: Mapping[str, str] | None = None, given: str | None = None) -> str:
    done = subprocess.run(
        ["git", *arguments], env={**os.environ, **(environment or {})}, input=given, stdout=-1, text=True, check=True
    )
    return done.stdout.strip()


def _mike(*arguments: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of mike and of mkdocs
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [sys.executable, "-c", "from mike.driver import main; main()", *arguments], env=environment, check=True
    )


def put_not_found(version: str) -> None:
    """Commit the page for what does not exist, a copy of that of ``version``, if it is not there yet."""
    page = _git("rev-parse", f"{BRANCH}:{version}/{NOT_FOUND}")
    entries = [line for line in _git("ls-tree", BRANCH).splitlines() if not line.endswith(f"\t{NOT_FOUND}")]
    tree = _git("mktree", given="\n".join([*entries, f"100644 blob {page}\t{NOT_FOUND}"]) + "\n")
    if tree != _git("rev-parse", f"{BRANCH}^{{tree}}"):
        commit = _git("commit-tree", tree, "-p", BRANCH, "-m", f"The page for what does not exist is that of {version}")
        _git("update-ref", f"refs/heads/{BRANCH}", commit)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.docs.versions")
    parser.add_argument("version", help="such as 0.1, or dev for what is not released")
    parser.add_argument("alias", nargs="?", help="latest, for the version that readers are to see first")
    given = parser.parse_args(arguments)
    aliases = [] if given.alias is None else [given.alias]
    _mike("deploy", "--branch", BRANCH, "--update-aliases", "--alias-type", "copy", given.version, *aliases)
    for alias in aliases:
        _mike("set-default", "--branch", BRANCH, alias)
    there = _git("ls-tree", "--name-only", BRANCH).splitlines()
    if aliases or NOT_FOUND not in there:
        put_not_found(given.version)


if __name__ == "__main__":
    main(sys.argv[1:])
