"""The measures of the house (``scripts/shape.py``): each counts what it says, and none rises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import shape
from scripts.shape import GOALS, LIMITS, MEASURES, ROOT, above, changes, fallen, measured

EMPTY = dict.fromkeys(MEASURES, 0)


def counted_in(folder: Path, files: dict[str, str]) -> dict[str, int]:
    """The measures of a checkout with these files under src/longshore that are not 0."""
    for name, text in files.items():
        path = folder / "src" / "longshore" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    values = measured(folder)
    return {
        name: value
        for name, value in values.items()
        if value and name not in ("lines of the core", "files of the core")
    }


def test_no_measure_rises() -> None:
    """What is counted in the text; ``make lint`` has the others."""
    limits = json.loads(LIMITS.read_text())
    assert above(measured(ROOT), limits) == []
    assert limits.keys() >= GOALS.keys()


LONG = "def f():\n" + "    x = 1\n" * 61
METHODS = "class A:\n" + "".join(f"    def f{at}(self): pass\n" for at in range(26))
FIELDS = "class A:\n    def f(self):\n" + "".join(f"        self.a{at} = 1\n" for at in range(13))


@pytest.mark.parametrize(
    ("file", "text", "counted"),
    [
        ("optim/a.py", "x = 1\n" * 701, {"files of over 700 lines": 1}),
        ("optim/a.py", "x = 1\n" * 700, {}),
        ("optim/a.py", LONG, {"functions of over 60 lines": 1}),
        ("optim/a.py", LONG.replace("    x = 1\n", "", 1), {}),
        ("seam.py", "from x import y\nif z:\n    from a import b as b\n    from a import c as c\n",
         {"names in longshore/seam.py": 2}),
        ("engine/a.py", "x._core.y\nx._core\nx._cores\n", {"._core outside of optim/": 2}),
        ("optim/a.py", "x._core.y\n", {}),
        ("cli/a.py", "isinstance(x, Store)\nisinstance(x, (Offload, int))\nisinstance(x, int)\n",
         {"isinstance on our own policies": 2}),
        ("tiles/a.py", "# as DeepSpeed\n", {"other projects' names in rooms of the core": 1}),
        ("compat/a.py", "# as DeepSpeed\n", {}),
        ("tiles/a.py", "states_seed = 1\nstates_seed\n", {"files that know states_seed": 1}),
        ("plan/a.py", "if x.staged or x.streams: y\n", {"conditions on streams or staging in plan/": 2}),
        ("tiles/a.py", "if x.staged: y\n", {}),
        ("optim/a.py", "sys._getframe()\n", {"tricks with the interpreter": 1}),
        ("tiles/a.py", METHODS, {"classes of over 25 methods": 1}),
        ("tiles/a.py", FIELDS, {"classes of over 12 fields": 1}),
        ("tiles/a.py", '"""What it is."""\ndef f():\n    """Whoever."""\n',
         {"docstrings with what, whoever, somebody, nobody": 2}),
    ],
)  # fmt: skip
def test_each_measure_counts(file: str, text: str, counted: dict[str, int], tmp_path: Path) -> None:
    assert counted_in(tmp_path, {file: text}) == counted


def test_imports_are_followed_and_doors_are_not_of_the_core(tmp_path: Path) -> None:
    files = {
        "optim/__init__.py": "from longshore.errors import A\n",
        "optim/rules/adam.py": "from longshore.optim.b import C\nfrom longshore.optim import D\nimport torch\n",
        "optim/b.py": "from longshore.tiles import e\nfrom longshore.optim.rules.adam import f\n",
        "tiles/e.py": "x = 1\n",
        "errors.py": "x = 1\ny = 2\n",
        "cli/main.py": "x = 1\n",
    }
    counts = counted_in(tmp_path, files)
    assert counts == {"files that longshore.AdamW imports": 5, "lines that longshore.AdamW imports": 9}
    assert measured(tmp_path)["files of the core"] == 5 and measured(tmp_path)["lines of the core"] == 9


def test_a_value_above_its_limit_or_without_one_is_named() -> None:
    assert above({"a": 2, "b": 1}, {"a": 2, "b": 3}) == []
    assert above({"a": 1003, "b": 1}, {"a": 1002}) == [
        "a: 1,003, and the limit is 1,002",
        "b: it has no limit yet",
    ]


def test_lower_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / "shape.json"
    limits.write_text(json.dumps(EMPTY | {"lines of the core": 1, "files of the core": 10**6}))
    monkeypatch.setattr(shape, "LIMITS", limits)
    assert shape.main(["--quick", "--lower"]) == 1
    written = json.loads(limits.read_text())
    assert written["lines of the core"] == 1 and 0 < written["files of the core"] < 10**6
    said = capsys.readouterr()
    assert "rose: lines of the core: " in said.err and "files of the core (goal 110)" in said.out


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_lines_of_a_change_are_told_by_room(tmp_path: Path) -> None:
    # Not those of a hook, nor of whoever runs the tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*words: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, env=environment, check=True, capture_output=True)

    git("init")
    counted_in(tmp_path, {"optim/a.py": "x = 1\ny = 2\n", "errors.py": "x = 1\n"})
    git("add", "-A")
    git("commit", "-m", "begin")
    assert changes(tmp_path) == []
    counted_in(tmp_path, {"optim/a.py": "x = 2\n", "errors.py": "x = 1\ny = 2\n"})
    told = ["  errors.py: +1 -0", "  optim: +1 -2", "    optim/a.py: +1 -2"]
    assert changes(tmp_path) == told
    git("add", "-A")
    git("commit", "-m", "go on")
    assert changes(tmp_path) == told


def test_a_trip_below_its_limit_is_named_since_the_walks_name_its_count() -> None:
    trip = "files of the trip of a gradient"
    assert fallen({trip: 57, "lines": 1}, {trip: 57, "lines": 2}) == []
    assert fallen({trip: 56}, {trip: 57}) == [f"{trip}: 56, and the limit is 57"]
