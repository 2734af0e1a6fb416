"""``longshore train``: everything is checked, then trained, then written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import longshore
from longshore.cli import model, terminal
from longshore.cli.data import Corpus, Sequences, TextDocuments, read_text
from longshore.cli.engine_settings import with_engine
from longshore.cli.group import RunGroup, StopSignals
from longshore.cli.loop import BEGIN, Diverged, Loop, Step, StepTrace, Validation, check_trace
from longshore.cli.output import CURVE, RunFolder
from longshore.cli.pictures import Series, load_figure, loss_curves
from longshore.cli.resuming import RunCheckpoints, check_same_run, describe
from longshore.cli.settings import ModelSettings, TrainSettings
from longshore.cli.steppers import EngineStepper, MemoryUse, TrainStepper, make_stepper, nbytes
from longshore.seam import accelerator_type, format_byte_size


@dataclass(frozen=True)
class Prepared:
    """The inputs of training besides a stepper; nothing is written yet. Only the rank that writes has a ``folder``."""

    text: TextDocuments
    corpus: Corpus
    tokenizer: Any | None
    sequences: Sequences
    model: nn.Module
    folder: RunFolder | None


def run(settings: TrainSettings, given: Mapping[str, Any]) -> int:
    """Train, and return the exit code: 0, or 128 plus the number of a signal.

    Args:
        settings: the command line, with ``train``'s defaults for options that were not given.
        given: the options that were given, by name. A configuration file may decide the others.

    Raises:
        Diverged: a loss or a gradient norm is NaN or infinite. The results of the steps before it are written.
    """
    settings = with_engine(settings, given)
    if settings.engine is not None and settings.model.device == "cpu" and (found := accelerator_type()) is not None:
        raise terminal.SettingsError(
            f"--device cpu: with --stage or --config training is on {found.upper()} where there is {found.upper()}; "
            "set CUDA_VISIBLE_DEVICES (or what hides devices of that type) to nothing to train on the CPU"
        )
    group = RunGroup(joins=settings.engine is not None)
    console = terminal.make_console(quiet=not group.leads)
    inputs = group.together(lambda: _read(settings, group.leads))
    # A step of its own: ranks communicate while they make the model, so no rank may have failed before.
    prepared = group.together(lambda: _prepare(settings, *inputs))
    stepper = group.guarded(lambda: _make_stepper(settings, prepared.model))
    console.print(_headline(settings, prepared, stepper.device.type), markup=False)
    if settings.out is None:
        console.print("the trained weights are not kept: that takes --out FOLDER", markup=False)
    exit_code, diverged = _train(settings, prepared, stepper, group, console)
    # After an error these are not called, since other ranks may be gone and waiting for them would not end. The end
    # of the process closes both.
    stepper.close()
    group.close()
    if diverged is not None:
        raise diverged
    return exit_code


def _train(
    settings: TrainSettings, prepared: Prepared, stepper: TrainStepper, group: RunGroup, console: Console
) -> tuple[int, Diverged | None]:
    """Open the folder, continue from a checkpoint, train, and write the results."""
    description = describe(settings, prepared.text, prepared.corpus, prepared.model, stepper.device.type)
    checkpoints = RunCheckpoints(settings, stepper, group.leads)
    group.together(lambda: _open(settings, prepared, description))
    progress = group.guarded(checkpoints.load) if settings.continues else None
    if settings.continues:
        console.print(
            f"continuing after step {progress['step']}" if progress else "no checkpoint yet: from the beginning"
        )
    trace = None
    if settings.trace is not None and group.leads:
        trace = StepTrace(settings.trace, stepper.optimizer, settings.loop)
    log = RunLog(settings, prepared, console, trace, progress)
    with StopSignals(group) as stop, log:
        loop = Loop(stepper.forward, prepared.sequences, stepper, settings.loop, settings.optimizer, stop, group)
        diverged: Diverged | None = None
        try:
            group.guarded(lambda: log.follow(loop, checkpoints))
        except Diverged as error:
            diverged = error
            log.write({"kind": "diverged", "step": error.step, "what": error.what, "value": str(error.value)})
        stopped = stop()
        group.guarded(checkpoints.wait)
        weights = group.guarded(lambda: model.whole_weights(prepared.model))
        # Before the last checkpoint, for which there may be no more room.
        group.together(lambda: log.keep(weights))
        if diverged is None:
            group.guarded(lambda: checkpoints.save(log.steps_done, log.progress, last=True))
            group.guarded(checkpoints.wait)
        status = "diverged" if diverged else "interrupted" if stopped else "finished"
        if stopped:
            console.print(f"{stop.name}: ended after step {log.steps_done} of {settings.loop.steps}")
        # Together, since a launcher ends the rank that still writes when another one ends with an error.
        group.together(lambda: log.finish({**description, "status": status}, weights))
        if diverged is None:
            group.together(lambda: checkpoints.check_last(log.steps_done))
    return stop.exit_code, diverged


def choose_device(settings: ModelSettings) -> torch.device:
    """Return the device; ``auto`` is the accelerator, if there is one, on which only deterministic kernels are used."""
    found = accelerator_type()
    if settings.device not in ("auto", "cpu", found):
        kind = settings.device.upper()
        raise terminal.SettingsError(
            f"--device {settings.device}: torch finds no {kind} device here; use --device {found or 'cpu'}"
        )
    if settings.device == "cpu" or found is None:
        if settings.stream:
            raise terminal.SettingsError(
                "--stream (offload_param in a file) copies parameters to an accelerator, and training is on the CPU, "
                "where they are already: leave it out"
            )
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds atomically
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(found, torch.accelerator.current_device_index())


class RunLog:
    """Makes lines, metrics and a curve from the loop's events, and writes the results at the end.

    On leaving this context, files are closed. An error while closing is dropped if another exception is being raised.
    """

    def __init__(
        self,
        settings: TrainSettings,
        prepared: Prepared,
        console: Console,
        trace: StepTrace | None,
        progress: Mapping[str, Any] | None,
    ) -> None:
        self._settings = settings
        self._prepared = prepared
        self._console = console
        self._trace = trace
        self._metrics = prepared.folder.metrics(progress["step"] if progress else -1) if prepared.folder else None
        self._warned = self._kept = False
        self._training = Series("training")
        self._validation = Series("validation", marker="o")
        self._last = BEGIN
        self._logged_step = 0
        self._logged_seconds = 0.0
        self._losses: list[float] = []  # since the last logged step
        if progress:
            self._last = Step(**{**progress["last"], "memory": MemoryUse(*progress["last"]["memory"])})
            self._losses = list(progress["losses"])
            self._logged_step, self._logged_seconds = progress["logged"]
            for series, points in zip((self._training, self._validation), progress["curves"], strict=True):
                series.steps, series.losses = map(list, points)

    def progress(self) -> dict[str, Any]:
        """Return the state with which a run continues here."""
        last = {**dataclasses.asdict(self._last), "memory": list(self._last.memory)}
        curves = [[series.steps, series.losses] for series in (self._training, self._validation)]
        logged = [self._logged_step, self._logged_seconds]
        return {"step": self._last.step, "last": last, "losses": self._losses, "logged": logged, "curves": curves}

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            with contextlib.suppress(terminal.CommandError):
                self._metrics.close()
        if self._prepared.folder is not None:
            self._prepared.folder.close()

    @property
    def steps_done(self) -> int:
        return self._last.step

    def follow(self, loop: Loop, checkpoints: RunCheckpoints) -> None:
        """Run the loop to its end. The last step is always logged."""
        around = nullcontext if self._trace is None else self._trace.around
        with terminal.progress_bar(self._console, self._settings.loop.steps) as advance:
            try:
                for event in loop.run(around, lambda step: checkpoints.save(step, self.progress), self._last):
                    if isinstance(event, Step):
                        advance(event.step, f"loss {event.loss:.4f}  {event.state(self._speed(event))}")
                        self._step(event)
                    else:
                        self._validated(event)
            finally:
                if self._losses:
                    self._log(self._last)

    def keep(self, weights: dict[str, Any]) -> None:
        """Write the weights, which matter most; if that fails, :meth:`finish` tries again."""
        with contextlib.suppress(terminal.CommandError):
            self._write_weights(weights)

    def _write_weights(self, weights: dict[str, Any]) -> None:
        folder, trained = self._prepared.folder, self._prepared.model
        if folder is None or self._kept:
            return
        if all(bool(weight.isfinite().all()) for weight in weights.values()):
            tokenizer = self._prepared.tokenizer
            folder.write_folder(lambda beside: model.save_model(trained, weights, tokenizer, beside))
        else:
            terminal.warn("the weights contain NaN or infinity and are not written")
        self._kept = True

    def finish(self, description: dict[str, Any], weights: dict[str, Any]) -> None:
        """Write the weights, unless they are, then the curve, the metrics, the status, and the trace."""
        folder = self._prepared.folder
        self._write_weights(weights)
        if folder is not None:
            numel = terminal.quantity(description["parameters"])
            title = f"longshore train, {numel} parameters, {self._settings.model.dtype}"
            folder.write(CURVE, loss_curves([self._training, self._validation], title))
            assert self._metrics is not None
            self._metrics.close()
            folder.write_run({**description, "result": self._result()})
        self._console.print(self._summary())
        if self._trace is not None:
            self._console.print(self._trace.save(), markup=False)

    def _step(self, step: Step) -> None:
        self._last = step
        self._losses.append(step.loss)
        if step.step % self._settings.loop.log_every == 0 or step.step == self._settings.loop.steps:
            self._log(step)

    def _log(self, step: Step) -> None:
        loss = sum(self._losses) / len(self._losses)
        speed = self._speed(step)
        self._training.add(step.step, loss)
        self._console.print(step.line(self._settings.loop.steps, loss, speed), markup=False)
        self.write(
            {
                "kind": "train",
                "step": step.step,
                "loss": loss,
                "lr": step.lr,
                **({"lrs": list(step.lrs)} if step.lrs else {}),
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
        steps = self._settings.loop.steps
        self._console.print(f"step {validation.step:>{len(str(steps))}}/{steps}  validation loss {validation.loss:.4f}")
        self.write({"kind": "validation", "step": validation.step, "loss": validation.loss})

    def _speed(self, step: Step) -> float:
        """Return the tokens per second since the last logged step."""
        seconds = step.seconds - self._logged_seconds
        return (step.step - self._logged_step) * self._settings.loop.tokens_per_step / max(seconds, 1e-9)

    def write(self, values: dict[str, Any]) -> None:
        """Write a line of metrics, or keep it for later; say once that this happens."""
        if self._metrics is None:
            return
        self._metrics.write(values)
        failure = self._metrics.failure
        if failure is not None and not self._warned:
            self._warned = True
            terminal.warn(f"cannot write the metrics now ({failure.strerror}); training goes on and tries again")

    def _result(self) -> dict[str, Any]:
        return {
            "steps": self.steps_done,
            "tokens": self.steps_done * self._settings.loop.tokens_per_step,
            "train_loss": self._training.losses[-1] if self._training.losses else None,
            "validation_loss": self._validation.losses[-1] if self._validation.losses else None,
            "seconds": round(self._last.seconds, 3),
            "device_bytes": self._last.memory.device,
            "host_bytes": self._last.memory.host,
        }

    def _summary(self) -> Table:
        result = self._result()
        numel = model.count_parameters(self._prepared.model)
        table = Table(show_header=False)
        table.add_row("steps", f"{result['steps']} of {self._settings.loop.steps}")
        table.add_row("tokens", f"{result['tokens']}")
        for label, key in (("training loss", "train_loss"), ("validation loss", "validation_loss")):
            if result[key] is not None:
                table.add_row(label, f"{result[key]:.4f}")
        if result["seconds"]:
            table.add_row("speed", f"{terminal.quantity(result['tokens'] / result['seconds'])} tokens/s")
        for label, key in (("device memory", "device_bytes"), ("host memory", "host_bytes")):
            table.add_row(label, f"{format_byte_size(result[key])}, {result[key] / numel:.2f} bytes a parameter")
        if self._prepared.folder is not None:
            table.add_row("written to", str(self._prepared.folder.path))
        return table


def _read(settings: TrainSettings, leads: bool) -> tuple[TextDocuments, Corpus, Any, RunFolder | None]:
    folder = None
    if leads:
        if settings.out is not None:
            folder = RunFolder(settings.out, settings.overwrite, settings.continues, settings.resume_auto)
        if settings.trace is not None:
            check_trace(settings.trace, folder)
        for note in settings.engine.notes if settings.engine is not None else ():
            terminal.warn(f"{settings.config}: {note}")
    choose_device(settings.model)  # raises if the device is missing
    text = read_text(settings.data.paths, settings.data.max_bytes)
    model.load_transformers()
    if folder is not None:
        load_figure()
    tokenizer = model.load_tokenizer(settings.data.tokenizer, settings.model.path)
    return text, model.make_corpus(text.documents, tokenizer), tokenizer, folder


def _prepare(
    settings: TrainSettings, text: TextDocuments, corpus: Corpus, tokenizer: Any, folder: RunFolder | None
) -> Prepared:
    loop, shared = settings.loop, settings.engine is not None
    sequences = Sequences(corpus, loop.seq_len, loop.seed)
    network = model.build_model(settings.model, loop.seq_len, loop.seed, corpus, tokenizer, shared)
    if settings.model.activation_checkpointing and (shared or not settings.model.stream):
        model.checkpoint_activations(network)
    if not shared and not settings.model.stream:  # the engine moves its model itself
        network.to(choose_device(settings.model))
    return Prepared(text, corpus, tokenizer, sequences, network, folder)


def _make_stepper(settings: TrainSettings, network: nn.Module) -> TrainStepper:
    try:
        if settings.engine is None:
            stream = None
            if settings.model.stream:
                again = "cpu" if settings.model.activation_checkpointing else False
                stream = longshore.stream(network, choose_device(settings.model), checkpoint=again)
            return make_stepper(network, settings.optimizer, stream)
        return EngineStepper(network, settings.engine)
    except (ValueError, ModuleNotFoundError) as error:
        raise terminal.CommandError(terminal.one_line(error)) from error


def _open(settings: TrainSettings, prepared: Prepared, description: dict[str, Any]) -> None:
    folder = prepared.folder
    if folder is not None:
        if folder.resumes:
            check_same_run(folder.path, folder.former(), description)
        folder.open(description, weight_bytes=nbytes(prepared.model.parameters()))


def _headline(settings: TrainSettings, prepared: Prepared, device: str) -> str:
    text, sequences = prepared.text, prepared.sequences
    skipped = f" ({text.skipped} that are not text left out)" if text.skipped else ""
    where = "on the host" if settings.optimizer.on_host else "on the device"
    how = ", by plain PyTorch" if settings.optimizer.plain else ""
    if settings.engine is not None:
        how = f", stage {settings.engine.config.stage} on {terminal.plural(settings.loop.ranks, 'rank')}"
    return (
        f"{terminal.quantity(model.count_parameters(prepared.model))} parameters in {settings.model.dtype} "
        f"{'streamed to' if settings.model.stream else 'on'} {device}, optimizer state {where}{how}\n"
        f"{text.source}: {terminal.plural(len(text.documents), 'file')}{skipped}, "
        f"{terminal.quantity(prepared.corpus.tokens.numel())} tokens, "
        f"{sequences.training.numel()} sequences to train on, {sequences.validation.numel()} to validate on"
    )
