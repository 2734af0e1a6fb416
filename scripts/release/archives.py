"""What is in a source distribution or a wheel: members, what does not belong, and where two of them differ."""

from __future__ import annotations

import os
import re
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

# Compiled files and what tools leave behind: in a folder of a developer they are everywhere, in a release nowhere.
_LEFTOVER = re.compile(
    r"(^|/)(\.git|\.hg|\.venv[^/]*|venv|build|dist|__pycache__|\.[a-z]+_cache|\.hypothesis|[^/]*\.egg-info)/"
    r"|\.(so|so\.[\d.]+|o|a|dylib|dll|exe|pyc|pyo|whl|orig|rej|swp)$|(^|/)(\.DS_Store|core(\.\d+)?)$|~$"
)
_EXTENSION = re.compile(r"^longshore/kernels/_native\.[\w.-]*so$")


@dataclass(frozen=True)
class Member:
    """One entry of an archive: its bytes, and everything else that its header says of it."""

    name: str
    content: bytes
    header: tuple[object, ...]


def members_of(archive: Path) -> list[Member]:
    """Return the entries of a ``.tar.gz`` or ``.whl`` in their order."""
    if archive.name.endswith(".whl"):
        with zipfile.ZipFile(archive) as wheel:
            return [
                Member(
                    each.filename,
                    wheel.read(each),
                    (each.date_time, each.external_attr, each.compress_type, each.create_system, each.extra),
                )
                for each in wheel.infolist()
            ]
    found = []
    with tarfile.open(archive) as sdist:
        for each in sdist:
            content = sdist.extractfile(each) if each.isfile() else None
            header = (each.type, each.mtime, each.mode, each.uid, each.gid, each.uname, each.gname, each.linkname)
            found.append(Member(each.name, content.read() if content else b"", header))
    return found


def foreign_to_sdist(names: Iterable[str], committed: Iterable[str]) -> list[str]:
    """Return names in a source distribution that are not of the commit, or should not be in any.

    Args:
        names: of the members; each begins with ``longshore-VERSION/``.
        committed: paths of the files of the commit, from its root.
    """
    expected = {*committed, "PKG-INFO"}
    inside = {name: name.partition("/")[2] for name in names}
    return [name for name, path in inside.items() if path not in expected or _LEFTOVER.search(path)]


def foreign_to_wheel(names: Iterable[str], version: str) -> list[str]:
    """Return names in a wheel that are neither of the package nor of its metadata, and binaries but for the extension.

    Libraries that ``auditwheel`` copied into ``longshore.libs`` count too: the extension needs none, and each would
    bring its own licence.
    """
    homes = ("longshore/", f"longshore-{version}.dist-info/")
    return [
        name
        for name in names
        if not name.startswith(homes) or (_LEFTOVER.search(name) and not _EXTENSION.fullmatch(name))
    ]


def missing_from_wheel(names: Iterable[str], version: str) -> list[str]:
    """Return what every wheel has and this one has not."""
    present = set(names)
    expected = [
        f"longshore-{version}.dist-info/licenses/LICENSE",
        "longshore/__init__.py",
        "longshore/py.typed",  # the classifier Typing :: Typed says so, and without it type checkers see no types
    ]
    missing = [name for name in expected if name not in present]
    if not any(_EXTENSION.fullmatch(name) for name in present):
        missing.append("longshore/kernels/_native.*.so")
    return missing


def missing_from_sdist(names: Iterable[str], version: str) -> list[str]:
    """Return what a source distribution needs to be built and distributed, and this one has not."""
    present, root = set(names), f"longshore-{version}"
    expected = ("LICENSE", "PKG-INFO", "pyproject.toml", "CMakeLists.txt", "native/bindings.cpp")
    return [f"{root}/{name}" for name in expected if f"{root}/{name}" not in present]


def paths_in(content: bytes, folders: Iterable[Path]) -> list[str]:
    """Return the strings in ``content`` that are one of these absolute folders or lie below one, each once."""
    starts = b"|".join(re.escape(os.fsencode(folder)) for folder in folders)
    found = re.findall(rb"(?:" + starts + rb")(?![\w.-])[\x20-\x7e]*", content)
    return sorted({each.decode("ascii", "backslashreplace") for each in found})


def first_difference(one: Path, other: Path) -> str | None:
    """Return where two archives differ, at the first member that does, or None if their bytes are equal."""
    if one.name != other.name:
        return f"the names: {one.name}, {other.name}"
    if one.read_bytes() == other.read_bytes():
        return None
    for left, right in zip_longest(members_of(one), members_of(other)):
        if left is None or right is None:
            extra = left or right
            return f"{extra.name}: only one of the two archives has it"
        if left.name != right.name:
            return f"{left.name}: the other archive has {right.name} at its place"
        if left.content != right.content:
            return f"{left.name}: {_where(left.content, right.content)}"
        if left.header != right.header:
            return f"{left.name}: the contents are equal; time, mode or owner {left.header} and {right.header}"
    return "all members are equal; the archives were packed or compressed in another way"


def _where(left: bytes, right: bytes) -> str:
    pairs = enumerate(zip(left, right, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
    around = slice(max(at - 24, 0), at + 24)
    return f"{len(left)} and {len(right)} bytes, from byte {at}: {left[around]!r} and {right[around]!r}"
