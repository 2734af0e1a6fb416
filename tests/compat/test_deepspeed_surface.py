"""The table of what other projects use of DeepSpeed, and the script that makes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from scripts.deepspeed_surface import PACKAGES, answer, committed, made_engine, main, names_in, page, read

PAGE = committed()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = made_engine()
    yield made
    made.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", PAGE.said)
def test_longshore_answers_as_the_table_says(name: str, engine: Any) -> None:
    found = answer(name, engine)
    assert found.known, f"{name}: neither there nor refused with advice of its own: {found.advice}"
    assert str(found) == PAGE.said[name], "run: python -m scripts.deepspeed_surface --again"
    assert (found.advice == "") == (PAGE.said[name] == "works")


def test_the_table_is_of_all_projects_and_as_the_script_writes_it(engine: Any) -> None:
    assert {*PAGE.reading.versions} == {*PACKAGES.values()} == set().union(*PAGE.reading.used_by.values())
    assert all(re.fullmatch(r"\d+\.\d+\.\d+\S*", version) for version in PAGE.reading.versions.values())
    assert len(PAGE.said) > 50 and any(said.startswith("refused: ") for said in PAGE.said.values())
    assert committed().said == PAGE.said
    assert "| `deepspeed" not in page(PAGE.reading, engine)


SOURCE = """
from deepspeed.utils import groups, set_z3_leaf_modules as leaves
from accelerate.utils import deepspeed as other
from .deepspeed import mine
import deepspeed.comm as dist
import numpy


def make(model, config):
    import deepspeed

    start = deepspeed.initialize
    built, *_ = start(model=model, config=config)
    built.step()
    built.mine = 1
    built.optimizer.overflow
    dist.get_rank(groups._get_sequence_parallel_group())
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return built.mine + hasattr(deepspeed.utils, "is_initialized") + other.nothing


def train(self, built, engine: "deepspeed.DeepSpeedEngine"):
    built.not_an_engine
    self.deepspeed.save_checkpoint("folder")
    return engine.global_steps
"""


def test_what_is_read_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trainer.py"
    path.write_text(SOURCE)
    assert names_in(path) == {
        "comm",
        "comm.get_rank",
        "engine.global_steps",
        "engine.optimizer",
        "engine.optimizer.overflow",
        "engine.save_checkpoint",
        "engine.step",
        "initialize",
        "utils.groups",
        "utils.groups._get_sequence_parallel_group",
        "utils.is_initialized",
        "utils.set_z3_leaf_modules",
        "zero.GatheredParameters",
    }
    path.write_text("import numpy; numpy.zeros(3)")
    assert names_in(path) == set()


def test_projects_are_read_with_their_versions(tmp_path: Path) -> None:
    for package, metadata in (("swift", "ms_swift-4.6.0"), ("trl", "trl-1.2.3"), ("else", "else-1.0")):
        (tmp_path / package).mkdir()
        (tmp_path / f"{metadata}.dist-info").mkdir()
        (tmp_path / package / "a.py").write_text(f"import deepspeed; deepspeed.{package}_name" * (package != "else"))
    found = read([tmp_path])
    assert found.versions == {"trl": "1.2.3", "ms-swift": "4.6.0"}
    assert found.used_by == {"swift_name": {"ms-swift"}, "trl_name": {"trl"}}
    (tmp_path / "trl-1.2.3.dist-info").rmdir()
    with pytest.raises(FileNotFoundError, match="no metadata of trl"):
        read([tmp_path])


def test_names_that_nobody_thought_of_are_no_rows(engine: Any) -> None:
    used_by = {"zero.Init": {"trl"}, "utils.nothing_of_theirs": {"trl"}, "engine.nothing": {"trl"}}
    assert answer("moe.layer.MoE", engine).known and answer("engine.flops_profiler", engine).advice
    with pytest.raises(ValueError, match=r"neither there nor .*\n  utils.nothing_of_theirs \(trl\)\n  engine.nothing"):
        page(PAGE.reading._replace(used_by=used_by), engine)


def test_projects_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "not in these folders: accelerate, axolotl" in capsys.readouterr().out
