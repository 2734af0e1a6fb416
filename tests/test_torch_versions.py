"""What each feature needs of torch: refused in one sentence, and its tests are skipped by the same table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch_needs import OTHERS, TORCHS_OWN_WARNINGS, ignored_warnings, refusal

import longshore
from longshore.engine import model_sharding
from longshore.engine.model_sharding import shard_model
from longshore.engine.weights import Weights
from longshore.torch_versions import FEATURES, require, text_of

SOURCE = Path(__file__).parents[1] / "src" / "longshore"


@pytest.mark.parametrize("name", FEATURES)
def test_the_oldest_is_taken_and_the_one_before_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (major, minor), instead = FEATURES[name].oldest, FEATURES[name].instead
    for taken in (
        f"{major}.{minor}.0",
        f"{major}.{minor}.0a0+git1234",
        f"{major}.{minor + 1}.2+cu130",
        "3.0.0",
        "main",
    ):
        monkeypatch.setattr(torch, "__version__", taken)
        require(name)
    before = f"{major}.{minor - 1}.1+cpu"
    monkeypatch.setattr(torch, "__version__", before)
    said = rf"^{re.escape(name)} needs torch {major}\.{minor} or newer, and this is {re.escape(before)}; {instead}$"
    with pytest.raises(ValueError, match=said):
        require(name)


@pytest.mark.medium
def test_an_older_torch_than_all_is_refused_at_the_first_name() -> None:
    code = "import torch; torch.__version__ = '2.7.1'; import longshore; longshore.BrokenStateError; longshore.AdamW"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said == "ImportError: longshore needs torch 2.8 or newer, and this is 2.7.1; upgrade torch"


def test_stage_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    ranks: Any = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match=r"stage 3 needs torch 2\.13 or newer, .* 2\.12\.1\+cu130; .*or use stage 2"):
        shard_model(nn.Linear(2, 2), None, longshore.Config(stage=3), ranks, Weights())


def test_a_model_that_its_user_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are read before it is known whether it is to be sharded."""
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    monkeypatch.setattr(model_sharding, "is_fully_sharded", lambda _: True)
    with pytest.raises(ValueError, match=r"stage 3 needs torch 2\.13 or newer"):
        longshore.initialize(model=nn.Linear(2, 2), config=longshore.Config(stage=3))


def test_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(ValueError, match=r"longshore\.stream needs torch 2\.11 or newer, and this is 2\.10\.0"):
        longshore.stream(nn.Sequential(nn.Linear(2, 2)))


def test_each_feature_is_asked_for_by_the_code() -> None:
    """A row that nothing asks for would refuse nothing."""
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    asked = {*re.findall(r'\brequire\("([^"]+)"\)', text), *re.findall(r'FEATURES\["([^"]+)"\]', text)}
    assert asked == set(FEATURES)


# -- the skips ------------------------------------------------------------------


def test_what_only_tests_need_has_other_names() -> None:
    assert not set(OTHERS) & set(FEATURES)


def test_tests_are_skipped_by_their_marks_and_by_their_stage(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(
        "import pytest\nfrom torch_needs import skip_what_is_refused\n"
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'needs_torch(name)')\n"
        "def pytest_collection_modifyitems(items):\n    skip_what_is_refused(items)\n"
        "@pytest.fixture\ndef two_ranks():\n    return None\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.needs_torch('stage 3')\ndef test_marked():\n    pass\n"
        "@pytest.mark.parametrize('stage', [2, 3])\ndef test_ranks(stage, two_ranks):\n    pass\n"
        "@pytest.mark.parametrize('case', ['stage 3', 'engine_stage_3', 'stage 2'])\n"
        "def test_named(case, two_ranks):\n    pass\n"
        "@pytest.mark.parametrize('stage', [2, 3])\ndef test_one_rank(stage):\n    pass\n"
    )
    for version, skipped in (("2.12.1", 4), ("2.13.0", 0)):
        monkeypatch.setattr(torch, "__version__", version)
        result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
        result.assert_outcomes(passed=8 - skipped, skipped=skipped)
        if skipped:
            result.stdout.fnmatch_lines(["*stage 3 needs torch 2.13 or newer, and this is 2.12.1*"])


def test_warnings_of_torchs_own_are_ignored_with_that_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert ignored_warnings() == list(TORCHS_OWN_WARNINGS)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert ignored_warnings() == []
    assert refusal("stage 3") is None
    assert text_of((2, 10)) == "2.10"
