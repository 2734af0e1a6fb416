"""What a folder of checkpoints promises: each is whole or is not there, whatever ends a process or fills a disk."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.checkpoint import folder as folder_module
from longshore.checkpoint.boxes import BoxReader, SavedBoxes, WantedBoxes
from longshore.checkpoint.folder import Draft, WholeCheckpoint, candidates, check_tag, prune, read_latest
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.saving import STATE, Content, Target, write
from longshore.checkpoint.training_state import find
from longshore.checkpoint.values import Values, read_values
from longshore.errors import CheckpointError, RankError
from longshore.layout.boxes import Box

NUMEL = 1000
TENSORS = "model-00000-of-00001.safetensors"


def save(root: Path, tag: str, number: int, run: str = "run", **more: Any) -> Path:
    """A small checkpoint, of one tensor full of ``number`` and a value that says the same."""
    values = torch.full((NUMEL,), float(number))
    part = SavedBoxes("model.weight", torch.float32, (NUMEL,), [Box((0,), (NUMEL,))], lambda: values)
    about = Values.of({"number": number, "again": torch.tensor(number)})
    content = Content([part], about, Values.of({"rank": 0}), {}, number, run)
    return write(content, Target(root, tag, **more), RankGroup())


def number_in(path: Path) -> int:
    """What was saved; raises CheckpointError where it is not whole."""
    WholeCheckpoint(path).verify()
    values, found = read_values(path, STATE), list[Tensor]()
    part = WantedBoxes("model.weight", (NUMEL,), [Box((0,), (NUMEL,))], found.append)
    BoxReader(path).read([part])
    number = values["number"]
    assert torch.equal(found[0], torch.full((NUMEL,), float(number))) and int(values["again"]) == number
    return number


def load(root: Path, tag: str | None = None) -> int | None:
    whole = find(root, tag, RankGroup())
    return None if whole is None else number_in(whole.path)


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# -- tags ---------------------------------------------------------------------

NO_TAGS = ["../x", "..", ".", "", ".hidden", "a/b", "/a", "a\\b", "latest", "a\n", "a\nb", "a\0b", " a", "a ", "\ud800"]


@pytest.mark.parametrize("tag", [*NO_TAGS, "a" * 300, "ä" * 150, 5, None, b"a", Path("a")], ids=repr)
def test_no_tag(tag: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tag"):
        check_tag(tag)
    root = tmp_path / "root"
    with pytest.raises(ValueError, match="tag"):
        Draft(root, tag)
    assert not root.exists()
    if tag is not None:
        with pytest.raises(ValueError, match="tag"):
            find(tmp_path, tag, RankGroup())


@pytest.mark.quick(0)
@pytest.mark.parametrize("tag", ["a", "global_step5", "a b", "a.b", "-a", "latest2", "ä" * 100, "a" * 200, "模型", "*"])
def test_tag(tag: str, tmp_path: Path) -> None:
    for number in (1, 2):
        assert save(tmp_path, tag, number) == tmp_path / tag
        assert load(tmp_path, tag) == load(tmp_path) == number


# -- processes that end -------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from checkpoint import test_folder
from longshore.checkpoint import saving
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
saving.parsed_metadata = die
test_folder.save(Path(sys.argv[2]), "a", 2)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run([sys.executable, "-c", KILLED, tests, str(tmp_path)], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (draft,) = hidden(tmp_path)
    assert (tmp_path / draft / TENSORS).is_file()
    assert load(tmp_path) == load(tmp_path, "a") == 1
    save(tmp_path, "b", 3)
    assert hidden(tmp_path) == [] and load(tmp_path) == 3


def test_a_draft_of_a_process_that_lives_stays(tmp_path: Path) -> None:
    drafts = [Draft(tmp_path, "a") for _ in range(3)]
    save(tmp_path, "a", 1)
    assert all(draft.path.is_dir() for draft in drafts)
    drafts[0].discard()
    save(tmp_path, "b", 1)
    assert hidden(tmp_path) == sorted(draft.path.name for draft in drafts[1:])
    # Of another machine: nobody here can tell whether it lives.
    drafts[1]._unlock()
    (drafts[1].path / "lock").write_text("elsewhere")
    save(tmp_path, "b", 2)
    assert drafts[1].path.is_dir()
    os.utime(drafts[1].path, (0, 0))  # but not for that long
    drafts[2]._unlock()
    save(tmp_path, "b", 3)
    assert hidden(tmp_path) == []


class Stop(BaseException):
    """As if the process ended here: nothing that follows is done."""


def stopping(
    monkeypatch: pytest.MonkeyPatch, owner: Any, names: tuple[str, ...], at: int, error: BaseException
) -> list[str]:
    """The ``at``-th call of these raises; where the process ends, those after it do, too. Returns what was called."""
    calls: list[str] = []

    def replaced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == at or (len(calls) > at and isinstance(error, Stop)):
                raise error
            return real(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, replaced(name, getattr(owner, name)))
    return calls


CALLS_OF_COMMIT = ("rename", "replace", "unlink", "fsync", "rmdir")


def end_of_replacing(root: Path, at: int, error: BaseException, names: tuple[str, ...]) -> int:
    """A second checkpoint of a tag, whose saving ends at a call; how many calls there were until then."""
    save(root, "a", 1)
    with pytest.MonkeyPatch.context() as patch:
        calls = stopping(patch, os, names, at, error)
        with contextlib.suppress(Stop, CheckpointError):
            save(root, "a", 2)
    return len(calls)


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("names", [("rename",), CALLS_OF_COMMIT])
@pytest.mark.parametrize("error", [Stop(), OSError(errno.EIO, "bad disk")], ids=["ends", "fails"])
def test_replacing_that_ends_half_way(error: BaseException, names: tuple[str, ...], tmp_path: Path) -> None:
    for at in range(1, 1000):
        root = tmp_path / str(at)
        made = end_of_replacing(root, at, error, names)
        found = {load(root), load(root, "a")}
        assert len(found) == 1 and found <= {1, 2}, at
        assert read_latest(root) == "a"
        assert isinstance(error, Stop) or number_in(root / "a") in found
        save(root, "b", 3)
        assert load(root) == 3
        assert load(root, "a") in (1, 2)
        if made < at:
            break
        shutil.rmtree(root)
    assert at > 2 and found == {2}


# -- latest -------------------------------------------------------------------


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


POINTERS: list[Callable[[Path], Any]] = [
    lambda path: None,
    lambda path: path.write_bytes(b"\xff\xfe\0"),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_text("../outside"),
    lambda path: path.write_text("x" * 100_000),
    put_pipe,
    lambda path: path.mkdir(),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path.name),
]


@pytest.mark.quick(0)
@pytest.mark.parametrize("lay", POINTERS, ids=map(str, range(len(POINTERS))))
def test_a_pointer_that_is_gone_or_garbage(lay: Callable[[Path], Any], tmp_path: Path) -> None:
    for number, tag in enumerate(("b", "c", "a")):
        save(tmp_path, tag, number)
    (tmp_path / "latest").unlink()
    lay(tmp_path / "latest")
    assert read_latest(tmp_path) is None
    assert load(tmp_path, "c") == 1
    if os.path.lexists(tmp_path / "latest"):
        with pytest.warns(UserWarning, match="latest is damaged: it names no tag; the newest complete"):
            assert load(tmp_path) == 2
    else:
        assert load(tmp_path) == 2


def test_a_folder_that_has_the_name_of_the_pointer_is_named_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "latest"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(folder))} is a folder, .* move the folder away"):
        save(tmp_path, "a", 1)
    assert os.listdir(tmp_path) == ["latest"] and os.listdir(folder) == ["mine"]
    save(tmp_path, "a", 1, latest=False)
    folder.rename(tmp_path / "other")
    (tmp_path / "latest").symlink_to("other")  # a link is replaced
    save(tmp_path, "b", 2)
    assert read_latest(tmp_path) == "b" and os.listdir(tmp_path / "other") == ["mine"]


def test_a_pointer_to_what_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, "b", 1)
    save(tmp_path, "a", 2)
    (tmp_path / "latest").write_text("gone\n")
    with pytest.warns(UserWarning, match="no checkpoint .*gone, which .*latest names; the newest complete"):
        assert load(tmp_path) == 2


def test_the_pointer_goes_before_age(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2, latest=False)
    assert load(tmp_path) == 1
    shutil.rmtree(tmp_path / "a")
    with pytest.warns(UserWarning, match="no checkpoint .*a, which"):
        assert load(tmp_path) == 2


def test_steps_and_not_the_clock_say_what_is_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "b", 1)
    monkeypatch.setattr(folder_module.time, "time_ns", lambda: 10)
    save(tmp_path, "a", 2)
    (tmp_path / "latest").unlink()
    assert load(tmp_path) == 2


class LosesItsPeers(RankGroup):
    """The first rank, which loses the others at one of the times that they tell each other something."""

    def __init__(self, lost_at: int) -> None:
        super().__init__()
        self._left = lost_at

    def gather(self, value: Any) -> list[Any]:
        self._left -= 1
        if self._left < 0:
            raise RankError("rank 0: rank 1 has ended or cannot be reached")
        return [value]


@pytest.mark.parametrize("lost_at", range(7))
def test_ranks_that_are_lost_fail_a_save_only_before_it_is_complete(
    lost_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = torch.zeros(NUMEL)
    part = SavedBoxes("model.weight", torch.float32, (NUMEL,), [Box((0,), (NUMEL,))], lambda: values)
    content = Content([part], Values.of({"number": 0, "again": torch.tensor(0)}), Values.of({}), {}, 1, "run")
    failed = False
    try:
        assert write(content, Target(tmp_path, "a"), LosesItsPeers(lost_at)) == tmp_path / "a"
    except RankError:
        failed = True
    assert failed == (load(tmp_path) is None) == (lost_at < 4)
    assert ("is complete, and another rank did not hear of it" in caplog.text) == (lost_at in (4, 5))
    assert hidden(tmp_path) == []


# -- damage -------------------------------------------------------------------


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", [TENSORS, "state.json", "metadata.json", "manifest.json", "rank-00000.json"])
@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: os.truncate(path, 5)], ids=["bit", "gone", "short"])
def test_a_damaged_one(name: str, damage: Callable[[Path], Any], tmp_path: Path) -> None:
    for number, tag in enumerate(("old", "good", "bad")):
        save(tmp_path, tag, number)
    if (name, damage) == ("manifest.json", flip):
        (tmp_path / "bad" / name).write_text("{")  # its last letter is a space
    else:
        damage(tmp_path / "bad" / name)
    words = "there is no checkpoint.*bad" if (name, damage) == ("manifest.json", Path.unlink) else f"bad/{name}"
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, "bad")
    with pytest.warns(UserWarning, match=f"{words}.*the newest complete checkpoint before it is loaded instead"):
        assert load(tmp_path) == 1
    assert load(tmp_path, "good") == 1
    flip(tmp_path / "good" / TENSORS)
    flip(tmp_path / "old" / TENSORS)
    warnings.simplefilter("ignore", UserWarning)  # one of each
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load(tmp_path)


def test_a_tag_that_is_not_there(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(tmp_path, "a")
    save(tmp_path, "b", 1)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*; there are b"):
        load(tmp_path, "a")


def test_files_that_the_manifest_does_not_list(tmp_path: Path) -> None:
    """What is read is what was verified."""
    path = save(tmp_path, "a", 1)
    (path / "notes.txt").write_text("mine")
    assert load(tmp_path, "a") == 1
    manifest = (path / "manifest.json").read_text()
    for name in ("metadata.json", "state.json", "state.safetensors", "rank-00000.json", TENSORS):
        (path / "manifest.json").write_text(manifest.replace(name, "notes.txt"))
        (path / "notes.txt").write_bytes((path / name).read_bytes())
        with pytest.raises(CheckpointError, match=f"does not list {name}"):
            load(tmp_path, "a")


@pytest.mark.parametrize("name", ["\\ud800", "a" * 300, "a\\u0000b", "../a", "manifest.json"])
def test_a_manifest_that_lists_what_no_file_is_called(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, "a", 1) / "manifest.json"
    path.write_text(path.read_text().replace('"files":{', f'"files":{{"{name}":{{"bytes":0,"sha256":""}},'))
    with pytest.raises(CheckpointError, match="not a valid file name"):
        load(tmp_path, "a")


# -- keeping some -------------------------------------------------------------


def test_keep_last(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path, f"mine{number}", number)
    save(tmp_path, "theirs", 10, run="other")
    flip(tmp_path / "mine0" / "state.json")  # its size is right: who prunes does not read
    (tmp_path / "mine1" / "state.json").unlink()
    (tmp_path / "folder").mkdir()
    save(tmp_path, "best", 4, latest=False)
    save(tmp_path, "mine4", 4)
    save(tmp_path, "mine5", 5, keep_last=3)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["best", "folder", "latest", "mine1", "mine3", "mine4", "mine5", "theirs"]
    (tmp_path / "latest").write_text("mine3\n")
    assert prune(tmp_path, 1, "run") == ["mine4"]
    assert prune(tmp_path, 1, "nobody's") == [] and load(tmp_path) == 3


def test_keep_last_spares_copies_and_what_others_put_there(tmp_path: Path) -> None:
    for number in range(2):
        save(tmp_path, f"mine{number}", number)
    shutil.copytree(tmp_path / "mine0", tmp_path / "best")
    (tmp_path / "mine0" / "tokenizer").mkdir()
    (tmp_path / "mine0" / "tokenizer" / "vocab.txt").write_text("mine")
    save(tmp_path, "mine2", 2, keep_last=1)
    assert [*tmp_path.rglob("vocab.txt")] == [tmp_path / "mine0" / "tokenizer" / "vocab.txt"]
    assert os.listdir(tmp_path / "mine0") == ["tokenizer"] and not (tmp_path / "mine1").exists()
    assert number_in(tmp_path / "best") == 0 and load(tmp_path) == 2 and hidden(tmp_path) == []


def test_steps_and_not_the_clock_say_what_keep_last_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "first", 1)
    save(tmp_path, "second", 2)
    monkeypatch.setattr(folder_module.time, "time_ns", lambda: 10)
    save(tmp_path, "third", 3, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "second", "third"]


def test_after_going_back_the_newer_steps_are_the_stale_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, f"step{step}", step, keep_last=4)
    monkeypatch.setattr(folder_module.time, "time_ns", lambda: 10)  # and the clock with it
    save(tmp_path, "step2", 2, keep_last=4)
    save(tmp_path, "again3", 3, keep_last=3)
    assert sorted(os.listdir(tmp_path)) == ["again3", "latest", "step2", "step4"]
    save(tmp_path, "again4", 4, keep_last=3)
    assert sorted(os.listdir(tmp_path)) == ["again3", "again4", "latest", "step2"]


def test_checkpoints_of_older_versions_are_older(tmp_path: Path) -> None:
    for step in (7, 8):
        path = save(tmp_path, f"step{step}", step)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["sequence"] = "?" if step == 7 else None
        (path / "manifest.json").write_text(json.dumps(manifest))
    save(tmp_path, "new3", 3, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "new3", "step8"]


def test_keep_last_spares_what_has_another_name(tmp_path: Path) -> None:
    """Renamed and linked folders, also where names went round in a circle."""
    elsewhere = tmp_path / "elsewhere"
    root = tmp_path / "root"
    for number in range(4):
        save(root, f"mine{number}", number)
    save(elsewhere, "mine9", 9)
    (root / "mine0").rename(root / "mine0.bak")
    (root / "mine9").symlink_to(elsewhere / "mine9")
    (root / "mine1").rename(root / "kept")
    (root / "mine2").rename(root / "mine1")
    save(root, "mine4", 4, keep_last=1)
    assert sorted(os.listdir(root)) == ["kept", "latest", "mine0.bak", "mine1", "mine4", "mine9"]
    assert number_in(elsewhere / "mine9") == 9


def test_hidden_folders_of_others_are_not_drafts(tmp_path: Path) -> None:
    mine = tmp_path / f"{folder_module.DRAFT}notes"
    mine.mkdir()
    (mine / "text").write_text("mine")
    os.utime(mine, (0, 0))
    save(tmp_path, "a", 1)
    assert (mine / "text").read_text() == "mine"


def test_all_are_removed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for number in range(3):
        save(root, str(number), number)
    (root / "1" / "state.json").unlink()
    (root / "2" / "notes.txt").write_text("mine")
    (root / "3").mkdir()
    folder_module.remove_all(root)
    assert sorted(path.relative_to(root).as_posix() for path in root.rglob("*")) == ["2", "2/notes.txt", "3"]
    shutil.rmtree(root)
    save(root, "a", 1)
    folder_module.remove_all(root)
    assert not root.exists()
    folder_module.remove_all(root)


# -- what others wrote --------------------------------------------------------


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "tokenizer.json").write_text("mine")


def put_manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"format": "theirs", "files": {}}')


@pytest.mark.parametrize(
    "lay",
    [
        put_folder,
        put_manifest,
        lambda path: path.write_text("mine"),
        lambda path: path.symlink_to("elsewhere"),
        lambda path: path.symlink_to("nothing"),
    ],
    ids=["folder", "manifest", "file", "link", "dangling"],
)
def test_nothing_else_of_that_name_is_replaced(lay: Callable[[Path], Any], tmp_path: Path) -> None:
    root, path = tmp_path / "root", tmp_path / "root" / "best"
    save(root, "elsewhere", 1)
    lay(path)
    before = sorted((each.name, each.is_symlink()) for each in root.rglob("*"))
    with pytest.raises(CheckpointError, match=r"best is not a checkpoint of longshore .* choose another tag, or move"):
        save(root, "best", 2)
    assert sorted((each.name, each.is_symlink()) for each in root.rglob("*")) == before
    assert load(root, "elsewhere") == 1


def test_what_comes_to_that_name_while_a_checkpoint_is_written_stays(tmp_path: Path) -> None:
    draft = Draft(tmp_path, "a")
    put_folder(tmp_path / "a")
    with pytest.raises(CheckpointError, match="a is not a checkpoint of longshore"):
        draft.commit([], {}, True)
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "mine"


@pytest.mark.parametrize("links", [True, False])
def test_what_others_put_into_a_checkpoint_is_in_the_next_of_that_tag(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, "a", 1)
    put_folder(path / "tokenizer")
    (path / "notes.txt").write_text("mine")
    (path / "link").symlink_to("notes.txt")
    if not links:

        def refuse(*arguments: Any, **options: Any) -> None:
            raise PermissionError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)
    for number in (2, 3):
        save(tmp_path, "a", number)
        assert load(tmp_path) == number and hidden(tmp_path) == []
        assert (path / "tokenizer" / "tokenizer.json").read_text() == (path / "notes.txt").read_text() == "mine"
        assert (path / "link").is_symlink()
    (path / "optimizer-00000-of-00001.safetensors").write_text("mine")
    draft = Draft(tmp_path, "a")
    (draft.path / "optimizer-00000-of-00001.safetensors").write_text("new")
    with pytest.raises(CheckpointError, match="has a file of that name: move it away, or choose another tag"):
        draft.commit([], {}, True)


def test_keep_last_of_one_tag(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path, "same", number, keep_last=1)
        assert sorted(os.listdir(tmp_path)) == ["latest", "same"] and load(tmp_path) == number


# -- several processes --------------------------------------------------------


def _many(root: Path, first: int, tags: list[str], rounds: int, pipe: Any) -> None:
    try:
        for number in range(first, first + rounds):
            save(root, tags[number % len(tags)], number, run=str(first))
        pipe.send(None)
    except BaseException as error:
        pipe.send(repr(error))


def check_many(root: Path, tags: list[list[str]], rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    processes = []
    for place, own in enumerate(tags):
        mine, theirs = context.Pipe()
        process = context.Process(target=_many, args=(root, place * 10_000, own, rounds, theirs))
        process.start()
        processes.append((process, mine))
    for process, pipe in processes:
        assert pipe.poll(200) and pipe.recv() is None
        process.join()
    expected = {tag for own in tags for tag in own}
    assert {path.name for path in root.iterdir()} == {*expected, "latest"}
    assert all(load(root, tag) is not None for tag in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(root) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "tags",
    [
        pytest.param([["a"], ["b"]], marks=pytest.mark.full),
        pytest.param([["a"], ["a"]], marks=pytest.mark.full),
        [["a", "b"], ["b", "a", "c"], ["a"]],
    ],
)
def test_processes_that_save_into_one_folder(tags: list[list[str]], tmp_path: Path) -> None:
    check_many(tmp_path, tags, 150)


def test_a_name_that_another_process_takes_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "a", 1)
    other = save(tmp_path / "elsewhere", "a", 5)
    times: list[Path] = []
    synced = folder_module.sync_folder

    def sync(path: Path) -> None:
        if not (tmp_path / "a").exists() and len(times) < 5:
            times.append(shutil.copytree(other, tmp_path / "a"))
        synced(path)

    monkeypatch.setattr(folder_module, "sync_folder", sync)
    save(tmp_path, "a", 2)
    assert len(times) == 5 and load(tmp_path, "a") == 2 and hidden(tmp_path) == []


def test_a_checkpoint_that_another_process_replaces_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "a", 1)
    other = save(tmp_path / "elsewhere", "a", 5)
    read, calls = folder_module.read_json, list[Path]()

    def replaced(path: Path) -> Any:
        calls.append(path)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "a")
            other.rename(tmp_path / "a")
            raise CheckpointError("gone")
        return read(path)

    monkeypatch.setattr(folder_module, "read_json", replaced)
    save(tmp_path, "a", 2)
    assert len(calls) > 1 and load(tmp_path, "a") == 2


@pytest.mark.slow
def test_two_processes_that_save_the_same_tag(tmp_path: Path) -> None:
    check_many(tmp_path, [["a", "b"], ["a"]], 15)


# -- disks that refuse --------------------------------------------------------


class FullFile(io.FileIO):
    """A file on a disk that is full from some write on."""

    left = 0

    def write(self, content: Any) -> int:
        FullFile.left -= 1
        if FullFile.left < 0:
            # As Linux has it: what fits is written, and the next write fails.
            if FullFile.left == -1 and len(content) > 1:
                return super().write(memoryview(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", self.name)
        return super().write(content)


@contextlib.contextmanager
def full_disk(writes: int) -> Iterator[None]:
    """The disk is full after so many writes into files, locks and folders included."""
    FullFile.left = writes
    real_open, real_write, real_mkdir = builtins.open, os.write, os.mkdir

    def opened(file: Any, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        if "x" not in mode or isinstance(file, int):
            return real_open(file, mode, buffering, **options)
        raw = FullFile(file, mode.replace("b", ""))
        if buffering == 0:
            return raw
        return io.BufferedWriter(raw) if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw), **options)

    def refused(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            FullFile.left -= 1
            if FullFile.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opened)
        patch.setattr(os, "write", refused(real_write))
        patch.setattr(os, "mkdir", refused(real_mkdir))
        yield


@pytest.mark.parametrize("tag", ["old", "new"])
def test_a_full_disk(tag: str, tmp_path: Path) -> None:
    save(tmp_path, "old", 1)
    for writes in range(1000):
        try:
            with full_disk(writes):
                save(tmp_path, tag, 2)
            break
        except CheckpointError as error:
            said = str(error)
        assert "No space left" in said, said
        assert hidden(tmp_path) == [], writes
        assert load(tmp_path, "old") in ((1, 2) if tag == "old" else (1,))
        assert load(tmp_path) is not None
    assert writes > 8 and load(tmp_path) == 2 and FullFile.left == 0


def test_a_small_disk(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96k", "longshore-test", str(root)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        saved, full = 0, False
        while not full:
            try:
                save(root, f"a{saved}", saved)
                saved += 1
            except CheckpointError as error:
                full = "No space left" in str(error)
                if not full:
                    raise
        assert saved > 0 and hidden(root) == []
        assert load(root) == saved - 1
        for number in range(saved):
            assert load(root, f"a{number}") == number
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "a", 1)

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(CheckpointError, match=r"Permission denied.*existing checkpoints are unchanged"):
            save(tmp_path, "b", 2)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(tmp_path / "new", "b", 2)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(file, "b", 2)
    with pytest.raises(CheckpointError, match="file is a file"):
        load(file)
    assert load(tmp_path) == 1


def test_a_folder_that_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    with pytest.raises(CheckpointError, match="is one checkpoint: give the folder that contains it, and its name"):
        load(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    (tmp_path / "latest").unlink()
    said = pytest.raises(CheckpointError, match=r"has no complete checkpoint: .*a has no manifest.json")
    with said, pytest.warns(UserWarning, match="manifest"):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    assert load(tmp_path / "empty") is None


# -- links --------------------------------------------------------------------


def test_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    for number in (1, 2):
        assert save(link, "a", number) == link / "a"
        assert load(link) == load(tmp_path / "real") == number
    assert link.is_symlink() and os.listdir(link) != []


def test_a_link_in_place_of_a_tag(tmp_path: Path) -> None:
    """Loaded; neither replaced nor pruned: what it points to is somebody's."""
    outside = save(tmp_path / "elsewhere", "a", 1)
    root = tmp_path / "root"
    save(root, "first", 0)
    (root / "a").symlink_to(outside)
    assert load(root, "a") == 1
    save(root, "second", 2)
    assert prune(root, 1, "run") == ["first"]
    assert (root / "a").is_symlink() and number_in(outside) == 1


def test_a_file_in_place_of_a_tag(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    assert [*candidates(tmp_path)] == []
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(tmp_path, "a")


@pytest.mark.parametrize("name", [TENSORS, "state.json", "manifest.json"])
def test_a_pipe_or_link_in_place_of_a_file(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, "a", 1) / name
    outside = tmp_path / "outside"
    path.rename(outside)
    for lay in (put_pipe, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        lay(path)
        with pytest.raises(CheckpointError, match=r"not a regular file|no checkpoint"):
            load(tmp_path, "a")
        path.rmdir() if path.is_dir() else path.unlink()
    if name != "manifest.json":
        path.symlink_to(outside)
        with pytest.raises(CheckpointError, match="not a regular file"):
            load(tmp_path, "a")
