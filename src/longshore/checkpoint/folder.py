"""A folder with checkpoints by tag: each of them is whole, or it is not there.

A checkpoint is written under another name, on the disk before it gets its own, and its manifest, the list of its files
with their sizes and checksums, is written last. ``latest`` says which tag is the newest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from longshore.checkpoint.reading import checked, digest_of, is_file_name, open_regular, read_json
from longshore.checkpoint.tensor_file import WrittenFile, write_json
from longshore.errors import CheckpointError

FORMAT = "longshore checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
_DRAFT, _REPLACED = ".writing-", ".replaced-"
_LOCK = "lock"
_STALE_S = 7 * 24 * 3600.0
_LONGEST_TAG = 200
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""How renaming a folder fails where the name is taken."""
_MOST_ATTEMPTS = 100


def check_tag(tag: object) -> str:
    """A tag is a name of a folder, and no more.

    Raises:
        ValueError: it is no text, empty, hidden, too long, or a path.
    """
    if not isinstance(tag, str):
        raise ValueError(f"a tag is text, not {type(tag).__name__}")
    bad = not tag or tag.startswith(".") or len(tag.encode(errors="replace")) > _LONGEST_TAG or tag == LATEST
    if bad or tag.strip() != tag or any(letter in "/\\" or not letter.isprintable() for letter in tag):
        raise ValueError(
            f"{tag!r} is no tag: a name for a folder, without / or \\, that does not begin with a dot, of at most "
            f"{_LONGEST_TAG} bytes"
        )
    return tag


class WholeCheckpoint:
    """A checkpoint that has a manifest, and all files that it lists in the sizes that it lists.

    Args:
        path: its folder.

    Raises:
        CheckpointError: it is not whole; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tag = path.name
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}")
        manifest = read_json(path / MANIFEST)
        where = str(path / MANIFEST)
        self.manifest = checked(manifest, dict, where)
        if self.manifest.get("format") != FORMAT:
            raise CheckpointError(f"{where} is no manifest of a {FORMAT}")
        if self.manifest.get("version") != VERSION:
            raise CheckpointError(
                f"{where} is of version {self.manifest.get('version')!r} of the format, and this longshore reads "
                f"version {VERSION}; use the longshore that wrote it, or a newer one"
            )
        self.files: dict[str, WrittenFile] = {}
        for name, entry in checked(self.manifest.get("files"), dict, f"{where}: files").items():
            self.files[name] = self._listed(name, entry, where)
        for written in self.files.values():
            self._check_size(written)

    @staticmethod
    def _listed(name: str, entry: Any, where: str) -> WrittenFile:
        if not is_file_name(name) or name == MANIFEST:
            raise CheckpointError(f"{where} lists {name!r}, which is no name of a file")
        entry = checked(entry, dict, f"{where}: {name}")
        num_bytes = checked(entry.get("bytes"), int, f"{where}: bytes of {name}")
        return WrittenFile(name, num_bytes, checked(entry.get("sha256"), str, f"{where}: sha256 of {name}"))

    def _check_size(self, written: WrittenFile) -> None:
        try:
            found = os.lstat(self.path / written.name)
        except OSError as error:
            raise CheckpointError(f"{self.path / written.name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{self.path / written.name} is no regular file")
        if found.st_size != written.num_bytes:
            raise CheckpointError(
                f"{self.path / written.name} has {found.st_size} bytes, and its manifest says {written.num_bytes}: it "
                "is damaged"
            )

    @property
    def step(self) -> int:
        step = self.manifest.get("step")
        return step if type(step) is int else -1

    @property
    def created_ns(self) -> int:
        created = self.manifest.get("created_ns")
        return created if type(created) is int else -1

    @property
    def run(self) -> str | None:
        return self.manifest.get("run")

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read files (None: all) and compare their checksums.

        Raises:
            CheckpointError: naming the first that is damaged.
        """
        for name in self.files if names is None else names:
            written = self.files[name]
            if digest_of(self.path / name) != written.sha256:
                raise CheckpointError(f"{self.path / name} is damaged: its checksum is not the one in {MANIFEST}")

    def check_unchanged(self) -> None:
        """What was read since :meth:`verify` is of this checkpoint.

        Raises:
            CheckpointError: another one has its name now, or it was removed.
        """
        try:
            same = read_json(self.path / MANIFEST) == self.manifest
        except CheckpointError:
            same = False
        if not same:
            raise CheckpointError(
                f"{self.path} was replaced or removed by another process while it was read: try again"
            )


