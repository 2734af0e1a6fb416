"""One ``longshore train``: everything is checked, then trained, then written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from torch import nn

from longshore.byte_sizes import format_byte_size
from longshore.cli import curve, model
from longshore.cli.data import Corpus, Sequences
from longshore.cli.display import Display, make_display, step_line, validation_line
from longshore.cli.engine_settings import with_engine
from longshore.cli.engine_stepper import EngineStepper
from longshore.cli.failure import CommandError, SettingsError, one_line
from longshore.cli.loop import Diverged, Loop, Step, Validation
from longshore.cli.optimizers import LongshoreStepper, Memory, Stepper, make_stepper, nbytes
from longshore.cli.output import CURVE, MetricsFile, RunFolder
from longshore.cli.resuming import RunCheckpoints, check_same_run
from longshore.cli.settings import ModelSettings, TrainSettings
from longshore.cli.signals import AgreedStop, StopSignals
from longshore.cli.team import Team
from longshore.cli.terminal import make_console, plural, quantity, warn
from longshore.cli.text import Text, read_text
from longshore.cli.timeline import NoTimeline, Timeline, check_trace


@dataclass(frozen=True)
class Prepared:
    """All that training needs but a stepper; nothing is written yet. ``folder``: of the rank that writes."""

    text: Text
    corpus: Corpus
    tokenizer: Any | None
    sequences: Sequences
    model: nn.Module
    folder: RunFolder | None


def run(settings: TrainSettings, given: Mapping[str, Any], stage: int | None, file: Path | None) -> int:
    """Train, and return the exit code: 0, 1 after a loss that is no number, 130 or 143 after a signal.

    Args:
        settings: with ``train``'s defaults where an option was not given.
        given: the options that were given and that a configuration file may decide, by name.
        stage, file: ``--stage`` and ``--config``; with either, training goes through the engine.
    """
    settings = with_engine(settings, given, stage, file)
    if settings.engine is not None and settings.model.device == "cpu" and torch.cuda.is_available():
        raise SettingsError(
            "--device cpu: with --stage or --config training is on CUDA where there is CUDA; "
            "set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
        )
    team = Team(None) if settings.engine is None else Team.join()
    console = make_console(quiet=not team.leads)
    inputs = team.together(lambda: _read(settings, team.leads))
    # On its own: the ranks meet while they make the model, and none may have failed before.
    prepared = team.together(lambda: _prepare(settings, *inputs))
    stepper = team.guarded(lambda: _make_stepper(settings, prepared.model))
    console.print(_headline(settings, prepared), markup=False)
    description = describe(settings, prepared)
    checkpoints = RunCheckpoints(settings, prepared.model, stepper)
    team.together(lambda: _open(settings, prepared, description))
    timeline = _make_timeline(settings, stepper, team.leads)
    progress = team.guarded(checkpoints.load) if settings.resume else None
    if settings.resume:
        console.print(
            f"going on after step {progress['step']}" if progress else "no checkpoint yet: from the beginning"
        )
    recorder = Recorder(settings, prepared, console, timeline, progress)
    with StopSignals(quiet=not team.leads) as signals, recorder:
        stop = AgreedStop(signals, team.largest)
        forward = stepper.engine if isinstance(stepper, EngineStepper) else prepared.model
        loop = Loop(forward, prepared.sequences, stepper, settings.loop, settings.optimizer, stop, team)
        diverged: Diverged | None = None
        try:
            team.guarded(lambda: recorder.follow(loop, checkpoints))
        except Diverged as error:
            diverged = error
            recorder.diverged(error)
        stopped = stop()
        if diverged is None:
            team.guarded(lambda: checkpoints.save(recorder.steps_done, recorder.progress, last=True))
        team.guarded(checkpoints.wait)
        status = "diverged" if diverged else "interrupted" if stopped else "finished"
        if stopped:
            console.print(f"{stop.name}: ended after step {recorder.steps_done} of {settings.loop.steps}")
        weights = team.guarded(lambda: model.whole_weights(prepared.model))
        # Together, since a launcher ends the rank that still writes when another one ends with an error.
        team.together(lambda: recorder.finish({**description, "status": status}, weights))
    # After an error the others may be gone, and nothing can be waited for: the end of the process does this.
    if isinstance(stepper, EngineStepper):
        stepper.engine.destroy()
    team.close()
    if diverged is not None:
        raise diverged
    return stop.exit_code


def describe(settings: TrainSettings, prepared: Prepared) -> dict[str, Any]:
    """``run.json`` at the start of a run."""
    asked = dataclasses.asdict(settings, dict_factory=lambda items: {key: _plain(value) for key, value in items})
    return {
        "longshore": version("longshore"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "settings": asked,
        "data": {
            "files": len(prepared.text.documents),
            "bytes": prepared.text.num_bytes,
            "tokens": prepared.corpus.tokens.numel(),
            "sha256": prepared.corpus.digest(),
        },
        "parameters": model.count_parameters(prepared.model),
        "status": "running",
    }


def version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


def choose_device(settings: ModelSettings) -> torch.device:
    """``auto`` is CUDA where there is one. On CUDA only deterministic kernels are used."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise SettingsError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if settings.device == "cpu" or not available:
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds atomically
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")


