"""Replacing and removing checkpoints: files of longshore only, and never those of others beside them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Set
from pathlib import Path

from longshore.checkpoint.files import checked, checked_entry, is_file_name, read_json, sync_folder
from longshore.errors import CheckpointError

FORMAT = "longshore checkpoint"
MANIFEST = "manifest.json"
DRAFT, REPLACED = ".writing-", ".replaced-"
"""First letters of the names of folders that are being written, and of former checkpoints of a tag."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Errors of renaming a folder to a name that exists."""
_MOST_ATTEMPTS = 100


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
