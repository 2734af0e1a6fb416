"""The steps of ``make release`` on small archives made here, and the files around a release: one version in all of
them, workflows that call what exists."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import longshore
from scripts.release import archives, checks
from scripts.release.__main__ import put
from scripts.release.building import Build, Commit, ReleaseError, Wheel
from scripts.release.sbom import Tool, bill_of

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
VERSION = "1.2.3"
TIME = (2026, 1, 2, 3, 4, 6)

METADATA = b"""\
Metadata-Version: 2.4
Name: longshore
Version: 1.2.3
Summary: made up
License-Expression: Apache-2.0
Requires-Dist: torch>=2.8
Requires-Dist: numpy>=1.24,<3
Requires-Dist: triton>=3.0; extra == "cuda"
"""
IN_WHEEL = {
    "longshore/__init__.py": b"",
    "longshore/py.typed": b"",
    "longshore/kernels/_native.abi3.so": b"\x7fELF",
    "longshore-1.2.3.dist-info/METADATA": METADATA,
    "longshore-1.2.3.dist-info/licenses/LICENSE": b"Apache",
}
COMMITTED = ["LICENSE", "pyproject.toml", "CMakeLists.txt", "native/bindings.cpp", "src/longshore/build.py"]


def wheel(folder: Path, members: Mapping[str, bytes] = IN_WHEEL, *, time: Any = TIME, level: int = 6) -> Path:
    path = folder / f"longshore-{VERSION}-cp312-abi3-manylinux_2_28_x86_64.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, time), content, zipfile.ZIP_DEFLATED, level)
    return path


def sdist(folder: Path, members: Mapping[str, bytes], *, time: int = 0, mode: int = 0o644, packed: int = 0) -> Path:
    path = folder / f"longshore-{VERSION}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(path, "wb", mtime=packed) as packing, tarfile.TarFile(fileobj=packing, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"longshore-{VERSION}/{name}")
            info.size, info.mtime, info.mode = len(content), time, mode
            archive.addfile(info, io.BytesIO(content))
    return path


def built(folder: Path, in_wheel: Mapping[str, bytes] = IN_WHEEL, more: Mapping[str, bytes] | None = None) -> Build:
    in_sdist = {**dict.fromkeys([*COMMITTED, "PKG-INFO"], b""), **(more or {})}
    made = Wheel(wheel(folder, in_wheel), Path("python3"), (Tool("nanobind", "9.9", True), Tool("GNU", "12.2", False)))
    return Build(folder, sdist(folder, in_sdist), (made,))


def commit(root: Path) -> Commit:
    return Commit(root, "0" * 40, 1_700_000_000, tuple(COMMITTED), ())


def test_what_belongs_is_not_foreign(tmp_path: Path) -> None:
    said = checks.check_members(built(tmp_path), commit(ROOT))
    assert said.startswith("members: 6 in the sdist")


@pytest.mark.parametrize(
    "name",
    [
        "longshore.libs/libgomp-a34b3233.so.1.0.0",
        "longshore/_simulated_device.so",
        "longshore/kernels/_native.o",
        "longshore/optim/__pycache__/rules.cpython-312.pyc",
        "longshore-1.2.3.data/scripts/tool",
        "tests/layout/test_tiles.py",
    ],
)
def test_foreign_to_a_wheel(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReleaseError, match=rf"\.whl: {re.escape(name)} does not belong$"):
        checks.check_members(built(tmp_path, {**IN_WHEEL, name: b""}), commit(ROOT))


@pytest.mark.parametrize(
    "name",
    [".git/config", "build/simulated_device/_simulated_device.so", "notes.txt", ".venv/bin/python", "src/a.pyc"],
)
def test_foreign_to_a_source_distribution(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReleaseError, match=rf"\.tar\.gz: longshore-1\.2\.3/{re.escape(name)} does not belong$"):
        checks.check_members(built(tmp_path, more={name: b""}), commit(ROOT))


def test_a_binary_is_foreign_even_where_it_was_committed() -> None:
    committed = ["LICENSE", "tests/simulated_device/_simulated_device.so"]
    names = [f"longshore-{VERSION}/{name}" for name in committed]
    assert archives.foreign_to_sdist(names, committed) == names[1:]


def test_the_files_of_this_repository_may_be_released() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    files = Commit.last_of(ROOT).files
    assert archives.foreign_to_sdist([f"longshore-{VERSION}/{name}" for name in files], files) == []


@pytest.mark.parametrize("name", [name for name in IN_WHEEL if not name.endswith("METADATA")])
def test_missing_from_a_wheel(tmp_path: Path, name: str) -> None:
    fewer = {each: content for each, content in IN_WHEEL.items() if each != name}
    with pytest.raises(ReleaseError, match=r"\.whl: there is no longshore") as caught:
        checks.check_members(built(tmp_path, fewer), commit(ROOT))
    assert str(caught.value).count("\n") == 0


def test_missing_from_a_source_distribution() -> None:
    names = [f"longshore-{VERSION}/{name}" for name in ("PKG-INFO", "pyproject.toml", "CMakeLists.txt")]
    assert archives.missing_from_sdist(names, VERSION) == [
        f"longshore-{VERSION}/LICENSE",
        f"longshore-{VERSION}/native/bindings.cpp",
    ]


def test_paths_of_the_machine_are_found() -> None:
    content = b"\x7fELF\0/build/here/native/step.cpp\0\1\2/build/here\0/build/hereafter\0/usr/lib\0x=/build/here/a b\0"
    assert archives.paths_in(content, [Path("/build/here"), Path("/home/me")]) == [
        "/build/here",
        "/build/here/a b",
        "/build/here/native/step.cpp",
    ]
    assert archives.paths_in(content, [Path("/build/her")]) == []


def test_a_path_in_the_extension_stops_a_release(tmp_path: Path) -> None:
    assert checks.check_paths(built(tmp_path / "clean"), commit(ROOT)).startswith("paths: no folder")
    source = str(tmp_path / "built" / "native" / "step.cpp").encode()
    inside = {**IN_WHEEL, "longshore/kernels/_native.abi3.so": b"\x7fELF\0" + source + b"\0"}
    with pytest.raises(ReleaseError, match=r"_native\.abi3\.so has /.*/native/step\.cpp"):
        checks.check_paths(built(tmp_path / "built", inside), commit(ROOT))


def test_equal_archives_have_no_difference(tmp_path: Path) -> None:
    assert checks.check_equal(built(tmp_path / "one"), built(tmp_path / "other")).startswith("reproducible")


SOME = {"a.py": b"1\n", "b.so": b"\x7fELF" + bytes(100), "c.py": b"3\n"}
LATER = (*TIME[:5], 8)


PATCHED = bytes(50) + b"/tmp/x" + bytes(44)
NEW_ORDER = {name: SOME[name] for name in ("b.so", "a.py", "c.py")}


@pytest.mark.parametrize(
    "members, how, said",
    [
        ({**SOME, "b.so": b"\x7fELF" + PATCHED, "c.py": b"4\n"}, {}, r"b\.so: 104 and 104 bytes, from byte 54: "),
        ({**SOME, "c.py": b"3\n4\n"}, {}, r"c\.py: 2 and 4 bytes, from byte 2: "),
        ({**SOME, "d.py": b""}, {}, r"d\.py: only one of the two archives has it"),
        (NEW_ORDER, {}, r"a\.py: the other archive has b\.so at its place"),
        (SOME, {"time": LATER}, r"a\.py: the contents are equal; time, mode or owner .*, 6\).*, 8\)"),
        (SOME, {"level": 0}, r"all members are equal; the archives were packed or compressed in another way"),
    ],
)
def test_first_difference_of_wheels(tmp_path: Path, members: dict[str, bytes], how: dict[str, Any], said: str) -> None:
    difference = archives.first_difference(wheel(tmp_path / "one", SOME), wheel(tmp_path / "other", members, **how))
    assert difference is not None and re.match(said, difference)


@pytest.mark.parametrize(
    "how, said",
    [
        ({"time": 9}, r"longshore-1\.2\.3/a\.py: the contents are equal; "),
        ({"mode": 0o664}, r"longshore-1\.2\.3/a\.py: the contents are equal; "),
        ({"packed": 9}, r"all members are equal"),
    ],
)
def test_first_difference_of_source_distributions(tmp_path: Path, how: dict[str, int], said: str) -> None:
    difference = archives.first_difference(sdist(tmp_path / "one", SOME), sdist(tmp_path / "other", SOME, **how))
    assert difference is not None and re.match(said, difference)


def test_two_builds_that_differ_stop_a_release(tmp_path: Path) -> None:
    other = built(tmp_path / "other", {**IN_WHEEL, "longshore/kernels/_native.abi3.so": b"\x7fELG"})
    with pytest.raises(ReleaseError, match=r"\.whl: longshore/kernels/_native\.abi3\.so: 4 and 4 bytes, from byte 3"):
        checks.check_equal(built(tmp_path / "one"), other)


def test_bill_of_materials(tmp_path: Path) -> None:
    path, tools = (
        wheel(tmp_path),
        [Tool("nanobind", "9.9", True), Tool("cmake", "4.0", True), Tool("GNU", "12.2", False)],
    )
    text = bill_of(path, tools, 1_700_000_000)
    assert text == bill_of(path, tools, 1_700_000_000), "a second release of one commit is equal"
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    subject = bill["metadata"]["component"]
    assert (subject["name"], subject["version"]) == ("longshore", VERSION)
    assert subject["licenses"] == [{"expression": "Apache-2.0"}]
    assert subject["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]
    found = {each["name"]: each for each in bill["components"]}
    assert set(found) == {"torch", "numpy", "nanobind", "cmake", "GNU"}, "and nothing of an extra"
    assert found["numpy"]["properties"] == [{"name": "longshore:requires", "value": "numpy<3,>=1.24"}]
    assert {name: each["scope"] for name, each in found.items()} == {
        "torch": "required",
        "numpy": "required",
        "nanobind": "required",  # linked into the extension
        "cmake": "excluded",
        "GNU": "excluded",
    }
    assert found["nanobind"]["purl"] == "pkg:pypi/nanobind@9.9" and "purl" not in found["GNU"]
    depends = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    required = {each["bom-ref"] for each in bill["components"] if each["scope"] == "required"}
    assert set(depends[subject["bom-ref"]]) == required


def test_files_of_a_release(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "longshore-0.0.1.tar.gz").write_bytes(b"of a release before")
    release = built(tmp_path / "built")
    put(release, commit(ROOT), tmp_path / "dist", tmp_path / "page")
    names = [archive.name for archive in release.archives]
    assert sorted(os.listdir(tmp_path / "dist")) == sorted(names), "uploading takes nothing else"
    bill = f"{names[1]}.cdx.json"
    assert sorted(os.listdir(tmp_path / "page")) == sorted(["SHA256SUMS", bill])
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "page" / "SHA256SUMS").read_text().splitlines())
    for name in (*names, bill):
        file = tmp_path / ("page" if name == bill else "dist") / name
        assert sums.pop(name) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sums == {}


def test_a_release_is_of_the_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        environment = {**os.environ, "GIT_COMMITTER_DATE": "1700000000 +0000"}
        subprocess.run(["git", "-C", str(tmp_path / "tree"), *identity, *arguments], check=True, env=environment)

    (tmp_path / "tree").mkdir()
    git("init", "-q")
    (tmp_path / "tree" / "kept.py").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "tree" / "kept.py").write_text("2\n")
    (tmp_path / "tree" / "left.py").write_text("3\n")
    last = Commit.last_of(tmp_path / "tree")
    assert (last.epoch, last.files, len(last.changes)) == (1_700_000_000, ("kept.py",), 2)
    last.export(tmp_path / "exported")
    assert [each.name for each in (tmp_path / "exported").iterdir()] == ["kept.py"]
    assert (tmp_path / "exported" / "kept.py").read_text() == "1\n"
    with pytest.raises(ReleaseError, match="is no git repository"):
        Commit.last_of(tmp_path / "exported")


def test_tag_version_and_changelog_are_one() -> None:
    checks.check_tag("v1.2.3", "1.2.3", "# Changelog\n\n## 1.2.3 (2026-12-01)\n\n## 1.2.2\n")
    with pytest.raises(ReleaseError, match=r"the tag is v1\.2\.4, and the version .* 1\.2\.3"):
        checks.check_tag("v1.2.4", "1.2.3", "## 1.2.3\n")
    with pytest.raises(ReleaseError, match=r'heading of CHANGELOG\.md is "## Unreleased": rename it'):
        checks.check_tag("v1.2.3", "1.2.3", "## Unreleased\n\n## 1.2.3\n")


def test_the_first_example_of_the_readme() -> None:
    example = checks.first_python_block((ROOT / "README.md").read_text())
    compile(example, "README.md", "exec")
    assert "longshore.AdamW(" in example and "torch.equal(" in example
    with pytest.raises(ReleaseError, match="has no block of Python"):
        checks.first_python_block("```bash\nls\n```\n")


def test_one_version_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert longshore.__version__ == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version
    assert citation["license"] == "Apache-2.0" and citation["cff-version"] == "1.2.0"
    newest = re.findall(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert re.fullmatch(rf"## (Unreleased|{re.escape(version)}( \(\d{{4}}-\d\d-\d\d\))?)", newest)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_are_workflows_and_forms() -> None:
    assert {each.name for each in WORKFLOWS} == {"checks.yml", "docs.yml", "release.yml"}
    assert {each.name for each in FORMS} == {"bug.yml", "config.yml", "feature.yml"}
    assert targets() >= {"lint", "test", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_exists(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [line for step in steps for line in step.get("run", "").splitlines()]
    called = {found[1] for line in commands if (found := re.match(r"\s*make ([a-z-]+)", line))}
    assert called and called <= targets()
    assert not [line for line in commands if "${{" in line], (
        "what a tag or a branch is called is not pasted into a shell"
    )
    assert len([step for step in steps if "uses" in step]) == len(
        re.findall(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.M)
    )
    assert "permissions" in workflow and all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_ci_there_runs_what_ci_here_does_or_the_whole_of_a_sample() -> None:
    here = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    there = set(re.findall(r"run: make ([a-z-]+)", (ROOT / ".github" / "workflows" / "checks.yml").read_text()))
    assert here <= there | {f"{whole}-sample" for whole in there}


@pytest.mark.parametrize("path", [each for each in FORMS if each.name != "config.yml"], ids=lambda path: path.name)
def test_forms_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names) and all(field["attributes"]["label"] for field in fields)


def test_a_bug_comes_with_the_facts_of_its_machine() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (field,) = (field for field in form["body"] if field.get("id") == "report")
    assert "`longshore report`" in field["attributes"]["label"] and field["validations"] == {"required": True}


@pytest.mark.parametrize(
    ("tag", "symbols"), [("manylinux_2_35_x86_64", "GLIBC_2.35"), ("manylinux_2_31_x86_64", "GLIBCXX_3.4.26")]
)
def test_a_wheel_for_new_systems_alone(tag: str, symbols: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Wheel(tmp_path / f"longshore-1.2.3-cp312-abi3-{tag}.whl", Path("python3"), ())
    monkeypatch.setattr(checks, "run", lambda *_: f"... {symbols}, GLIBC_2.2.5 ...")
    with pytest.raises(ReleaseError, match=rf"{symbols}.*\): torch's own wheels are for manylinux_2_28"):
        checks.check_policy(made)
    older = Wheel(
        tmp_path / "longshore-1.2.3-cp312-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", made.python, ()
    )
    assert "manylinux_2_27 (" in checks.check_policy(older)
