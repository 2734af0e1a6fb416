"""Make a release: ``python -m scripts.release``, in an environment with the extra ``ship`` (``make release``).

Builds a source distribution of the last commit and from it a wheel for each interpreter, checks them, builds all of it
once more in another folder and compares. ``dist/`` then has what the index of packages takes and nothing else;
``build/release/`` has what goes on the page of the release: an SBOM of each wheel, and SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scripts.release import checks
from scripts.release.building import Build, Commit, ReleaseError, build
from scripts.release.sbom import bill_of

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PAGE = ROOT / "build" / "release"


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--once", action="store_true", help="do not build a second time to compare")
    parser.add_argument(
        "--python",
        action="append",
        metavar="PROGRAM",
        help="an interpreter to build a wheel for, instead of the running one; may be repeated",
    )
    parser.add_argument("--tag", help="the tag that is released: v and the version, which the changelog names too")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    options, begun = _options(arguments), time.monotonic()

    def say(line: str) -> None:
        print(f"release: [{time.monotonic() - begun:4.0f} s] {line}", flush=True)

    try:
        release(options, say)
    except ReleaseError as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def release(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Build, check, compare, and put the files into their folders; what was there before goes."""
    pythons = [_interpreter(name) for name in options.python or [sys.executable]]
    commit = Commit.last_of(ROOT)
    say(f"commit {commit.name[:12]}, SOURCE_DATE_EPOCH={commit.epoch}")
    if commit.changes:
        say(f"{len(commit.changes)} changes in the working tree are not in it: {commit.changes[0].strip()}, ...")
    with tempfile.TemporaryDirectory(prefix="longshore-release-") as made:
        work = Path(made)
        first = build(commit, pythons, work / "first")
        say(f"built {', '.join(archive.name for archive in first.archives)}")
        if options.tag is not None:
            checks.check_tag(options.tag, checks.version_of(first), (first.source / "CHANGELOG.md").read_text())
        names = [archive.name for archive in first.archives]
        if len(set(names)) < len(names):
            raise ReleaseError(f"two interpreters gave one wheel; name one for the stable ABI: {', '.join(names)}")
        say(checks.check_members(first, commit))
        say(checks.check_paths(first, commit))
        say(checks.check_metadata(first))
        for wheel in first.wheels:
            say(checks.check_policy(wheel))
            say(checks.check_stable_abi(wheel))
        for number, wheel in enumerate(first.wheels):
            (work / f"try-{number}").mkdir()
            say(checks.check_installed(wheel, first.source, work / f"try-{number}").rstrip())
        if options.once:
            say("not built a second time: nothing shows that the release is reproducible")
        else:
            # A path of another length: what keeps a path in some form differs in size, too.
            second = build(commit, pythons, work / "second" / "elsewhere")
            say(checks.check_equal(first, second))
        put(first, commit, DIST, PAGE)
    say(f"done. For the index of packages, in {DIST.relative_to(ROOT)}/:")
    _list(DIST)
    say(f"for the page of the release, in {PAGE.relative_to(ROOT)}/:")
    _list(PAGE)


def put(built: Build, commit: Commit, dist: Path, page: Path) -> None:
    """Write the archives to ``dist``, and the SBOMs and the sums of all to ``page``."""
    for folder in (dist, page):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    files = [Path(shutil.copy(archive, dist)) for archive in built.archives]
    for wheel in built.wheels:
        bill = page / f"{wheel.path.name}.cdx.json"
        bill.write_text(bill_of(wheel.path, wheel.tools, commit.epoch))
        files.append(bill)
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (page / "SHA256SUMS").write_text("".join(lines))


def _interpreter(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise ReleaseError(f"there is no interpreter {name!r}")
    return Path(found)


def _list(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        print(f"  {file.stat().st_size:>9,} {file.name}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
