"""``make docs-version``: the documentation of several versions on one branch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_two_versions(tmp_path: Path) -> None:
    """In a repository of the files that are tracked here, as they are now."""
    for name in ("mkdocs", "mkdocstrings", "mike"):
        pytest.importorskip(name)
    for name in run(ROOT, "git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m all", "config user.name a"):
        run(tmp_path, "git", *command.split())
    run(tmp_path, "git", "config", "user.email", "a@b")
    for given in (["0.1", "latest"], ["0.2", "latest"], ["dev"]):
        run(tmp_path, sys.executable, "-m", "scripts.docs.versions", *given)
    listed = json.loads(run(tmp_path, "git", "show", "gh-pages:versions.json"))
    assert {each["version"]: each["aliases"] for each in listed} == {"0.1": [], "0.2": ["latest"], "dev": []}
    there = run(tmp_path, "git", "ls-tree", "--name-only", "gh-pages").splitlines()
    assert {*there} == {".nojekyll", "0.1", "0.2", "404.html", "dev", "index.html", "latest", "versions.json"}
    assert "latest/" in run(tmp_path, "git", "show", "gh-pages:index.html")
    page = run(tmp_path, "git", "show", "gh-pages:404.html")
    assert "404 - Not found" in page
    styles = re.findall(r'<link rel="stylesheet" href="([^"]+)"', page)
    assert styles and all(each.startswith("/longshore/0.2/") for each in styles)
    files = {*run(tmp_path, "git", "ls-tree", "-r", "--name-only", "gh-pages").splitlines()}
    assert {each.removeprefix("/longshore/").partition("?")[0] for each in styles} <= files
    assert {"0.1/search/search_index.json", "dev/search/search_index.json"} <= files
    assert '"provider": "mike"' in run(tmp_path, "git", "show", "gh-pages:0.1/index.html")
    assert run(tmp_path, "git", "status", "--porcelain") == "", "the branch that is checked out is as it was"
