"""A folder of checkpoints, each of which has a tag and is written atomically.

A checkpoint is written and synced under another name, and then renamed. Its manifest, the list of its files with their
sizes and checksums, is written last. ``latest`` names the newest tag. Files of longshore are replaced and removed, and
never those of others beside them; a folder of another library's checkpoints is told from one without any, so that no
run begins afresh beside them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Mapping, Sequence, Set
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
from longshore.errors import CheckpointError

FORMAT = "longshore checkpoint"
MANIFEST = "manifest.json"
DRAFT, REPLACED = ".writing-", ".replaced-"
"""First letters of the names of folders that are being written, and of former checkpoints of a tag."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Errors of renaming a folder to a name that exists."""
_MOST_ATTEMPTS = 100

VERSION = 1
LATEST = "latest"
_LOCK = "lock"
_STALE_S = 7 * 24 * 3600.0
_LONGEST_TAG = 200

Candidate = tuple[Path, CheckpointError | None]
"""The folder of a checkpoint, and the reason why it cannot be loaded, if there is one."""

_DEEPSPEEDS = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")

_LONGEST_LATEST = 4096
_TORCHS = ".metadata"
"""File of a checkpoint of ``torch.distributed.checkpoint``, beside which are files ``*.distcp``."""


def tag_of(path: Path) -> str:
    """Return the tag of a checkpoint's folder, also of one that was being replaced."""
    name = path.name
    return name[len(REPLACED) :].rpartition("-")[0] if name.startswith(REPLACED) else name


def listed_in(path: Path) -> set[str]:
    """Return the names of a checkpoint's own files, which may be missing or damaged. Raises CheckpointError if the
    folder has no manifest that names them."""
    where = str(path / MANIFEST)
    manifest = checked(read_json(path / MANIFEST), dict, where)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a {FORMAT}")
    return {MANIFEST, *filter(is_file_name, checked_entry(manifest, "files", dict, where))}


def others_in(path: Path) -> list[str]:
    """Return the names of the files of others in a checkpoint's folder; ``path`` may also be free, or an empty folder.

    Raises:
        CheckpointError: ``path`` is anything else, which a checkpoint of that name would delete.
    """
    reason = "it is a file or a link"
    before = None
    while (now := _inode_of(path)) != before:  # again, where another process replaced it in between
        before = now
        if path.is_dir() and not path.is_symlink():
            try:
                names = set(os.listdir(path))
                return sorted(names - listed_in(path)) if names else []
            except (CheckpointError, OSError) as error:
                reason = str(error)
    if before is None:
        return []
    raise CheckpointError(
        f"{path} is not a checkpoint of longshore ({reason}), and saving under this name would delete it: choose "
        "another tag, or move it away"
    )


def _inode_of(path: Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None  # there is nothing


def link_tree(source: Path, target: Path) -> None:
    """Make ``target`` the same as ``source``, by links if the file system has them."""
    if source.is_dir() and not source.is_symlink():
        target.mkdir()
        for entry in source.iterdir():
            link_tree(entry, target / entry.name)
        shutil.copystat(source, target)
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def take_name(folder: Path, target: Path, prefix: str) -> list[Path]:
    """Rename a folder to ``target``, even if another folder or a file has that name.

    Returns:
        The folders or files that had that name, which now have names that begin with ``prefix``.

    Raises:
        OSError: renaming failed; the former folder has its name again.
    """
    asides: list[Path] = []
    try:
        while True:
            try:
                os.rename(folder, target)
                return asides
            except OSError as error:
                # Another process may save under the same name in between, and so it may take several attempts.
                if error.errno not in _TAKEN or len(asides) == _MOST_ATTEMPTS:
                    raise
            aside = target.with_name(f"{prefix}-{secrets.token_hex(4)}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, aside)
                asides.append(aside)
                sync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            if asides and not os.path.lexists(target):
                os.rename(asides[-1], target)
        raise


def remove_own(path: Path, own: Set[str]) -> None:
    """Remove a checkpoint, whose files are ``own``; files of others in its folder stay there."""
    # A partly removed folder must not look like a checkpoint, so it is renamed, or loses its manifest, first.
    if own >= set(os.listdir(path)):
        aside = path.with_name(f"{DRAFT}{tag_of(path)}-{secrets.token_hex(4)}")
        os.rename(path, aside)
        remove(aside)
    else:
        for name in sorted(own, key=lambda name: name != MANIFEST):
            remove(path / name)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_replaced(path: Path, new: Path) -> None:
    """Remove a checkpoint that ``new`` has replaced: its files, and those that ``new`` has, too."""
    with contextlib.suppress(CheckpointError, OSError):  # what longshore did not write stays
        own = listed_in(path)
        for name in sorted(os.listdir(path), key=lambda name: name == MANIFEST):  # last: it says what the rest is
            if name in own or os.path.lexists(new / name):
                remove(path / name)
        path.rmdir()


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


def check_not_others(root: Path, tag: str | None) -> None:
    """Raise CheckpointError, with the way to load it, for a checkpoint of another library.

    Args:
        root: the folder of checkpoints, or of one checkpoint.
        tag: the checkpoint's tag; None: whichever is there.
    """
    check_not_deepspeeds(root, tag)
    for path in [root, *_folders_of_others(root)] if tag is None else [root / tag]:
        if _is_torchs(path):
            raise CheckpointError(
                f"{path} was written by torch.distributed.checkpoint: load it with its own load(), into "
                "get_state_dict() of the model and of an optimizer of longshore without an engine, having left out the "
                "masters that no checkpoint of torch.optim has; longshore.save() then writes what engines load, too "
                '(docs/from_fsdp2.md, "Checkpoints of torch.distributed.checkpoint", has the lines)'
            )


def is_deepspeed(source: Path, tag: str | None) -> bool:
    """Return whether DeepSpeed wrote the checkpoint with that tag (None: the one that ``latest`` names)."""
    try:
        folder = source / check_tag(_latest_in(source) if tag is None else tag)
        names = [path.name for path in folder.iterdir()]
    except (CheckpointError, ValueError, OSError):
        return False
    return any(map(_DEEPSPEEDS.fullmatch, names)) and not is_checkpoint(folder)


def _latest_in(source: Path) -> str:
    """Return the tag in ``latest``, around which there may be blanks."""
    with open_regular(source / LATEST) as file:
        return file.read(_LONGEST_LATEST).decode().strip()


def check_not_deepspeeds(root: Path, tag: str | None) -> None:
    """Raise CheckpointError for a checkpoint of DeepSpeed, so that a run that should resume does not start afresh.

    Args:
        root: the folder of checkpoints, or of one checkpoint.
        tag: the checkpoint's tag; None: the one that ``latest`` names.
    """
    if tag is None and is_deepspeed(root.parent, root.name):
        root, tag = root.parent, root.name
    if is_deepspeed(root, tag):
        tagged = "" if tag is None else f" --tag {tag}"
        raise CheckpointError(
            f"the checkpoint in {root} is DeepSpeed's; convert it once with `longshore import-deepspeed {root} --out "
            f"FOLDER{tagged}`, copy to FOLDER what transformers or Accelerate saved beside it (not the folder that was "
            "converted), and load FOLDER"
        )


def _folders_of_others(root: Path) -> list[Path]:
    """Return the folders in ``root``; none if one of them is a checkpoint of longshore's."""
    try:
        found = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return []
    return [] if any(map(is_checkpoint, found)) else found


def _is_torchs(path: Path) -> bool:
    return (path / _TORCHS).is_file() and next(path.glob("*.distcp"), None) is not None
