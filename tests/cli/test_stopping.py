"""Ctrl-C, SIGTERM, a loss that is no number, and an output that nobody reads."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import WRITTEN

from longshore.cli import job
from longshore.cli.job import RunLog

LONGSHORE = [sys.executable, "-c", "import sys; from longshore.cli import main; sys.exit(main())"]
TINY = ["--size", "tiny", "--seq-len", "16", "--batch-size", "2", "--device", "cpu", "--eval-every", "0"]


@pytest.fixture(autouse=True)
def _signals_as_in_a_terminal():
    """Whoever runs the tests in the background may have them ignored."""
    former = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGHUP, signal.SIG_DFL),
            (signal.SIGUSR1, signal.SIG_DFL),
        )
    }
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def send(monkeypatch):
    """Sends this process a signal, once, during a step or while the weights are written."""
    sent: list[int | None] = []

    def once(number: signal.Signals, step: int | None) -> None:
        if step not in sent:
            sent.append(step)
            os.kill(os.getpid(), number)

    def patch(number: signal.Signals, step: int | None = None) -> None:
        original = RunLog._step

        def after_step(run_log, event):
            original(run_log, event)
            if event.step == step:
                once(number, step)

        if step is None:
            monkeypatch.setattr(job.model, "save_model", lambda *_: once(number, None))
        else:
            monkeypatch.setattr(RunLog, "_step", after_step)

    return patch


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "number, name, code",
    [
        (signal.SIGINT, "Ctrl-C", 130),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGHUP, "SIGHUP", 129),
        (signal.SIGUSR1, "SIGUSR1", 138),
    ],
)
def test_a_signal_ends_after_the_step(train, tmp_path, results, send, number, name, code):
    handlers = signal.getsignal(number)
    send(number, step=3)
    ran = train("--steps", "1000", "--schedule", "constant", "--eval-every", "500", "--out", tmp_path / "stopped")
    assert ran.code == code
    assert f"{name}: ended after step 3 of 1000" in ran.out
    assert "ending after this step; once more ends at once" in ran.err
    run = results(tmp_path / "stopped")
    assert run.names == WRITTEN
    assert run.run["status"] == "interrupted" and run.run["result"]["steps"] == 3
    assert [record["step"] for record in run.metrics("train")] == [3]
    assert signal.getsignal(number) is handlers
    assert train("--steps", "3", "--schedule", "constant", "--out", tmp_path / "short").code == 0
    assert run.differing(results(tmp_path / "short")) == []


def test_a_second_signal_ends_at_once(train, tmp_path, results, send):
    send(signal.SIGINT, step=2)
    send(signal.SIGTERM)
    ran = train("--out", tmp_path / "run")
    assert ran.code == 143
    assert "ended at once; the file that was being written is removed" in ran.err
    assert results(tmp_path / "run").names == {"run.json", "metrics.jsonl"}


def test_a_warning_is_not_the_first_of_two(train, tmp_path, results, send):
    """A batch system warns with SIGUSR1 and sends SIGTERM later: that is no wish to lose what is being written."""
    send(signal.SIGUSR1, step=2)
    send(signal.SIGTERM)
    ran = train("--out", tmp_path / "run")
    assert ran.code == 128 + signal.SIGUSR1
    assert results(tmp_path / "run").run["result"]["steps"] == 2


def test_a_signal_before_training(train, monkeypatch):
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(job, "make_stepper", interrupt)
    ran = train()
    assert (ran.code, ran.refused()) == (130, "longshore: interrupted\n")


def test_a_signal_during_validation(train, tmp_path, results, monkeypatch):
    from longshore.cli.loop import Loop

    validation = Loop._validate

    def validate(loop, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return validation(loop, step)

    monkeypatch.setattr(Loop, "_validate", validate)
    assert train("--eval-every", "2", "--steps", "50", "--out", tmp_path / "run").code == 130
    run = results(tmp_path / "run")
    assert run.run["result"]["steps"] == 2
    assert [record["step"] for record in run.metrics("validation")] == [0]


def test_an_ignored_signal_stays_ignored(train, send):
    """As under nohup, and for what a shell runs in the background."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        send(signal.SIGINT, step=2)
        assert train().code == 0
    finally:
        signal.signal(signal.SIGINT, former)


