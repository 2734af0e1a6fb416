"""The output of a run: its folder, metrics and loss curves.

Files are written atomically: under another name in the same folder, synced to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longshore.cli.terminal import USAGE, CommandError, one_line, os_reason

RUN = "run.json"
METRICS = "metrics.jsonl"
CURVE = "loss.png"
WEIGHTS = "model.safetensors"
CHECKPOINTS = "checkpoints"
_WRITING = ".writing"  # the folder in which files are written before they are moved

_MODEL_FILES = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json "
    "chat_template.jinja vocab.json merges.txt"
)
_OURS = (METRICS, CURVE, WEIGHTS, *_MODEL_FILES.split())
"""Files that an earlier run may have left. Nothing else is ever removed."""


def entries_of(out: Path) -> set[str]:
    """Return the names in ``--out``, which need not exist yet, if it can be written.

    Raises:
        CommandError: it is no folder, or nothing can be written there.
    """
    try:
        names = {entry.name for entry in out.iterdir()} if out.exists() else set()
    except NotADirectoryError as error:
        raise CommandError(f"--out {out} is not a folder: choose another", USAGE) from error
    except OSError as error:
        raise CommandError(f"cannot read --out {out}: {os_reason(error)}") from error
    there = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not there.is_dir():
        raise CommandError(f"--out {out} is below {there}, which is a file: choose another folder", USAGE)
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        why = "on a disk that is read-only" if read_only else "not yours to write to"
        raise CommandError(f"cannot write to --out {out}: {there} is {why}: choose another folder", USAGE)
    return names


class RunFolder:
    """The folder ``--out``, which must be new or empty, or, with ``overwrite`` or ``resume``, contain a run.

    Attributes:
        resumes: whether a run in it is continued.
    """

    def __init__(self, path: Path, overwrite: bool, resume: bool = False, or_begin: bool = False) -> None:
        """Check the folder without changing it. ``or_begin``: with ``resume``, there need not be a run yet."""
        self.path = path
        self._unlock: weakref.finalize[..., RunFolder] | None = None
        names = entries_of(path)
        self.resumes = resume and (_is_run(path / RUN) or not or_begin)
        if self.resumes and not _is_run(path / RUN):
            raise CommandError(
                f"--out {path} has no run to continue: leave --resume out to begin one (--resume auto does either)",
                USAGE,
            )
        if self.resumes or not names - {_WRITING}:
            return
        if not _is_run(path / RUN):
            raise CommandError(f"--out {path} is not empty and has no run of longshore: choose another folder", USAGE)
        if not overwrite:
            raise CommandError(
                f"--out {path} has a run already: choose another folder, or add --overwrite, or --resume", USAGE
            )

    def needs(self, path: Path) -> bool:
        """Return whether ``path`` is this folder, one of its parents, or a file that a run writes here."""
        own, path = self.path.resolve(), path.resolve()
        return path in (own, *own.parents) or (path.parent == own and path.name in (RUN, *_OURS))

    def open(self, run: dict[str, Any], weight_bytes: int) -> None:
        """Make the folder, remove an earlier run's files, and write ``run.json``, before any training.

        No other run can open the folder until :meth:`close`, or the end of this process.
        """
        try:
            self._make(weight_bytes)
            self.write_run(run)
        except BaseException:
            self.close()
            raise

    def _make(self, weight_bytes: int) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            former = self.path / WEIGHTS
            free = shutil.disk_usage(self.path).free + (former.stat().st_size if former.is_file() else 0)
            if free < weight_bytes:
                raise CommandError(
                    f"the weights take {weight_bytes} bytes, but the disk of --out {self.path} has only {free} left: "
                    f"free some, or choose another folder"
                )
            if not self.resumes:
                from longshore.seam import remove_all  # imports torch, and --help need not wait for it

                remove_all(self.path / CHECKPOINTS)
                for name in _OURS:
                    (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(self.path, error) from error

    def _lock(self) -> None:
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._unlock = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise CommandError(
                f"another run is writing to --out {self.path}: let it end or end it, or choose another folder", USAGE
            ) from error
        except OSError:  # some network file systems have no locks
            pass

    def close(self) -> None:
        """Unlock the folder for other runs."""
        if self._unlock is not None:
            self._unlock()  # once

    def write_run(self, run: dict[str, Any]) -> None:
        """Write ``run.json``: settings, versions and status. It marks the folder as a run of longshore."""
        self.write(RUN, (json.dumps(run, indent=2) + "\n").encode())

    def write(self, name: str, content: bytes) -> None:
        """Write one file atomically."""
        self.write_folder(lambda folder: (folder / name).write_bytes(content))

    def write_folder(self, save: Callable[[Path], object]) -> None:
        """Let ``save`` fill a folder, and move its files here when all of them are on the disk."""
        writing = self.path / _WRITING
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            save(writing)
            names = sorted(entry.name for entry in writing.iterdir())
            for name in names:
                # safetensors makes files that only the owner can read; the folder's mode has the user's umask.
                (writing / name).chmod(writing.stat().st_mode & 0o666)
                _fsync(writing / name)
            for name in names:
                os.replace(writing / name, self.path / name)
            _fsync(self.path)
        except OSError as error:
            raise self._unwritable(self.path, error) from error
        except Exception as error:
            if type(error).__name__ != "SafetensorError":  # how safetensors reports an OSError
                raise
            raise CommandError(f"cannot write to --out {self.path}: {one_line(error)}") from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)

    def former(self) -> dict[str, Any]:
        """Return ``run.json`` of the run that is here."""
        return json.loads((self.path / RUN).read_bytes())

    def metrics(self, until: int) -> MetricsFile:
        """Return a new metrics file; with ``until`` of 0 or more, one that keeps the present lines up to that step."""
        try:
            return MetricsFile(self.path / METRICS, until)
        except OSError as error:
            raise self._unwritable(self.path / METRICS, error) from error

    @staticmethod
    def _unwritable(path: Path, error: OSError) -> CommandError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return CommandError(
            f"cannot write to --out {path}: {os_reason(error)}; nothing is left half-written: "
            f"{'make room there or ' if full else ''}choose another folder"
        )


class MetricsFile:
    """A file of JSON lines, each written as a whole and at once.

    A disk that is full for a while must not end a training run: lines that cannot be written are kept in memory, the
    file ends with its last complete line, and the next ``write`` tries again. ``close`` raises if lines are left.
    """

    def __init__(self, path: Path, until: int) -> None:
        kept = _lines_until(path, until) if until >= 0 and path.is_file() else b""
        path.unlink(missing_ok=True)  # a link is not followed
        self._file = path.open("xb", buffering=0)
        self._path = path
        self._whole = self._file.write(kept)  # bytes of complete lines
        self._pending = b""
        self.failure: OSError | None = None

    def write(self, values: dict[str, Any]) -> None:
        self._pending += json.dumps(values, allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._flush()

    def close(self) -> None:
        """Write the rest, sync and close; a second call does nothing.

        Raises:
            CommandError: lines are left. The file is closed all the same.
        """
        if self._file.closed:
            return
        try:
            with self._file:
                self._flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise CommandError(
                f"cannot write {self._path}: {os_reason(error)}; it ends early, with its last complete line"
            ) from error

    def _flush(self) -> None:
        self.failure = None
        try:
            while self._pending:
                written = self._file.write(self._pending)
                self._pending = self._pending[written:]
                self._whole += written
        except OSError as error:
            # End the file with its last complete line, since a write may have stopped in the middle of one.
            content = self._path.read_bytes()[: self._whole]
            self._whole = content.rfind(b"\n") + 1
            self._pending = content[self._whole :] + self._pending
            os.ftruncate(self._file.fileno(), self._whole)
            self._file.seek(self._whole)
            self.failure = error
            raise


def save_file(path: Path, save: Callable[[Path], object], option: str) -> None:
    """Let ``save`` write the file ``path`` atomically, in any folder, which is made if there is none. An error names
    ``option``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder that nobody else can write into: a link in place of the file would be followed.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.writing-", dir=path.parent) as folder:
            beside = Path(folder) / path.name
            save(beside)
            _fsync(beside)
            os.replace(beside, path)
    except OSError as error:
        raise CommandError(f"cannot write {option} {path}: {os_reason(error)}") from error


def check_writable(path: Path, option: str) -> None:
    """Raise now the error that ``save_file`` would raise at the end."""
    if path.is_dir():
        raise CommandError(f"{option} {path} is a folder: give the name of a file", USAGE)
    folder = next(each for each in path.parents if each.exists() or each == each.parent)
    if not folder.is_dir():
        raise CommandError(f"{option} {path}: {folder} is not a folder: choose another", USAGE)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.writing-", dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"cannot write {option} {path}: {os_reason(error)}") from error


def _lines_until(path: Path, step: int) -> bytes:
    """Return the complete lines of a metrics file up to ``step``."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # an incomplete line of a process that was killed
    return b"".join(kept)


def _is_run(path: Path) -> bool:
    try:
        return "longshore" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
