"""What ranks tell each other of the memory that they share; here two of them, of which one is played."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from longshore.ranks import data_plane as module
from longshore.ranks.data_plane import SharedMemory


@pytest.fixture
def blocks() -> Iterator[SharedMemory]:
    made = SharedMemory(0, lambda row: torch.stack([row, row]))
    assert not made.works, "nobody wrote the other rank's word"
    made.works = True
    yield made
    made.close()


def test_memory_is_free_when_all_say_so(blocks: SharedMemory) -> None:
    found = blocks.lend(100, held=True)
    assert found is not None
    first, memory = found
    mine = blocks.come(first)
    assert blocks.met([mine, mine])
    del memory, found
    for other_is_done in (False, True):
        found = blocks.lend(100, held=True)
        assert found is not None and found[0] is not first
        mine = blocks.come(found[0])
        theirs = [*mine[:3], mine[3] if other_is_done else mine[3] & ~1]
        assert blocks.met([mine, theirs])
        assert first.free == other_is_done
        del found
    found = blocks.lend(100, held=True)
    assert found is not None and found[0] is first


@pytest.mark.parametrize("place", [0, 1, 2], ids=["generation", "index", "capacity"])
def test_ranks_that_came_with_other_memory_begin_anew(place: int, blocks: SharedMemory) -> None:
    found = blocks.lend(100, held=False)
    assert found is not None
    mine = blocks.come(found[0])
    theirs = [value + (place == number) for number, value in enumerate(mine)]
    assert not blocks.met([mine, theirs])
    assert blocks.works
    again = blocks.lend(100, held=False)
    assert again is not None and again[0] is not found[0]
    row = blocks.come(again[0])
    assert row[0] == max(mine[0], theirs[0]) + 1
    assert blocks.met([row, row])


def test_what_was_lent_before_the_ranks_began_anew_is_not_shared(blocks: SharedMemory) -> None:
    found = blocks.lend(100, held=False)
    assert found is not None
    mine = blocks.come(found[0])
    pending = blocks.lend(100, held=False)
    assert pending is not None
    assert not blocks.met([mine, [*mine[:1], mine[1] + 1, *mine[2:]]])
    row = blocks.come(pending[0])
    assert not blocks.met([row, row])
    assert blocks.works


def test_files_that_a_killed_rank_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    stale, recent, other = (tmp_path / name for name in ("longshore-ab-1-1", "longshore-cd-1-1", "another"))
    for path in (stale, recent, other):
        path.write_bytes(b"x")
    for path in (stale, other):
        os.utime(path, (0, 0))
    SharedMemory(0, lambda row: torch.stack([row, row]))
    assert sorted(tmp_path.iterdir()) == sorted([recent, other])


def _next_path(blocks: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the block that is made next, which nobody else knows."""
    paths: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "SharedBlock", lambda path, capacity: paths.append(path) or _refuse())
        assert blocks.lend(100, held=False) is None
    blocks._no_room, blocks._lent_for = False, 0  # as if this had not been
    return paths[0]


def _refuse(*arguments: object, **options: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_names_of_files_tell_nothing_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    made = [SharedMemory(0, lambda row: torch.stack([row, row])) for _ in range(2)]
    names = set()
    for each in made:
        each.works = True
        names.add(_next_path(each, monkeypatch).name)
        each._begin_anew(2)
        names.add(_next_path(each, monkeypatch).name)
    assert len(names) == 4
    assert all(f"{each._token:x}" not in name and str(each._token) not in name for each in made for name in names)


def _by_another_user(path: Path) -> None:
    path.write_bytes(b"theirs")
    path.chmod(0o666)


@pytest.mark.parametrize(
    "lay",
    [_by_another_user, lambda path: path.symlink_to("victim"), Path.mkdir, os.mkfifo],
    ids=["others may read", "link", "folder", "pipe"],
)
def test_a_file_that_no_rank_made_is_neither_written_nor_removed(
    lay: Callable[[Path], object], tmp_path: Path, blocks: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    (tmp_path / "victim").write_bytes(b"victim")
    (tmp_path / "victim").chmod(0o600)
    path = _next_path(blocks, monkeypatch)
    lay(path)
    assert blocks.lend(100, held=False) is None
    assert (tmp_path / "victim").read_bytes() == b"victim"
    assert not path.is_file() or path.is_symlink() or path.read_bytes() == b"theirs"
    row = blocks.come(None)
    assert not blocks.met([row, row]) and not blocks.works, "the ranks use sockets"


def test_another_users_file_is_refused(tmp_path: Path, blocks: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    path = _next_path(blocks, monkeypatch)
    path.touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    assert blocks.lend(100, held=False) is None
    assert path.stat().st_size == 0


def test_a_folder_that_cannot_be_written(blocks: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "open", _refuse)
    monkeypatch.setattr(module.os, "unlink", _refuse)
    assert blocks.lend(100, held=False) is None
    row = blocks.come(None)
    assert not blocks.met([row, row]) and not blocks.works


_ENDS = """
import os, torch
from longshore.ranks.data_plane import SharedMemory
made = SharedMemory(0, lambda row: torch.stack([row, row]))
made.works = True
path = made.lend(100, held=False)[0].path
print(path, flush=True)
if os.fork() == 0:
    raise SystemExit
os.wait()
assert path.exists(), "it is not the child's to remove"
raise SystemExit("an exception")
"""


@pytest.mark.slow
def test_a_process_that_ends_leaves_no_memory_behind() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", _ENDS], capture_output=True, text=True)
    assert ended.stderr.strip() == "an exception"
    path = Path(ended.stdout.strip())
    assert path.name.startswith("longshore-") and not path.exists()