def test_diverged(train, tmp_path, results):
    ran = train("--lr", "1e20", "--schedule", "constant", "--steps", "50", "--out", tmp_path / "run")
    assert ran.code == 1
    assert "so this step was not applied and the run stopped; try a smaller --lr" in ran.refused()
    run = results(tmp_path / "run")
    (record,) = run.metrics("diverged")
    assert record["step"] == run.run["result"]["steps"] + 1 > 1
    assert record["value"] in ("nan", "inf")
    assert run.run["status"] == "diverged"
    assert {"loss.png", "metrics.jsonl", "run.json"} <= run.names


def test_weights_that_are_no_numbers_are_not_written(train, tmp_path, results, monkeypatch):
    step = RunLog._step

    def poison(run_log, event):
        step(run_log, event)
        if event.step == 4:
            run_log._prepared.model.lm_head.weight.data[0, 0] = float("nan")

    monkeypatch.setattr(RunLog, "_step", poison)
    ran = train("--out", tmp_path / "run")
    assert "the weights contain NaN or infinity and are not written" in ran.err
    assert results(tmp_path / "run").names == {"run.json", "metrics.jsonl", "loss.png"}


def start(*arguments: object, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [*LONGSHORE, "train", *TINY, "--log-every", "1", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"},
        **options,
    )


@pytest.mark.slow
def test_real_processes(text, tmp_path, results):
    """Ctrl-C with a bar on a terminal; beside it, a reader that goes away."""
    leader, follower = pty.openpty()
    stopped = start("--data", text, "--steps", "1000000", "--out", tmp_path / "stopped", stdout=follower)
    os.close(follower)
    piped = start("--data", text, "--steps", "5", "--out", tmp_path / "piped", stdout=subprocess.PIPE)
    assert piped.stdout is not None
    piped.stdout.readline()
    piped.stdout.close()

    screen = read_terminal(leader, until="step       2/1000000")
    stopped.send_signal(signal.SIGINT)
    screen += read_terminal(leader)
    os.close(leader)
    errors = stopped.communicate(timeout=300)[1]
    assert (stopped.returncode, errors) == (130, "\nlongshore: ending after this step; once more ends at once\n")
    assert "━" in screen and "/1000000" in screen and "tokens/s" in screen
    assert "Ctrl-C: ended after step" in screen and "written to" in screen
    assert results(tmp_path / "stopped").names == WRITTEN
    assert results(tmp_path / "stopped").run["status"] == "interrupted"

    errors = piped.communicate(timeout=300)[1]
    assert (piped.returncode, errors) == (0, "")
    assert results(tmp_path / "piped").run["result"]["steps"] == 5


def read_terminal(leader: int, until: str | None = None) -> str:
    content = ""
    while until is None or until not in content:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:  # how a terminal says that its other side is closed
            part = b""
        if not part:
            assert until is None, content
            break
        content += part.decode(errors="replace")
    return content


def test_an_output_that_is_full(train, monkeypatch, results, tmp_path):
    with open("/dev/full", "w") as device:
        monkeypatch.setattr(sys, "stdout", device)
        ran = train("--out", tmp_path / "run")
        assert ran.code == 0
        assert ran.err == "longshore: cannot write to standard output: the disk is full; going on without it\n"
    assert results(tmp_path / "run").names == WRITTEN


def test_no_standard_output(train, monkeypatch):
    """As after >&- in a shell."""
    monkeypatch.setattr(sys, "stdout", None)
    assert train().code == 0


def test_version_to_a_full_disk():
    with Path("/dev/full").open("w") as device:
        ran = subprocess.run([*LONGSHORE, "--version"], stdout=device, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "longshore: standard output: the disk is full\n")


@pytest.mark.parametrize("method", ["write", "flush"])
def test_a_reader_that_went_away(monkeypatch, capfd, method):
    """Buffered output fails when it is flushed, unbuffered output when it is written; once, and then no more."""
    from longshore.cli.terminal import SafeOutput

    class Gone(io.StringIO):
        calls = 0

    def fail(stream, *_):
        stream.calls += 1
        raise BrokenPipeError

    monkeypatch.setattr(Gone, method, fail)
    monkeypatch.setattr(sys, "stdout", gone := Gone())
    output = SafeOutput()
    for _ in range(2):
        assert output.write("text") == 4
        output.flush()
    assert gone.calls == 1
    assert not output.isatty()
    assert capfd.readouterr().err == ""
