"""A folder of checkpoints, each of which has a tag and is written atomically.

A checkpoint is written and synced under another name, and then renamed. Its manifest, the list of its files with their
sizes and checksums, is written last. ``latest`` names the newest tag.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longshore.checkpoint.boxes import METADATA
from longshore.checkpoint.files import (
    WrittenFile,
    checked,
    checked_entry,
    digest_of,
    identity_of,
    is_file_name,
    open_regular,
    read_json,
    replace_file,
    sync_folder,
    write_json,
)
from longshore.checkpoint.replacing import (
    DRAFT,
    FORMAT,
    MANIFEST,
    REPLACED,
    link_tree,
    listed_in,
    others_in,
    remove,
    remove_own,
    remove_replaced,
    tag_of,
    take_name,
)
from longshore.errors import CheckpointError

VERSION = 1
LATEST = "latest"
_LOCK = "lock"
_STALE_S = 7 * 24 * 3600.0
_LONGEST_TAG = 200

Candidate = tuple[Path, CheckpointError | None]
"""The folder of a checkpoint, and the reason why it cannot be loaded, if there is one."""


def check_tag(tag: object) -> str:
    """Return ``tag`` if it is valid: the name of a folder.

    Raises:
        ValueError: it is not text, or is empty, hidden, too long, or a path.
    """
    if not isinstance(tag, str):
        raise ValueError(f"a tag must be text, not {type(tag).__name__}")
    bad = not tag or tag.startswith(".") or len(tag.encode(errors="replace")) > _LONGEST_TAG or tag == LATEST
    if bad or tag.strip() != tag or any(letter in "/\\" or not letter.isprintable() for letter in tag):
        raise ValueError(
            f"{tag!r} is not a valid tag: use a name for a folder, without / or \\, that does not begin with a dot, of "
            f"at most {_LONGEST_TAG} bytes"
        )
    return tag


def check_keep_last(keep_last: object) -> None:
    """Raise ValueError unless ``keep_last`` is None or a number of checkpoints: fewer than one cannot stay."""
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"keep_last is the number of checkpoints that stay, at least 1, not {keep_last!r:.60}")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint (possibly damaged) rather than a folder of checkpoints."""
    return any((path / name).is_file() for name in (MANIFEST, METADATA))


class WholeCheckpoint:
    """A complete checkpoint: it has a manifest, and all files in the sizes that the manifest lists.

    Args:
        path: its folder.

    Raises:
        CheckpointError: the checkpoint is incomplete; the message names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tag = path.name
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}")
        where = str(path / MANIFEST)
        self.manifest = checked(read_json(path / MANIFEST), dict, where)
        if self.manifest.get("format") != FORMAT:
            raise CheckpointError(f"{where} is not the manifest of a {FORMAT}")
        if self.manifest.get("version") != VERSION:
            raise CheckpointError(
                f"{where} is of version {self.manifest.get('version')!r} of the format, and this longshore reads "
                f"version {VERSION}; use the longshore that wrote it, or a newer one"
            )
        self.step: int = self.entry("step", int, -1)
        self.created_ns: int = self.entry("created_ns", int, -1)
        self.run: str | None = self.entry("run", str)
        self.files: dict[str, WrittenFile] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        for name, listed in checked_entry(self.manifest, "files", dict, where).items():
            if not is_file_name(name) or name == MANIFEST:
                raise CheckpointError(f"{where} lists {name!r}, which is not a valid file name")
            num_bytes = checked_entry(listed, "bytes", int, f"{where}: {name}")
            self.files[name] = WrittenFile(name, num_bytes, checked_entry(listed, "sha256", str, f"{where}: {name}"))
            self._seen[name] = self._check_size(path / name, num_bytes)

    @staticmethod
    def _check_size(file: Path, num_bytes: int) -> tuple[int, ...]:
        try:
            found = os.lstat(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file} is not a regular file")
        if found.st_size != num_bytes:
            raise CheckpointError(f"{file} has {found.st_size} bytes, and its manifest says {num_bytes}: it is damaged")
        return identity_of(found)

    def entry(self, key: str, kind: type, otherwise: Any = None) -> Any:
        """Return an entry of the manifest; ``otherwise`` if there is no entry of type ``kind``."""
        value = self.manifest.get(key)
        return value if type(value) is kind else otherwise

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read files (None: all) and compare their checksums. Raises CheckpointError for the first damaged
        one."""
        for name in self.files if names is None else names:
            written = self.files[name]
            if digest_of(self.path / name) != written.sha256:
                raise CheckpointError(f"{self.path / name} is damaged: its checksum is not the one in {MANIFEST}")

    def check_unchanged(self) -> None:
        """Check that files read since :meth:`verify` belong to this checkpoint.

        Raises:
            CheckpointError: the checkpoint was replaced or removed, or its files were written in place.
        """
        try:
            same = read_json(self.path / MANIFEST) == self.manifest and all(map(self._is_unchanged, self.files))
        except (CheckpointError, OSError):
            same = False
        if not same:
            raise CheckpointError(
                f"{self.path} was replaced or removed by another process while it was read, or its files were written: "
                "try again"
            )

    def _is_unchanged(self, name: str) -> bool:
        with open_regular(self.path / name) as file:  # a network file system asks anew for times of what is opened
            *now, changed = identity_of(os.fstat(file.fileno()))
        *before, first_changed = self._seen[name]
        # Whoever links to the file, as backups do, changes the last time alone.
        return now == before and (changed == first_changed or digest_of(self.path / name) == self.files[name].sha256)


