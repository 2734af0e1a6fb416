"""``--out``: what is accepted, what is replaced, and what is left on a disk that is full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore.cli.output import MetricsFile, RunFolder, check_writable, save_file
from longshore.cli.terminal import CommandError


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 200 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """Leaves no byte free."""
    path = folder / "ballast"
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return path


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class TestFolder:
    def test_new_with_parents_and_empty(self, train, tmp_path):
        assert train("--out", tmp_path / "a" / "b").code == 0
        (tmp_path / "empty").mkdir()
        assert train("--out", tmp_path / "empty").code == 0

    def test_a_strangers_folder(self, train, tmp_path):
        """Not even with --overwrite."""
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "thesis.tex").write_text("years of work")
        for options in ([], ["--overwrite"]):
            refused = train("--out", tmp_path / "theirs", *options).refused()
            assert "is not empty and has no run of longshore: choose another folder" in refused
        assert [entry.name for entry in (tmp_path / "theirs").iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}"])
    def test_a_run_json_of_someone_else(self, train, tmp_path, content):
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "run.json").write_text(content)
        assert "has no run of longshore" in train("--out", tmp_path / "theirs", "--overwrite").refused()

    def test_a_former_run(self, train, tmp_path, results):
        run = results(tmp_path / "run")
        assert train("--out", run.folder, "--log-every", "1").code == 0
        (run.folder / "notes").write_text("mine")
        before = {entry.name: entry.read_bytes() for entry in run.folder.iterdir()}
        refused = train("--out", run.folder, "--seed", "1").refused()
        assert "has a run already: choose another folder, or add --overwrite" in refused
        assert {entry.name: entry.read_bytes() for entry in run.folder.iterdir()} == before
        assert train("--out", run.folder, "--seed", "1", "--overwrite").code == 0
        assert run.names == set(before)
        assert (run.folder / "notes").read_text() == "mine"
        assert (run.folder / "model.safetensors").read_bytes() != before["model.safetensors"]
        assert len(run.metrics("train")) == 1

    def test_a_killed_run_is_a_former_run(self, train, tmp_path):
        """Also when it was killed while the first file was being written."""
        (tmp_path / "early" / ".writing").mkdir(parents=True)
        (tmp_path / "early" / ".writing" / "run.json").write_text("{")
        assert train("--out", tmp_path / "early").code == 0
        (tmp_path / "early" / ".writing").mkdir()
        (tmp_path / "early" / ".writing" / "model.safetensors").write_text("part")
        assert "add --overwrite" in train("--out", tmp_path / "early").refused()
        assert train("--out", tmp_path / "early", "--overwrite").code == 0
        assert not (tmp_path / "early" / ".writing").exists()

    def test_an_overwritten_run_leaves_no_old_weights(self, train, tmp_path, monkeypatch, results):
        """A new run that dies must not stand beside the weights of the old one."""
        assert train("--out", tmp_path / "run").code == 0
        monkeypatch.setattr("longshore.cli.job.Loop.run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("--out", tmp_path / "run", "--overwrite")
        assert results(tmp_path / "run").names == {"run.json", "metrics.jsonl"}

    def test_a_file(self, train, tmp_path):
        (tmp_path / "file").touch()
        assert "is not a folder: choose another" in train("--out", tmp_path / "file").refused()

    def test_below_a_file(self, train, tmp_path):
        (tmp_path / "file").touch()
        assert f"below {tmp_path / 'file'}, which is a file" in train("--out", tmp_path / "file" / "run").refused()

    def test_unwritable(self, train, tmp_path, monkeypatch):
        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
        monkeypatch.setattr("longshore.cli.job.Loop.run", lambda *_: pytest.fail("trained"))
        assert "cannot write to --out" in (refused := train("--out", tmp_path / "run").refused())
        assert "Permission denied" in refused

    def test_read_only(self, train, small_disk, monkeypatch):
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        monkeypatch.setattr("longshore.cli.job.Loop.run", lambda *_: pytest.fail("trained"))
        assert "on a disk that is read-only" in train("--out", small_disk / "run").refused()


class TestFullDisk:
    def test_weights_that_will_not_fit_are_refused_at_the_start(self, train, small_disk, monkeypatch):
        monkeypatch.setattr("longshore.cli.job.Loop.run", lambda *_: pytest.fail("trained"))
        refused = train("--hidden-size", "64", "--layers", "2", "--out", small_disk / "run").refused()
        assert "the weights take" in refused and "free some, or choose another folder" in refused
        assert not list((small_disk / "run").iterdir())

    def test_a_disk_that_is_full_already(self, train, small_disk, monkeypatch):
        monkeypatch.setattr("longshore.cli.job.Loop.run", lambda *_: pytest.fail("trained"))
        fill(small_disk)
        assert "--out" in train("--out", small_disk / "run").refused()

    def test_a_disk_that_fills_up_during_training(self, train, small_disk, monkeypatch, results):
        from longshore.cli.job import RunLog

        log = RunLog._log

        def log_and_fill(run_log, step):
            log(run_log, step)
            fill(small_disk)

        monkeypatch.setattr(RunLog, "_log", log_and_fill)
        ran = train("--out", small_disk / "run", "--log-every", "1", "--steps", "40")
        assert ran.code == 1
        first, last = ran.err.splitlines()
        assert "cannot write the metrics now (No space left on device); training goes on and tries again" in first
        assert "cannot write to --out" in last and "nothing is left half-written" in last
        run = results(small_disk / "run")
        assert run.names == {"run.json", "metrics.jsonl"}
        assert run.run["status"] == "running"
        assert 1 <= len(run.metrics("train")) < 40  # every line that is there parses
        assert (run.folder / "metrics.jsonl").read_bytes().endswith(b"\n")

    def test_a_disk_that_is_full_for_a_while(self, train, small_disk, monkeypatch, results):
        from longshore.cli.job import RunLog

        log = RunLog._log

        def log_between(run_log, step):
            if step.step == 2:
                fill(small_disk)
            log(run_log, step)
            if step.step == 30:
                (small_disk / "ballast").unlink()

        monkeypatch.setattr(RunLog, "_log", log_between)
        ran = train("--out", small_disk / "run", "--log-every", "1", "--steps", "40")
        assert ran.code == 0
        assert "cannot write the metrics now" in ran.err
        assert [record["step"] for record in results(small_disk / "run").metrics("train")] == list(range(1, 41))

    @pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
    def test_while_the_weights_are_written(self, train, tmp_path, monkeypatch, results, moment):
        """Without root, too."""
        monkeypatch.setattr("longshore.cli.job.model.save_model", lambda *_: monkeypatch.setattr(moment, full))
        ran = train("--out", tmp_path / "run")
        assert ran.code == 1
        assert "the disk is full; nothing is left half-written" in ran.refused()
        assert results(tmp_path / "run").names == {"run.json", "metrics.jsonl"}

    def test_weights_for_which_there_is_room_again(self, train, trained, tmp_path, monkeypatch, results):
        from longshore.cli import model

        save, moments = model.save_model, []

        def save_later(*arguments: object) -> None:
            moments.append(arguments)
            full() if len(moments) == 1 else save(*arguments)

        whole = trained()
        monkeypatch.setattr("longshore.cli.job.model.save_model", save_later)
        ran = train("--out", tmp_path / "run")
        assert (ran.code, ran.err, len(moments)) == (0, "", 2)
        assert not results(tmp_path / "run").differing(whole)

    @pytest.mark.quick(0)
    @pytest.mark.parametrize("options", [[], ["--stage", "0"]], ids=["optimizer", "engine"])
    @pytest.mark.parametrize("attempts", [{1}, {3}], ids=["a checkpoint", "the last checkpoint"])
    def test_a_checkpoint_that_cannot_be_written(
        self, options, attempts, train, trained, tmp_path, monkeypatch, results
    ):
        from longshore.checkpoint import saving

        write, made = saving.write_boxes, []

        def write_or_not(*arguments: object):
            made.append(arguments)
            return full() if len(made) in attempts else write(*arguments)

        whole = trained("--steps", "5", *options)
        monkeypatch.setattr(saving, "write_boxes", write_or_not)
        run = ["--out", tmp_path / "run", "--save-every", "2", "--steps", "5", *options]
        ran = train(*run)
        assert ran.code == int(attempts == {3})
        assert "No space left on device" in ran.err and "training goes on, and the next checkpoint is tried" in ran.err
        kept = results(tmp_path / "run")
        assert not kept.differing(whole)
        assert kept.run["status"] == "finished"
        assert len(made) == 3
        if ran.code:
            assert "step 5 has no checkpoint, and the newest one is of step 4" in ran.err
        assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step{4 if ran.code else 5}\n"
        if ran.code:
            assert train(*run, "--resume").code == 0
            assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step5\n"

    def test_safetensors_own_error(self, train, tmp_path, monkeypatch, results):
        from safetensors import SafetensorError

        def refuse(*_):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("longshore.cli.job.model.save_model", refuse)
        assert "cannot write to --out" in train("--out", tmp_path / "run").refused()
        assert results(tmp_path / "run").names == {"run.json", "metrics.jsonl"}


class TestMetricsFile:
    @staticmethod
    def limited(monkeypatch: pytest.MonkeyPatch, metrics: MetricsFile, size: int) -> None:
        """Nothing beyond ``size`` bytes is written, in parts, as on a disk that fills up."""
        path, write = metrics._path, metrics._file.write

        def limited_write(content: bytes) -> int:
            left = size - path.stat().st_size
            if left <= 0:
                full()
            return write(content[:left]) or 0

        class Limited:
            write = staticmethod(limited_write)

            def __getattr__(self, name: str) -> object:
                return getattr(file, name)

        file = metrics._file
        monkeypatch.setattr(metrics, "_file", Limited())

    def test_never_a_part_of_a_line(self, tmp_path, monkeypatch):
        path = tmp_path / "metrics.jsonl"
        lines = [json.dumps({"step": step}).encode() + b"\n" for step in range(4)]
        for size in range(sum(map(len, lines)) + 1):
            metrics = MetricsFile(path, -1)
            with monkeypatch.context() as patch:
                self.limited(patch, metrics, size)
                for step in range(4):
                    metrics.write({"step": step})
                content = path.read_bytes()
                assert content == b"".join(lines)[: len(content)]
                assert not content or content.endswith(b"\n")
                assert len(content) + 11 >= size or content == b"".join(lines)
                assert (metrics.failure is None) == (size >= sum(map(len, lines)))
            metrics.close()  # there is room again
            assert path.read_bytes() == b"".join(lines)

    def test_lines_are_there_at_once(self, tmp_path):
        metrics = MetricsFile(tmp_path / "metrics.jsonl", -1)
        metrics.write({"step": 1})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
        metrics.close()

    def test_close_says_what_is_missing(self, tmp_path, monkeypatch):
        metrics = MetricsFile(tmp_path / "metrics.jsonl", -1)
        file = metrics._file
        with monkeypatch.context() as patch:
            self.limited(patch, metrics, 3)
            metrics.write({"step": 1})
            patch.setattr(type(metrics._file), "__enter__", lambda self: self, raising=False)
            patch.setattr(type(metrics._file), "__exit__", lambda *_: None, raising=False)
            with pytest.raises(CommandError, match="the disk is full; it ends early, with its last complete line"):
                metrics.close()
        file.close()
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""

    def test_nan_is_no_json(self, tmp_path):
        metrics = MetricsFile(tmp_path / "metrics.jsonl", -1)
        with pytest.raises(ValueError, match="not JSON compliant"):
            metrics.write({"loss": float("nan")})
        metrics.close()


class TestWriteFolder:
    def test_all_or_nothing(self, tmp_path):
        folder = RunFolder(tmp_path / "run", False)
        folder.open({"longshore": "0"}, 0)

        def save(beside: Path) -> None:
            (beside / "one").write_text("1")
            assert os.listdir(tmp_path / "run") in (["run.json", ".writing"], [".writing", "run.json"])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            folder.write_folder(save)
        assert os.listdir(tmp_path / "run") == ["run.json"]


class TestSaveFile:
    def test_whole_or_not_at_all(self, tmp_path, monkeypatch):
        path = tmp_path / "picture.png"
        save_file(path, lambda beside: beside.write_bytes(b"old"), "--out")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CommandError, match=r"cannot write --out .*picture.png: the disk is full"):
            save_file(path, lambda beside: beside.write_bytes(b"new"), "--out")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["picture.png"]

    def test_checked_beforehand(self, tmp_path):
        check_writable(tmp_path / "picture.png", "--out")
        assert os.listdir(tmp_path) == []
        with pytest.raises(CommandError, match="is a folder: give the name of a file"):
            check_writable(tmp_path, "--out")
        check_writable(tmp_path / "new" / "folder" / "picture.png", "--out")
        assert os.listdir(tmp_path) == []
        (tmp_path / "file").touch()
        with pytest.raises(CommandError, match=r"/file is not a folder: choose another"):
            check_writable(tmp_path / "file" / "folder" / "picture.png", "--out")
