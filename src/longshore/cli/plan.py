"""``longshore plan``: what a model needs on a machine, and how to train it there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longshore.byte_sizes import parse_byte_size
from longshore.cli.curve import load_figure
from longshore.cli.failure import CommandError, SettingsError, one_line
from longshore.cli.options import CommandLine, CommandSettings, Option, takes
from longshore.cli.settings import (
    BYTE_VOCABULARY,
    DTYPES,
    Accumulation,
    BatchSize,
    Clip,
    SeqLen,
    Shape,
    ShapeSettings,
)
from longshore.cli.terminal import make_console
from longshore.plan.quantities import parse_flops, parse_rate

if TYPE_CHECKING:
    from longshore.plan.job import Job, PlanChoice, PlannedModel
    from longshore.plan.machine import PlanMachine
    from longshore.plan.planner import Plan

_QUICK_NUMEL = 1 << 22
_TAKES = (
    "give a folder with config.json (of transformers) or with safetensors files, such a file, or module:function, "
    "where the function returns a torch module"
)
_training, _choices, _machine, _described, _output = (
    partial(Option, panel=panel)
    for panel in ("Training", "Choices", "Machine", "Described machine, with --gpu", "Output")
)
_bytes = partial(_machine, parse=parse_byte_size, metavar="<size>")
_rate = partial(_described, parse=parse_rate, metavar="<rate>")
_OPTIMIZERS = ("AdamW", "Adam", "Lion", "Adagrad", "SGD")
_PLACE = "Plan only choices with optimizer state in host memory, or only others."


@dataclass(frozen=True)
class PlanSettings(CommandSettings):
    """The training, the choices to plan, the machine, and the output."""

    batch_size: BatchSize = 1
    seq_len: SeqLen = 2048
    accumulation: Accumulation = 1
    dtype: Annotated[str, _training("Of the parameters; own: the model's.", choices=(*DTYPES, "own"))] = "bf16"
    optimizer: Annotated[str, _training("Optimizer whose state is counted.", choices=_OPTIMIZERS)] = "AdamW"
    clip: Clip = 1.0
    activation_checkpointing: Annotated[bool, _training("Backward computes the blocks again.")] = False
    tile_numel: Annotated[int | None, _training("Elements in a tile. Default: the engine's.", at_least=1)] = None
    stage: Annotated[int | None, _choices("Plan this stage only.", at_least=0, at_most=3)] = None
    offload: Annotated[bool | None, _choices(_PLACE, flag="--offload/--no-offload")] = None
    gpu: Annotated[str | None, _machine("Plan for this GPU: h200, ..., custom. Default: measure this machine.")] = None
    gpus: Annotated[int | None, _machine("GPUs in a host, each with one rank.", at_least=1)] = None
    host_memory: Annotated[int | None, _bytes("Memory of a host, such as 2TB.")] = None
    device_memory: Annotated[int | None, _bytes("Memory of a GPU, in place of the data sheet's.")] = None
    quick: Annotated[bool, _machine("Measure this machine with small arrays.")] = False
    as_json: Annotated[bool, _output("Print JSON.", flag="--json")] = False
    out: Annotated[Path | None, _output("Folder for plan.json, plan.png and ds_config.json.")] = None

    def job(self) -> Job:
        from longshore.engine.precision import DTYPES
        from longshore.plan.job import Job

        return Job(
            self.batch_size,
            self.seq_len,
            self.accumulation,
            DTYPES.get(self.dtype),
            self.optimizer,
            self.clip or None,
            self.activation_checkpointing,
            tile_numel=self.tile_numel,
        )

    def allows(self, choice: PlanChoice, machine: PlanMachine) -> bool:
        """Whether ``choice`` is to be planned. Without GPUs there is one place for the state."""
        is_place = self.offload is None or not machine.staged or (choice.offload == "cpu") == self.offload
        return is_place and self.stage in (None, choice.stage)


@dataclass(frozen=True)
class DescribedMachine(CommandSettings):
    """Figures of a machine that is not measured, by their names in ``plan.machine.Description``."""

    hosts: Annotated[int | None, _described("Hosts.", at_least=1)] = None
    host_bytes_per_s: Annotated[
        float | None, _rate("Bandwidth of a host's memory, such as 400GB/s.", flag="--host-bandwidth")
    ] = None
    link_bytes_per_s: Annotated[
        float | None, _rate("From host to GPU in one direction, such as 50GB/s.", flag="--link")
    ] = None
    peers_bytes_per_s: Annotated[float | None, _rate("From GPU to GPU in a host.", flag="--peers")] = None
    network_bytes_per_s: Annotated[
        float | None, _rate("Between hosts, for each GPU, such as 400Gbit/s.", flag="--network")
    ] = None
    device_bytes_per_s: Annotated[float | None, _rate("Bandwidth of a GPU's memory.", flag="--device-bandwidth")] = None
    flops: Annotated[
        float | None, _described("Dense peak in the dtype, such as 989TFLOP/s.", parse=parse_flops, metavar="<rate>")
    ] = None
    efficiency: Annotated[float | None, _described("Share of the peak that is reached. Default: 0.45.")] = None


@takes(ShapeSettings, PlanSettings, DescribedMachine)
def plan(
    line: CommandLine,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A transformers config, safetensors (file, index, folder), or module:function. Without it: --size."
        ),
    ] = None,
) -> None:
    """Plan the training of a model on a machine: bytes by kind, times, and the configuration to use.

    Nothing is downloaded, and no weights are made. Without --gpu this machine is measured.
    """
    settings = line.settings(PlanSettings)
    figure = load_figure() if settings.out is not None else None  # fails before anything takes time
    sizes = line.flags_given(ShapeSettings)
    if model is not None and sizes:
        raise SettingsError(f"{sizes[0]} and MODEL exclude each other: {model} has its own shape")
    if model is None and not sizes:
        raise SettingsError("no model is named: give MODEL, or --size for a model of longshore train")
    machine = _described_machine(line, settings)
    from longshore.plan.planner import DoesNotFit
    from longshore.plan.planner import plan as planned

    shape = line.settings(ShapeSettings)
    read = read_size(shape.size, shape.shape(), settings.seq_len) if model is None else read_model(model)
    job = settings.job()
    if machine is None:
        machine = _this_machine(replace(job, dtype=job.dtype or read.main_dtype), settings)
    try:
        result = planned(read, machine, job, lambda choice: settings.allows(choice, machine))
    except DoesNotFit as refusal:
        raise CommandError(str(refusal)) from refusal
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if settings.out is not None:
        _write(result, settings.out, figure)
    _show(result, settings)


def _described_machine(line: CommandLine, settings: PlanSettings) -> PlanMachine | None:
    """Return the machine of ``--gpu``; None if this machine is to be measured."""
    if settings.gpu is None:
        if given := line.flags_given(DescribedMachine):
            raise SettingsError(
                f"{', '.join(given)} describes another machine, and this one is measured: give --gpu too"
            )
        return None
    from longshore.plan.machine import Description, described

    values = {
        **dataclasses.asdict(line.settings(DescribedMachine)),
        "gpu": settings.gpu,
        "gpus": settings.gpus,
        "host_memory_bytes": settings.host_memory,
        "device_memory_bytes": settings.device_memory,
    }
    try:
        return described(Description(**{name: value for name, value in values.items() if value is not None}))
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _this_machine(job: Job, settings: PlanSettings) -> PlanMachine:
    from longshore.plan.measurement import this_machine

    with make_console().status("measuring") as status:  # shown on a terminal only
        sizes = {"numel": _QUICK_NUMEL, "rounds": 1} if settings.quick else {}
        try:
            found = this_machine(job, settings.gpus, note=status.update, **sizes)
        except ValueError as error:
            raise SettingsError(str(error)) from error
    if settings.device_memory is not None and not found.staged:
        raise SettingsError("--device-memory is the memory of a GPU, and this machine has none: give --gpu too")
    return replace(
        found,
        host_bytes=settings.host_memory or found.host_bytes,
        device_bytes=settings.device_memory or found.device_bytes,
    )


def read_size(size: str, shape: Shape, seq_len: int) -> PlannedModel:
    """Return the model that ``longshore train --size`` trains on bytes."""
    import torch

    from longshore.cli.model import new_llama
    from longshore.plan.reading import plan_of_module

    with torch.device("meta"):
        model = new_llama(shape, seq_len, BYTE_VOCABULARY, None)
    return plan_of_module(model, f"llama-{size}", _head_of(model))


def read_model(given: str) -> PlannedModel:
    """Return the model of MODEL. Nothing is downloaded, and no weights are made.

    Raises:
        CommandError: there is no such model.
    """
    from longshore.plan.reading import is_weights, module_of_function, plan_of_files, plan_of_module

    path = Path(given)
    try:
        if path.is_dir():
            if (path / "config.json").is_file():
                return _read_config(path / "config.json", path.resolve().name)
            if is_weights(path):
                return plan_of_files(path)
            raise CommandError(f"{given} has neither config.json nor safetensors files: {_TAKES}")
        if path.is_file():
            if is_weights(path):
                return plan_of_files(path)
            if path.suffix == ".json":
                name = path.resolve().parent.name if path.name == "config.json" else path.stem
                return _read_config(path, name)
            raise CommandError(f"{given} is neither JSON nor safetensors: {_TAKES}")
        if ":" in given and not given.endswith(".json"):
            if "" not in sys.path:
                sys.path.insert(0, "")  # the current folder, as for python -m
            with contextlib.redirect_stdout(sys.stderr):  # what the function prints is not part of the plan
                module = module_of_function(given)
            return plan_of_module(module, given.partition(":")[2])
    except ValueError as error:
        raise CommandError(str(error)) from error
    raise CommandError(f"{given} does not exist, and nothing is downloaded: {_TAKES}")


def _read_config(file: Path, name: str) -> PlannedModel:
    """Return the model of a configuration of transformers."""
    import torch

    from longshore.cli.model import load_transformers
    from longshore.plan.reading import plan_of_module

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{file} is not valid JSON: {one_line(error)}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise CommandError(f"{file} has no model_type, so it is not a configuration of transformers: {_TAKES}")
    transformers = load_transformers()
    kind = content["model_type"]
    if str(kind) not in transformers.CONFIG_MAPPING:
        from longshore.engine.wording import did_you_mean

        near = did_you_mean(str(kind), transformers.CONFIG_MAPPING.keys()) if len(str(kind)) < 40 else ""
        near = near if near.startswith("did") else "compare it with the file that you took it from"
        version = transformers.__version__
        raise CommandError(f"{file}: this transformers ({version}) does not know model_type {kind!r}; {near}")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(file, local_files_only=True)
        with torch.device("meta"):
            model = _model_of(transformers, content, config)
    except Exception as error:  # its parsers raise errors of any type
        raise CommandError(f"transformers cannot make a model of {file}: {one_line(error)}") from error
    plan = plan_of_module(model, name, _head_of(model))
    if content.get("quantization_config") is None:
        return plan
    note = "quantization_config is ignored: the whole model is trained, in the dtype of the plan"
    return replace(plan, notes=(*plan.notes, note))


def _model_of(transformers: Any, content: dict[str, Any], config: Any) -> Any:
    for name in content.get("architectures") or ():
        kind = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind._from_config(config)  # as the classes below do it, in the configuration's dtype
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:  # it is not a causal language model
        return transformers.AutoModel.from_config(config)


def _head_of(model: Any) -> Any:
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return getattr(output, "weight", None)


def _write(plan: Plan, out: Path, figure: Any) -> None:
    from longshore.plan.page import picture, values

    out.mkdir(parents=True, exist_ok=True)
    content = values(plan)
    out.joinpath("plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    configuration = json.dumps(content["configuration"], indent=2) + "\n"
    out.joinpath("ds_config.json").write_text(configuration, encoding="utf-8")
    out.joinpath("plan.png").write_bytes(picture(plan, figure))


def _show(plan: Plan, settings: PlanSettings) -> None:
    from longshore.plan import page

    console = make_console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if settings.as_json:
        say(json.dumps(page.values(plan), indent=2))
        return
    for line in page.head(plan):
        say(line)
    console.print(page.table(plan))
    for line in page.tail(plan):
        say(line)
    if settings.out is not None:
        say(f"wrote {settings.out / 'ds_config.json'} (longshore.initialize loads it), plan.json and plan.png")
        return
    say("configuration:")
    say(json.dumps(page.values(plan)["configuration"], indent=2))