class Draft:
    """A checkpoint that is being written, in a folder of another name.

    One process makes the draft, all processes write into it, and the one that made it calls :meth:`commit` or
    :meth:`discard`.

    Args:
        root: the folder of checkpoints, made if it does not exist.
        tag: the name that the checkpoint will have in it.

    Raises:
        ValueError: ``tag`` is not a valid tag.
        CheckpointError: something else than a checkpoint has that name.
        OSError: the folder cannot be written.
    """

    def __init__(self, root: Path, tag: str) -> None:
        self.root = root
        self.tag = check_tag(tag)
        others_in(root / tag)  # before anything is written
        self.path = root / f"{DRAFT}{tag}-{secrets.token_hex(4)}"
        self._lock: int | None = None
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        self.path.mkdir()
        try:
            # The lock lasts as long as this process, so that others can tell whether the folder is abandoned.
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Written last: a process that reads its own host's name takes a lock that is free, and removes the folder.
            os.write(self._lock, socket.gethostname().encode())
        except BaseException:
            self.discard()
            raise

    def commit(self, files: Iterable[WrittenFile], about: Mapping[str, Any], latest: bool) -> None:
        """Rename the checkpoint to its tag, once all files are written. A former checkpoint of that tag is replaced.

        Args:
            files: all files.
            about: more entries of the manifest.
            latest: whether the file ``latest`` is to name the checkpoint.

        Files that others put into the former checkpoint's folder are in the new one, too.

        Raises:
            CheckpointError: a file is missing, or has another size; or something else than a checkpoint has the name.
            OSError: the disk failed.
        """
        listed = {written.name: {"bytes": written.num_bytes, "sha256": written.sha256} for written in files}
        head = {
            "format": FORMAT,
            "version": VERSION,
            "tag": self.tag,
            "created_ns": time.time_ns(),
            "sequence": 1 + max(map(_sequence_of, _folders(self.root)), default=-1),
            "latest": latest,
        }
        write_json(self.path / MANIFEST, {**head, **about, "files": listed})
        # Removed while locked: a process that had opened it could otherwise take the lock, and remove the folder.
        (self.path / _LOCK).unlink()
        WholeCheckpoint(self.path)  # raises, for example, if a rank wrote into the folder of another machine
        self._carry_over()
        sync_folder(self.path)
        asides = take_name(self.path, self.root / self.tag, f"{REPLACED}{self.tag}")
        self._unlock()
        try:
            sync_folder(self.root)
            if latest:
                write_latest(self.root, self.tag)
        finally:
            for aside in asides:
                remove_replaced(aside, self.root / self.tag)

    def _carry_over(self) -> None:
        """Link the files of others in the former checkpoint's folder: a tokenizer, for example."""
        former = self.root / self.tag
        for name in others_in(former):
            if os.path.lexists(self.path / name):
                raise CheckpointError(
                    f"{former / name} was not written by longshore, and the new checkpoint has a file of that name: "
                    "move it away, or choose another tag"
                )
            link_tree(former / name, self.path / name)

    def discard(self) -> None:
        """Remove the draft."""
        self._unlock()
        remove(self.path)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_latest(root: Path) -> None:
    """Raise CheckpointError if a folder has the name of the file ``latest``, which :func:`write_latest` replaces."""
    path = root / LATEST
    if path.is_dir() and not path.is_symlink():
        raise CheckpointError(
            f"{path} is a folder, and the file that names the newest checkpoint needs that name: move the folder away, "
            "or save into another folder. Nothing was written"
        )


def write_latest(root: Path, tag: str) -> None:
    """Write ``tag`` into the file ``latest``, atomically. Raises OSError if the disk fails."""
    replace_file(root / LATEST, (tag + "\n").encode())