class Draft:
    """A checkpoint on its way, in a folder of another name.

    One process makes it (:meth:`begin`), any write into it, and one (the same) ends it with
    :meth:`commit` or :meth:`discard`.
    """

    def __init__(self, root: Path, tag: str, path: Path) -> None:
        self.root = root
        self.tag = check_tag(tag)
        self.path = path
        self._lock: int | None = None

    @classmethod
    def begin(cls, root: Path, tag: str) -> Draft:
        """A new one. Raises OSError where the folder cannot be written."""
        check_tag(tag)
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        path = root / f"{_DRAFT}{tag}-{secrets.token_hex(4)}"
        path.mkdir()
        draft = cls(root, tag, path)
        try:
            # Held as long as this process lives: whoever finds the folder later can tell that nobody writes it.
            draft._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(draft._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Last: who reads it may take the lock, and then the folder is as good as gone.
            os.write(draft._lock, socket.gethostname().encode())
        except BaseException:
            draft.discard()
            raise
        return draft

    def commit(self, files: Iterable[WrittenFile], about: Mapping[str, Any], latest: bool) -> WholeCheckpoint:
        """All files are written: give the checkpoint its name. Where that is taken, the former one goes.

        Args:
            files: all of them.
            about: more entries of the manifest.
            latest: point to it.

        Raises:
            CheckpointError: a file is not there as it was written.
            OSError: the disk refuses.
        """
        listed = {written.name: {"bytes": written.num_bytes, "sha256": written.sha256} for written in files}
        head = {"format": FORMAT, "version": VERSION, "created_ns": time.time_ns(), "latest": latest}
        manifest = {**head, **about, "files": listed}
        write_json(self.path / MANIFEST, manifest)
        # Still locked: one who opened it before would take the lock now, and remove the folder.
        (self.path / _LOCK).unlink()
        whole = WholeCheckpoint(self.path)  # also that all ranks wrote into the same folder
        sync_folder(self.path)
        asides = self._take_name()
        self._unlock()
        try:
            sync_folder(self.root)
            if latest:
                write_latest(self.root, self.tag)
        finally:
            for aside in asides:
                _remove(aside)
        whole.path, whole.tag = self.root / self.tag, self.tag
        return whole

    def _take_name(self) -> list[Path]:
        """Rename to the tag; returns what had that name until then, under another."""
        target = self.root / self.tag
        asides: list[Path] = []
        try:
            while True:
                try:
                    os.rename(self.path, target)
                    return asides
                except OSError as error:
                    # Another process may save under the same name in between, and so it may take several attempts.
                    if error.errno not in _TAKEN or len(asides) == _MOST_ATTEMPTS:
                        raise
                aside = self.root / f"{_REPLACED}{self.tag}-{secrets.token_hex(4)}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(target, aside)
                    asides.append(aside)
                    sync_folder(self.root)
        except BaseException:
            with contextlib.suppress(OSError):
                if asides and not os.path.lexists(target):
                    os.rename(asides[-1], target)
            raise

    def discard(self) -> None:
        """Remove what was written."""
        self._unlock()
        _remove(self.path)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_latest(root: Path, tag: str) -> None:
    """Point to ``tag``, at once or not at all. Raises OSError."""
    beside = root / f".{LATEST}-{secrets.token_hex(4)}"
    try:
        with open(beside, "x") as file:
            file.write(tag + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, root / LATEST)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(root)


def read_latest(root: Path) -> str | None:
    """The tag that ``latest`` names; None: there is none, or nothing that could be one."""
    try:
        with open_regular(root / LATEST) as file:
            text = file.read(4 * _LONGEST_TAG)
        return check_tag(text.decode().rstrip("\n"))
    except (OSError, ValueError, CheckpointError):
        return None


def candidates(root: Path) -> Iterator[tuple[Path, CheckpointError | None]]:
    """Checkpoints of a folder, in the order in which one would resume from them, each with what is wrong with it:
    the one that ``latest`` names, then the newest first. Damage within files is not looked for."""
    latest = read_latest(root)
    found: list[tuple[tuple[int, int], Path, CheckpointError | None]] = []
    for path in _folders(root):
        try:
            whole = WholeCheckpoint(path)
            found.append(((whole.created_ns, whole.step), path, None))
        except CheckpointError as error:
            if path.name.startswith(_REPLACED):
                continue
            found.append(((-1, -1), path, error))
    found.sort(key=lambda entry: (tag_of(entry[1]) == latest, entry[0]), reverse=True)
    if latest is not None and not any(tag_of(path) == latest for _, path, _ in found):
        yield root / latest, CheckpointError(f"there is no checkpoint {root / latest}, which {root / LATEST} names")
    for _, path, error in found:
        yield path, error


def tag_of(path: Path) -> str:
    """Also of one that was on its way out."""
    name = path.name
    return name[len(_REPLACED) :].rpartition("-")[0] if name.startswith(_REPLACED) else name


def _folders(root: Path) -> list[Path]:
    """Of checkpoints: those with a tag, those that look like ones, and those that were on their way out when the
    process that replaced them ended."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return []
    found = [path for path in entries if not path.name.startswith(".") and (path / MANIFEST).is_file()]
    names = {path.name for path in found}
    replaced = [path for path in entries if path.name.startswith(_REPLACED)]
    return [*found, *(path for path in replaced if tag_of(path) not in names)]


def prune(root: Path, keep_last: int, run: str) -> list[str]:
    """Remove the oldest whole checkpoints of one run beyond the newest ``keep_last``, never the one that ``latest``
    names, and none that it was never to name; returns their tags."""
    latest, own = read_latest(root), []
    for path in _folders(root):
        with contextlib.suppress(CheckpointError):
            whole = WholeCheckpoint(path)
            apart = path.name.startswith(".") or whole.manifest.get("latest") is False
            if whole.run == run and not apart:
                own.append(whole)
    own.sort(key=lambda whole: (whole.created_ns, whole.step))
    gone = [whole.tag for whole in own[: max(0, len(own) - keep_last)] if whole.tag != latest]
    for tag in gone:
        # Under another name first: half of it must not look like one.
        aside = root / f"{_DRAFT}{tag}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):  # another process did it
            os.rename(root / tag, aside)
        _remove(aside)
    return gone


def sync_folder(path: Path) -> None:
    """The names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _remove_stale(root: Path) -> None:
    """What processes left that were killed while they wrote."""
    for path in root.glob(f"{_DRAFT}*"):
        if _abandoned(path):
            _remove(path)
    for path in root.glob(f"{_REPLACED}*"):
        if (root / tag_of(path) / MANIFEST).is_file():
            _remove(path)


def _abandoned(path: Path) -> bool:
    try:
        with open_regular(path / _LOCK, writable=True) as lock:
            if lock.read(256).decode(errors="replace") == socket.gethostname():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    except FileNotFoundError:
        pass  # about to be locked, or being pruned, or given its name
    except (OSError, CheckpointError):
        return False
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _STALE_S
    return False
