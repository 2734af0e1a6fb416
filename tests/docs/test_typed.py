"""The annotations, as a type checker sees them in a program that uses an installed longshore: in the programs of
tests/typed_programs, in one that is wrong in every line, and in the blocks of README.md and docs/."""

from __future__ import annotations

import importlib.metadata
import json
import re
import runpy
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from code_blocks import ROOT
from typed_project import GIVEN, SOURCE, Finding, chains, make_project, module_of, mypy, pyright

PROGRAMS = sorted((ROOT / "tests" / "typed_programs").glob("*.py"))

WRONG = """\
from torch import nn

import longshore
from longshore.engine.config import LossScaling

model = nn.Linear(2, 2)
longshore.AdamW(model.parameters(), learning_rate=1.0)
longshore.AdmaW(model.parameters())
longshore.Muon(model.parameters()).clip_grad_norm_("1.0")
longshore.Offload(tiles=1)
longshore.Config(gradient_cliping=1.0)
LossScaling(scale="large")
longshore.load("folder", model).epoch
longshore.initialize(model=model).engine.backward("loss")
longshore.initialize(model=model).optimizer.host_bytes("state")
"""
"""A program in which every line that follows the one of the model is an error."""
WRONG_LINES = set(range(WRONG.splitlines().index("model = nn.Linear(2, 2)") + 2, len(WRONG.splitlines()) + 1))

BLOCKS = {f"block_{number:02}.py": chain for number, chain in enumerate(chains())}

OTHER_TOOLS = re.compile(
    r"^\s*(?:import|from) .*\b(?:transformers|trl|accelerate|lightning|torchtitan)\b", re.MULTILINE
)
UNTYPED = re.compile(
    r"reportUnknown\w+|reportMissingTypeStubs|reportMissingImports|reportUntypedBaseClass|import-untyped|import-not-found"
)
"""What a checker says where annotations of other tools are missing."""
UNANNOTATED = {"reportMissingParameterType", "reportUnknownParameterType", "no-untyped-def"}
"""What it says of functions that a page writes without annotations."""

NOT_OURS = {
    "        optimizer.step()": "torch's step() has no annotations, and one of the two is torch's",
    "print(weight.norm())": "nor has norm()",
    "DataLoader(torch.randn(": "a tensor is a dataset, and no Dataset",
    "self.net = None": "nothing says that it may be None",
    'state["state"].values()': "torch's annotations say neither that it is a dictionary of dictionaries",
    "entries.pop(": "nor of what",
    "set_state_dict(model, optimizer": "and set_state_dict takes something else than dcp.load() fills",
    "dcp.load(found": "what get_state_dict() returns is not typed either",
    "model.config.use_cache = False": "it is of transformers' models, and the example does not say whose",
    "model.generate(": "transformers' annotations are of another class",
    "from trl import": "trl exports names without saying so",
    "(OptimizersContainer": "torchtitan is not installed",
}
"""Lines of pages with errors that come from elsewhere."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_programs_run(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(program), run_name="__main__")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, the wrong one, and the blocks of the pages, with what these are given."""
    folder = tmp_path_factory.mktemp("user")
    make_project(folder)
    for program in PROGRAMS:
        shutil.copy(program, folder / program.name)
    (folder / "wrong.py").write_text(WRONG)
    (folder / "given.py").write_text(GIVEN)
    for name, chain in BLOCKS.items():
        (folder / name).write_text(module_of(chain))
    return folder


def of_programs(findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.file not in ("wrong.py", *BLOCKS)]


def is_ours(finding: Finding, lines: list[str]) -> bool:
    """Whether longshore's annotations, or a page's use of them, are to be mended."""
    if "longshore" in finding.message:
        return True
    uses_others = OTHER_TOOLS.search("\n".join(lines)) is not None
    if finding.code in UNANNOTATED or (uses_others and UNTYPED.fullmatch(finding.code)):
        return False
    return not any(part in lines[finding.line - 1] for part in NOT_OURS)


@pytest.mark.medium
@pytest.mark.parametrize("checker", [pyright, pytest.param(mypy, marks=pytest.mark.slow)])
def test_what_a_checker_says_of_programs_mistakes_and_pages(
    checker: Callable[[Path], Iterable[Finding]], project: Path
) -> None:
    """One test, since a checker takes half a minute, whatever it is asked about.

    - A user's programs have no errors.
    - Mistakes are found: otherwise the programs have no errors because longshore's names have no types.
    - Blocks of the pages have none but those that are to end with an error: checkers see the same one.
    """
    found = list(checker(project))
    assert len(PROGRAMS) >= 5 and len(BLOCKS) > 35
    assert of_programs(found) == []
    assert {each.line for each in found if each.file == "wrong.py"} == WRONG_LINES
    text = {name: (project / name).read_text().splitlines() for name in BLOCKS}
    ours = [
        (each.file, text[each.file][each.line - 1], each.code, each.message)
        for each in found
        if each.file in BLOCKS and is_ours(each, text[each.file])
    ]
    wrong = ["longshore.Config(grad_clipping=1.0)  # ConfigError"]
    assert [line for _, line, *_ in ours] == wrong, ours


def test_lines_whose_errors_are_not_ours_are_there() -> None:
    text = "\n".join(module_of(chain) for chain in BLOCKS.values())
    assert [part for part in NOT_OURS if part not in text] == []


def test_what_is_ignored_is_torchs() -> None:
    for program in PROGRAMS:
        for comment in re.findall(r"# (?:pyright|type): ?ignore.*", program.read_text()):
            assert comment.endswith("# torch has no annotations there"), f"{program.name}: {comment}"


def test_the_marker_is_part_of_the_package() -> None:
    """Wheels have all files of ``src/longshore``, and so has what is installed here, if it is not editable."""
    assert (SOURCE / "py.typed").read_text() == ""
    assert 'wheel.packages = ["src/longshore"]' in (ROOT / "pyproject.toml").read_text()
    installed = importlib.metadata.distribution("longshore")
    if json.loads(installed.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable") is not True:
        assert "longshore/py.typed" in {str(each) for each in installed.files or ()}