class Recorder:
    """Turns the loop's events into lines, metrics and a curve, and writes the results at the end."""

    def __init__(
        self,
        settings: TrainSettings,
        prepared: Prepared,
        console: Console,
        timeline: Timeline | NoTimeline,
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._prepared = prepared
        self._console = console
        self._timeline = timeline
        self._display: Display = make_display(console, settings.loop.steps)
        done = progress["step"] if progress else -1
        self._metrics: MetricsFile | None = prepared.folder.metrics(until=done) if prepared.folder else None
        self._warned = False
        self._training = curve.Series("training")
        self._validation = curve.Series("validation", marker="o")
        self._last: Step | None = None
        self._logged_step = 0
        self._logged_seconds = 0.0
        self._losses: list[float] = []  # since the last logged step
        if progress:
            self._last = Step(**{**progress["last"], "memory": Memory(*progress["last"]["memory"])})
            self._losses = list(progress["losses"])
            self._logged_step, self._logged_seconds = progress["logged"]
            for series, points in zip((self._training, self._validation), progress["curves"], strict=True):
                series.steps, series.losses = map(list, points)

    def progress(self) -> dict[str, Any]:
        """What a run that goes on here has to know."""
        assert self._last is not None
        last = {**dataclasses.asdict(self._last), "memory": list(self._last.memory)}
        curves = [[series.steps, series.losses] for series in (self._training, self._validation)]
        logged = [self._logged_step, self._logged_seconds]
        return {"step": self.steps_done, "last": last, "losses": self._losses, "logged": logged, "curves": curves}

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the metrics where ``finish`` did not come so far; the error that is under way is the one to tell."""
        if self._metrics is not None:
            with contextlib.suppress(CommandError):
                self._metrics.close()
        if self._prepared.folder is not None:
            self._prepared.folder.close()

    @property
    def steps_done(self) -> int:
        return 0 if self._last is None else self._last.step

    def follow(self, loop: Loop, checkpoints: RunCheckpoints) -> None:
        """Runs the loop to its end. The last step is logged, whichever it is."""

        def after(step: int) -> None:
            checkpoints.save(step, self.progress)

        with self._display:
            try:
                for event in loop.run(self._timeline.around, after, self._last):
                    if isinstance(event, Step):
                        self._step(event)
                    else:
                        self._validated(event)
            finally:
                if self._last is not None and self._losses:
                    self._log(self._last)

    def diverged(self, error: Diverged) -> None:
        self._write({"kind": "diverged", "step": error.step, "what": error.what, "value": str(error.value)})

    def finish(self, description: dict[str, Any], weights: dict[str, Any]) -> None:
        """Weights first, since they are the dearest, then the curve, the metrics, how it ended, and the trace."""
        folder, trained = self._prepared.folder, self._prepared.model
        if folder is not None:
            finite = all(bool(weight.isfinite().all()) for weight in weights.values())
            if finite:
                tokenizer = self._prepared.tokenizer
                folder.write_folder(lambda beside: model.save_model(trained, weights, tokenizer, beside))
            else:
                warn("the weights hold NaN or infinity and are not written")
            title = f"longshore train, {quantity(description['parameters'])} parameters, {self._settings.model.dtype}"
            folder.write(CURVE, curve.loss_curves([self._training, self._validation], title))
            assert self._metrics is not None
            self._metrics.close()
            folder.write_run({**description, "result": self._result()})
        self._console.print(self._summary())
        if said := self._timeline.save():
            self._console.print(said, markup=False)

    def _step(self, step: Step) -> None:
        self._last = step
        self._losses.append(step.loss)
        self._display.step(step, self._speed(step))
        if step.step % self._settings.loop.log_every == 0 or step.step == self._settings.loop.steps:
            self._log(step)

    def _log(self, step: Step) -> None:
        loss = sum(self._losses) / len(self._losses)
        speed = self._speed(step)
        self._training.add(step.step, loss)
        self._display.line(step_line(step, self._settings.loop.steps, loss, speed))
        self._write(
            {
                "kind": "train",
                "step": step.step,
                "loss": loss,
                "lr": step.lr,
                "grad_norm": step.grad_norm,
                "tokens": step.step * self._settings.loop.tokens_per_step,
                "tokens_per_second": round(speed, 1),
                "seconds": round(step.seconds, 4),
                "device_bytes": step.memory.device,
                "host_bytes": step.memory.host,
                "skipped": step.skipped,
            }
        )
        self._losses.clear()
        self._logged_step, self._logged_seconds = step.step, step.seconds

    def _validated(self, validation: Validation) -> None:
        self._validation.add(validation.step, validation.loss)
        self._display.line(validation_line(validation, self._settings.loop.steps))
        self._write({"kind": "validation", "step": validation.step, "loss": validation.loss})

    def _speed(self, step: Step) -> float:
        """Tokens a second since the last logged step."""
        seconds = step.seconds - self._logged_seconds
        return (step.step - self._logged_step) * self._settings.loop.tokens_per_step / max(seconds, 1e-9)

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics is None:
            return
        self._metrics.write(record)
        if self._metrics.failure is not None and not self._warned:
            self._warned = True
            warn(f"cannot write the metrics now ({self._metrics.failure.strerror}); training goes on and tries again")

    def _result(self) -> dict[str, Any]:
        memory = Memory(0, 0) if self._last is None else self._last.memory
        return {
            "steps": self.steps_done,
            "tokens": self.steps_done * self._settings.loop.tokens_per_step,
            "train_loss": self._training.losses[-1] if self._training.losses else None,
            "validation_loss": self._validation.losses[-1] if self._validation.losses else None,
            "seconds": 0.0 if self._last is None else round(self._last.seconds, 3),
            "device_bytes": memory.device,
            "host_bytes": memory.host,
        }

    def _summary(self) -> Table:
        result = self._result()
        numel = model.count_parameters(self._prepared.model)
        table = Table(show_header=False)
        table.add_row("steps", f"{result['steps']} of {self._settings.loop.steps}")
        table.add_row("tokens", str(result["tokens"]))
        for label, key in (("training loss", "train_loss"), ("validation loss", "validation_loss")):
            if result[key] is not None:
                table.add_row(label, f"{result[key]:.4f}")
        if result["seconds"]:
            table.add_row("speed", f"{quantity(result['tokens'] / result['seconds'])} tokens/s")
        for label, key in (("device memory", "device_bytes"), ("host memory", "host_bytes")):
            table.add_row(label, f"{format_byte_size(result[key])}, {result[key] / numel:.2f} bytes a parameter")
        if self._prepared.folder is not None:
            table.add_row("written to", str(self._prepared.folder.path))
        return table


def _read(settings: TrainSettings, leads: bool) -> tuple[Text, Corpus, Any, RunFolder | None]:
    folder = (
        RunFolder(settings.out, settings.overwrite, settings.resume) if settings.out is not None and leads else None
    )
    if settings.trace is not None and leads:
        check_trace(settings.trace, folder)
    if settings.engine is not None and leads:
        for note in settings.engine.notes:
            warn(f"{settings.engine.file}: {note}")
    text = read_text(settings.data.paths, settings.data.max_bytes)
    choose_device(settings.model)  # an error if it is not there
    model.load_transformers()
    if folder is not None:
        curve.load_figure()
    tokenizer = model.load_tokenizer(settings.data.tokenizer, settings.model.path)
    return text, model.make_corpus(text.documents, tokenizer), tokenizer, folder


def _prepare(settings: TrainSettings, text: Text, corpus: Corpus, tokenizer: Any, folder: RunFolder | None) -> Prepared:
    sequences = Sequences(corpus, settings.loop.seq_len, settings.loop.seed)
    shared = settings.engine is not None
    network = model.build_model(settings.model, settings.loop.seq_len, settings.loop.seed, corpus, tokenizer, shared)
    if not shared:  # otherwise the engine does
        network.to(choose_device(settings.model))
    return Prepared(text, corpus, tokenizer, sequences, network, folder)


def _make_stepper(settings: TrainSettings, network: nn.Module) -> Stepper:
    if settings.engine is None:
        return make_stepper(network, settings.optimizer)
    try:
        return EngineStepper(network, settings.engine)
    except (ValueError, ModuleNotFoundError) as error:
        raise CommandError(one_line(error)) from error


def _make_timeline(settings: TrainSettings, stepper: Stepper, leads: bool) -> Timeline | NoTimeline:
    if settings.trace is None or not leads:
        return NoTimeline()
    if isinstance(stepper, EngineStepper):
        return Timeline(settings.trace, stepper.engine, settings.loop)
    assert isinstance(stepper, LongshoreStepper)
    return Timeline(settings.trace, stepper.optimizer, settings.loop)


def _open(settings: TrainSettings, prepared: Prepared, description: dict[str, Any]) -> None:
    if prepared.folder is not None:
        if settings.resume:
            check_same_run(prepared.folder.path, prepared.folder.former(), description)
        prepared.folder.open(description, weight_bytes=nbytes(prepared.model.parameters()))


def _headline(settings: TrainSettings, prepared: Prepared) -> str:
    text, sequences = prepared.text, prepared.sequences
    skipped = f" ({text.skipped} that are not text left out)" if text.skipped else ""
    return (
        f"{quantity(model.count_parameters(prepared.model))} parameters in {settings.model.dtype} "
        f"on {next(prepared.model.parameters()).device.type}, "
        f"optimizer state {'on the host' if settings.optimizer.offload else 'on the device'}{_sharing(settings)}\n"
        f"{text.source}: {plural(len(text.documents), 'file')}{skipped}, {quantity(prepared.corpus.tokens.numel())} "
        f"tokens, {sequences.training.numel()} sequences to train on, {sequences.validation.numel()} to validate on"
    )


def _sharing(settings: TrainSettings) -> str:
    if settings.engine is None:
        return ""
    return f", stage {settings.engine.config.stage} on {plural(settings.loop.ranks, 'rank')}"


def _plain(value: Any) -> Any:
    """For JSON: paths as strings, the configuration as what it says."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