def read_latest(root: Path) -> str | None:
    """Return the tag that ``latest`` names; None: the file is missing, or has no valid tag."""
    try:
        with open_regular(root / LATEST) as file:
            text = file.read(4 * _LONGEST_TAG)
        return check_tag(text.decode().rstrip("\n"))
    except (OSError, ValueError, CheckpointError):
        return None


def candidates(root: Path) -> list[Candidate]:
    """Return a folder's checkpoints in the order in which to resume from them: the one that ``latest`` names, then the
    newest first, by its steps. An incomplete one comes with its error. Checksums are not verified."""
    latest = read_latest(root)
    found = []
    for path in _folders(root):
        named = tag_of(path) == latest
        try:
            whole = WholeCheckpoint(path)
            # The clock may have been set back. Older versions wrote no sequence.
            age = (whole.step, whole.entry("sequence", int, -1), whole.created_ns)
            found.append((named, age, path, None))
        except CheckpointError as error:
            if not path.name.startswith(REPLACED):
                found.append((named, (-1, -1, -1), path, error))
    found.sort(key=lambda entry: entry[:2], reverse=True)
    if latest is not None and not any(named for named, *_ in found):
        error = CheckpointError(f"there is no checkpoint {root / latest}, which {root / LATEST} names")
        found.insert(0, (True, (-1, -1, -1), root / latest, error))
    return [(path, error) for _, _, path, error in found]


def of_tag(found: Sequence[Candidate], root: Path, tag: str) -> list[Candidate]:
    """Return the candidates with a tag. If there are none, raise CheckpointError with the complete checkpoints."""
    mine = [each for each in found if tag_of(each[0]) == tag]
    if not mine:
        others = ", ".join([tag_of(path) for path, error in found if error is None][:5])
        raise CheckpointError(f"there is no checkpoint {root / tag}{f'; there are {others}' if others else ''}")
    return mine


def _folders(root: Path) -> list[Path]:
    """Return the folders of checkpoints: those with a tag, and those being replaced when the process ended."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return []
    found = [path for path in entries if not path.name.startswith(".") and (path / MANIFEST).is_file()]
    names = {path.name for path in found}
    replaced = [path for path in entries if path.name.startswith(REPLACED)]
    return [*found, *(path for path in replaced if tag_of(path) not in names)]


def _sequence_of(path: Path) -> int:
    """Return how many checkpoints were written to the folder before this one; -1: it does not say."""
    try:
        return checked_entry(read_json(path / MANIFEST), "sequence", int, str(path / MANIFEST))
    except CheckpointError:
        return -1


def prune(root: Path, keep_last: int, run: str) -> list[str]:
    """Remove one run's complete checkpoints except the ``keep_last`` that were written last, the one that ``latest``
    names, those saved with ``latest`` False, and copies under other names; return their tags.

    Files of others in their folders stay there.
    """
    latest, own = read_latest(root), []
    for path in _folders(root):
        with contextlib.suppress(CheckpointError):
            whole = WholeCheckpoint(path)
            copied = path.is_symlink() or whole.manifest.get("tag") != path.name
            if whole.run == run and not copied and whole.manifest.get("latest") is not False:
                own.append(whole)
    # The clock may have been set back, and the run to an earlier step. Older versions wrote no sequence.
    own.sort(key=lambda whole: (whole.entry("sequence", int, -1), whole.step, whole.created_ns))
    gone = [whole for whole in own[: max(0, len(own) - keep_last)] if whole.tag != latest]
    for whole in gone:
        with contextlib.suppress(FileNotFoundError):  # another process has renamed it
            remove_own(whole.path, {MANIFEST, *whole.files})
    return [whole.tag for whole in gone]


def remove_all(root: Path) -> None:
    """Remove all checkpoints of a folder, complete or not, and the folder if nothing else is in it."""
    _remove_stale(root)
    for path in _folders(root):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            remove_own(path, listed_in(path))
    (root / LATEST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        root.rmdir()


def _remove_stale(root: Path) -> None:
    """Remove drafts of processes that were killed."""
    for path in root.glob(f"{DRAFT}*-{'[0-9a-f]' * 8}"):
        if _abandoned(path):
            remove(path)
    for path in root.glob(f"{REPLACED}*"):
        if (root / tag_of(path) / MANIFEST).is_file():
            remove_replaced(path, root / tag_of(path))


def _abandoned(path: Path) -> bool:
    try:
        with open_regular(path / _LOCK, writable=True) as lock:
            if lock.read(256).decode(errors="replace") == socket.gethostname():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    except FileNotFoundError:
        pass  # the folder is about to be locked, or is being pruned or renamed
    except (OSError, CheckpointError):
        return False
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _STALE_S
    return False
