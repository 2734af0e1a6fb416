"""Checks of the files of a release before they are uploaded.

Each check raises a ReleaseError, or returns a line about what it saw.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.release.archives import (
    first_difference,
    foreign_to_sdist,
    foreign_to_wheel,
    members_of,
    missing_from_sdist,
    missing_from_wheel,
    paths_in,
)
from scripts.release.building import Build, Commit, ReleaseError, Wheel, run

USUAL_POLICY = (2, 28)
"""The manylinux policy of torch's own wheels."""


def version_of(build: Build) -> str:
    """Return the version in the name of the source distribution."""
    return build.sdist.name.removeprefix("longshore-").removesuffix(".tar.gz")


def check_tag(tag: str, version: str, changelog: str) -> None:
    """Check that the tag is v and the version, and that the newest heading of the changelog is the version too."""
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, and the version of pyproject.toml {version}: change one of them")
    heading = next(line for line in changelog.splitlines() if line.startswith("## "))
    if not re.fullmatch(rf"## {re.escape(version)}( .*)?", heading):
        raise ReleaseError(f'the newest heading of CHANGELOG.md is "{heading}": rename it to "## {version} (DATE)"')


def check_members(build: Build, commit: Commit) -> str:
    """Check that nothing is in the archives that does not belong, and that nothing is missing."""
    version, wrong = version_of(build), []
    names = [member.name for member in members_of(build.sdist)]
    wrong += [f"{build.sdist.name}: {name} does not belong" for name in foreign_to_sdist(names, commit.files)]
    wrong += [f"{build.sdist.name}: there is no {name}" for name in missing_from_sdist(names, version)]
    for wheel in build.wheels:
        inside = [member.name for member in members_of(wheel.path)]
        wrong += [f"{wheel.path.name}: {name} does not belong" for name in foreign_to_wheel(inside, version)]
        wrong += [f"{wheel.path.name}: there is no {name}" for name in missing_from_wheel(inside, version)]
    if wrong:
        raise ReleaseError("\n".join(wrong))
    return f"members: {len(names)} in the sdist, LICENSE in each, nothing that does not belong"


def check_paths(build: Build, commit: Commit) -> str:
    """Check that no member of a wheel names a folder of this machine.

    The source distribution has the files of the commit, and PKG-INFO, which is made of them.
    """
    folders = {build.folder, commit.root, Path.home()}
    folders = {each for folder in folders for each in (folder, folder.resolve()) if each != Path("/")}
    wrong = [
        f"{wheel.path.name}: {member.name} has {path}"
        for wheel in build.wheels
        for member in members_of(wheel.path)
        for path in paths_in(member.content, folders)
    ]
    if wrong:
        raise ReleaseError("folders of this machine are in the wheels:\n" + "\n".join(wrong))
    return "paths: no folder of this machine in the extension, nor in another member of a wheel"


def check_metadata(build: Build) -> str:
    """Check that the index of packages takes the metadata."""
    run([sys.executable, "-m", "twine", "check", "--strict", *build.archives], "twine check --strict")
    return "twine check --strict: passed"


def check_policy(wheel: Wheel) -> str:
    """Check that a wheel can be installed where torch's own can; return its policy, and the symbols that decide it."""
    shown = run([sys.executable, "-m", "auditwheel", "show", wheel.path], "auditwheel show")
    policy = min((int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", wheel.path.name))
    newest: dict[str, tuple[int, ...]] = {}
    for library, numbers in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_(\d[\d.]*)", shown):
        newest[library] = max(newest.get(library, ()), tuple(int(number) for number in numbers.split(".")))
    symbols = ", ".join(f"{library}_{'.'.join(map(str, numbers))}" for library, numbers in sorted(newest.items()))
    said = f"auditwheel: {wheel.path.name}: manylinux_{policy[0]}_{policy[1]} ({symbols})"
    if policy > USUAL_POLICY:
        raise ReleaseError(
            f"{said}: torch's own wheels are for manylinux_{USUAL_POLICY[0]}_{USUAL_POLICY[1]}. Systems with older "
            "libraries than this machine's could not install it: take the newer symbols out, as "
            "native/older_libraries.cpp does, or build in an image of that policy"
        )
    return said


def check_stable_abi(wheel: Wheel) -> str:
    """Check that a wheel for the stable ABI uses nothing else of Python."""
    if "-abi3-" not in wheel.path.name:
        return f"abi3audit: {wheel.path.name} is for one version of Python, and promises no stable ABI"
    run([sys.executable, "-m", "abi3audit", "--strict", "--verbose", wheel.path], "abi3audit --strict")
    return f"abi3audit --strict: {wheel.path.name} passed"


def check_installed(wheel: Wheel, source: Path, folder: Path) -> str:
    """Check that a wheel works in an empty environment, where there is no compiler.

    Args:
        wheel: tried with the interpreter it was built for.
        source: files of the commit: constraints.txt names the torch to install, README.md has the example to run.
        folder: empty, and outside of any source tree.
    """
    run([wheel.python, "-m", "venv", folder / "venv"], "making an empty environment")
    own = folder / "venv" / "bin"
    # Nothing but the environment's own programs is on the path, so that no compiler is found.
    bare = {name: text for name, text in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH")}
    bare["PATH"] = str(own)
    constraints = source / "constraints.txt"
    (torch,) = (line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    pip = [own / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:", "-c", constraints]
    run([*pip, torch], f"installing {torch}", environment=bare, folder=folder)
    run([*pip, wheel.path], "installing the wheel", environment=bare, folder=folder)
    installed = [own / "python", "-I", source / "scripts" / "check_installed.py"]
    said = run(installed, "scripts/check_installed.py", environment=bare, folder=folder)
    if platform.machine() == "x86_64":  # it compares with torch's bits, which are others on aarch64
        example = folder / "readme_example.py"
        example.write_text(first_python_block((source / "README.md").read_text()))
        said += run([own / "python", "-I", example], "the README's first example", environment=bare, folder=folder)
    shutil.rmtree(folder / "venv")
    return f"installed: {wheel.path.name}, alone with {torch}:\n" + "".join(f"  {line}\n" for line in said.splitlines())


def first_python_block(page: str) -> str:
    """Return the first block of a page that is Python."""
    found = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ReleaseError("README.md has no block of Python to try")
    return found[1]


def check_equal(first: Build, second: Build) -> str:
    """Check that two builds of one commit, in two folders, have the same bytes."""
    wrong = list(_differences(first.archives, second.archives))
    if wrong:
        raise ReleaseError("two builds of one commit differ:\n" + "\n".join(wrong))
    return f"reproducible: a second build in another folder gave the same bytes, {len(first.archives)} files"


def _differences(one: Iterable[Path], other: Iterable[Path]) -> Iterable[str]:
    for left, right in zip(one, other, strict=True):
        said = first_difference(left, right)
        if said is not None:
            yield f"{left.name}: {said}"
