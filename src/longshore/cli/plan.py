"""``longshore plan``: the memory and time of a model on a machine, and how to train it there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from longshore.cli.options import CommandLine, CommandSettings, Option, takes
from longshore.cli.output import entries_of
from longshore.cli.pictures import load_figure
from longshore.cli.settings import BYTE_VOCABULARY, DTYPES, STATES, Accumulation, BatchSize, Clip, SeqLen, ShapeSettings
from longshore.cli.terminal import CommandError, SettingsError, make_console, one_line, print_lines
from longshore.plan.quantities import parse_flops, parse_rate
from longshore.seam import parse_byte_size

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
_LEAST_MEMORY = 1 << 20


def _parse_memory(text: str) -> int:
    size = parse_byte_size(text)
    if size < _LEAST_MEMORY and text.strip().isdecimal():
        raise ValueError(f"{text} would be bytes; write the unit, as in {text}GB")
    return size


_bytes = partial(_machine, parse=_parse_memory, metavar="<size>")
_rate = partial(_described, parse=parse_rate, metavar="<rate>")
Rate = float | None
_DEVICE_MEMORY = "Memory of a GPU, in place of the data sheet's."
_BF16_STATES, _FP32_STATES = "bf16_optimizer_states", "fp32_optimizer_states"
"""DeepSpeed's keys for the format of states, of the section bf16 and of an optimizer's parameters."""
_PLACE = "Plan only choices with optimizer state in host memory, or only others."
_RESTING = "Plan only choices whose parameters rest in host memory, or only others."


class OptimizerChoice(NamedTuple):
    """The optimizer of a plan: its name in Python, its parameters in a configuration, and the format of its states
    there; None: the usual ones."""

    name: str
    params: Mapping[str, Any] | None = None
    states: str | None = None

    def __str__(self) -> str:
        return self.name


_USUAL = OptimizerChoice("AdamW")


def _parse_optimizer(text: str) -> OptimizerChoice:
    from longshore.plan.job import OPTIMIZERS
    from longshore.seam import did_you_mean

    if text.endswith(".json"):
        return _optimizer_of_file(text)
    names = {name.lower(): name for name in OPTIMIZERS}
    if text.lower() not in names:
        raise ValueError(f"{text!r} is not known; {did_you_mean(text, OPTIMIZERS)}")
    return OptimizerChoice(names[text.lower()])


def _optimizer_of_file(file: str) -> OptimizerChoice:
    """Return the optimizer that a configuration names, with the format of its states; a value of "auto" has its
    default."""
    from longshore.compat.config.load import read_config
    from longshore.engine.config import load_config

    try:
        _, content = read_config(file)
        assert isinstance(content, Mapping)
        section = content.get("optimizer")
        params = section.get("params", {}) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(params, dict):
            params = {name: value for name, value in params.items() if value != "auto"}
            section = {**section, "params": params}
        # The rest of the other sections is for the number of ranks of a job, which a plan is not told by the file.
        alone = {"train_micro_batch_size_per_gpu": 1, **_states_in(content)}
        alone |= {} if section is None else {"optimizer": section}
        config = load_config(alone, needs_optimizer=True, source=file).config
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from error
    assert config.optimizer is not None
    params = params and {name: value for name, value in params.items() if name != _FP32_STATES}
    return OptimizerChoice(config.optimizer.type, params, config.states)


def _states_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration with nothing but the keys that give the format of the states."""

    def section(within: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        found = within.get(name)
        return found if isinstance(found, Mapping) else {}

    offload, bf16 = section(section(content, "zero_optimization"), "offload_optimizer"), section(content, "bf16")
    found: dict[str, Any] = {}
    if offload.get("states", "auto") != "auto":
        found["zero_optimization"] = {"offload_optimizer": {"states": offload["states"]}}
    if bf16.get(_BF16_STATES, "auto") != "auto":
        found["bf16"] = {_BF16_STATES: bf16[_BF16_STATES]}
    return found


_OPTIMIZER = (
    "Optimizer to plan: AdamW, Muon, SGD or another one of longshore's, by its name in Python; or a .json "
    "configuration, of which the optimizer and the format of its states are taken."
)

_SUMS = "Where gradients of several backwards are added; auto: on the device, if it has room for all sums."


@dataclass(frozen=True)
class PlanSettings(CommandSettings):
    """The training, the choices to plan, the machine, and the output."""

    batch_size: BatchSize = 1
    seq_len: SeqLen = 2048
    accumulation: Accumulation = 1
    dtype: Annotated[str, _training("Parameters' dtype; own: the model's.", choices=(*DTYPES, "own"))] = "bf16"
    optimizer: Annotated[OptimizerChoice, _training(_OPTIMIZER, parse=_parse_optimizer, metavar="<name>")] = _USUAL
    states: Annotated[str | None, _training("Format of the optimizer's states. Default: fp32.", choices=STATES)] = None
    accumulate: Annotated[str, _training(_SUMS, choices=("auto", "device", "host"))] = "auto"
    clip: Clip = 1.0
    activation_checkpointing: Annotated[bool, _training("Backward computes the blocks again.")] = False
    tile_numel: Annotated[int | None, _training("Elements in a tile. Default: the engine's.", at_least=1)] = None
    stage: Annotated[int | None, _choices("Plan this stage only.", at_least=0, at_most=3)] = None
    offload: Annotated[bool | None, _choices(_PLACE, flag="--offload/--no-offload")] = None
    stream: Annotated[bool | None, _choices(_RESTING, flag="--stream/--no-stream")] = None
    gpu: Annotated[str | None, _machine("Plan for this GPU: h200, ..., custom. Default: measure this machine.")] = None
    gpus: Annotated[int | None, _machine("GPUs in a host, each with one rank.", at_least=1)] = None
    host_memory_bytes: Annotated[int | None, _bytes("Memory of a host, such as 2TB.", flag="--host-memory")] = None
    device_memory_bytes: Annotated[int | None, _bytes(_DEVICE_MEMORY, flag="--device-memory")] = None
    quick: Annotated[bool, _machine("Measure this machine with small arrays.")] = False
    as_json: Annotated[bool, _output("Print JSON.", flag="--json")] = False
    out: Annotated[Path | None, _output("Folder for plan.json, plan.png and ds_config.json.")] = None

    def job(self) -> Job:
        from longshore.plan.job import Job
        from longshore.seam import DTYPES

        names = ("batch_size", "seq_len", "accumulation", "accumulate", "tile_numel")
        same = {name: getattr(self, name) for name in names}
        return Job(
            **same,
            dtype=DTYPES.get(self.dtype),
            optimizer=self.optimizer.name,
            optimizer_params=self.optimizer.params,
            states=self.states or self.optimizer.states or STATES[0],
            clipping=self.clip or None,
            checkpointing=self.activation_checkpointing,
        )

    def allows(self, choice: PlanChoice, machine: PlanMachine) -> bool:
        """Return whether to plan ``choice``. Without GPUs ``offload`` is ignored, since there is only one memory."""
        is_place = self.offload is None or not machine.staged or choice.offloads == self.offload
        rests = self.stream is None or not machine.staged or choice.streams == self.stream
        return is_place and rests and self.stage in (None, choice.stage)


@dataclass(frozen=True)
class DescribedMachine(CommandSettings):
    """Figures of a machine that is not measured, by their names in ``plan.machine.Description``."""

    hosts: Annotated[int | None, _described("Number of hosts.", at_least=1)] = None
    host_bytes_per_s: Annotated[Rate, _rate("A host's memory bandwidth: 400GB/s.", flag="--host-bandwidth")] = None
    host_threads: Annotated[int | None, _described("CPUs of a host, for all its ranks.", at_least=1)] = None
    link_bytes_per_s: Annotated[Rate, _rate("From host to GPU, in one direction: 50GB/s.", flag="--link")] = None
    peers_bytes_per_s: Annotated[Rate, _rate("From GPU to GPU in a host.", flag="--peers")] = None
    network_bytes_per_s: Annotated[Rate, _rate("Between hosts, for each GPU: 400Gbit/s.", flag="--network")] = None
    device_bytes_per_s: Annotated[Rate, _rate("A GPU's memory bandwidth.", flag="--device-bandwidth")] = None
    flops: Annotated[Rate, _rate("Dense peak in the dtype, such as 989TFLOP/s.", parse=parse_flops)] = None
    efficiency: Annotated[Rate, _described("Share of the peak that is reached. Default: 0.45.")] = None


_MODEL = "A transformers config, safetensors (file, index, folder), or module:function. Without it: --size."


@takes(ShapeSettings, PlanSettings, DescribedMachine)
def plan(line: CommandLine, model: Annotated[str | None, typer.Argument(help=_MODEL)] = None) -> None:
    """Plan the training of a model on a machine: bytes by kind, times, and the configuration to use.

    Nothing is downloaded, and no weights are made. Without --gpu this machine is measured.
    """
    settings = line.settings(PlanSettings)
    figure = None
    if settings.out is not None:  # what is wrong with it fails before anything takes time
        entries_of(settings.out)
        figure = load_figure()
    sizes = line.flags_given(ShapeSettings)
    if model is not None and sizes:
        raise SettingsError(f"{sizes[0]} and MODEL exclude each other: {model} has its own shape")
    if model is None and not sizes:
        raise SettingsError("no model is named: give MODEL, or --size for a model of longshore train")
    try:
        machine = _described_machine(line, settings)
        read = _read_size(line.settings(ShapeSettings), settings.seq_len) if model is None else _read_model(model)
        job = settings.job()
        if machine is None:
            _check_streams(settings)
            machine = _this_machine(replace(job, dtype=job.dtype or read.main_dtype), settings)
        from longshore.plan.planner import plan as planned

        result = planned(read, machine, job, lambda choice: settings.allows(choice, machine))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    _show(result, settings, figure)


def _check_streams(settings: PlanSettings) -> None:
    from longshore.seam import accelerator_type

    if settings.stream and accelerator_type() is None:
        raise SettingsError(
            "--stream copies parameters to an accelerator, and this machine has none: leave it out, or plan for "
            "another machine with --gpu"
        )


def _described_machine(line: CommandLine, settings: PlanSettings) -> PlanMachine | None:
    """Return the machine of ``--gpu``; None if this machine is to be measured."""
    if settings.gpu is None:
        if given := ", ".join(line.flags_given(DescribedMachine)):
            raise SettingsError(f"{given} describes another machine, and this one is measured: give --gpu too")
        return None
    from longshore.plan.machine import Description, described

    values = {**dataclasses.asdict(settings), **dataclasses.asdict(line.settings(DescribedMachine))}
    names = [name for name in Description._fields if values[name] is not None]
    return described(Description(**{name: values[name] for name in names}))


def _this_machine(job: Job, settings: PlanSettings) -> PlanMachine:
    from longshore.plan.measurement import this_machine

    with make_console().status("measuring") as status:  # shown on a terminal only
        sizes = {"numel": _QUICK_NUMEL, "rounds": 1} if settings.quick else {}
        found = this_machine(job, settings.gpus, note=status.update, **sizes)
    if settings.device_memory_bytes is not None and not found.staged:
        raise SettingsError("--device-memory is the memory of a GPU, and this machine has none: give --gpu too")
    return replace(
        found,
        host_bytes=settings.host_memory_bytes or found.host_bytes,
        device_bytes=settings.device_memory_bytes or found.device_bytes,
    )


def _read_size(settings: ShapeSettings, seq_len: int) -> PlannedModel:
    """Return the model that ``longshore train --size`` trains on bytes."""
    import torch

    from longshore.cli.model import new_llama

    with torch.device("meta"):
        model = new_llama(settings.shape(), seq_len, BYTE_VOCABULARY, None)
    return _plan_of(model, f"llama-{settings.size}")


def _read_model(given: str) -> PlannedModel:
    """Return the model of MODEL. Nothing is downloaded, and no weights are made."""
    from longshore.plan.reading import is_weights, module_of_function, plan_of_files, plan_of_module

    path = Path(given)
    try:
        if path.is_dir() and (path / "config.json").is_file():
            return _read_config(path / "config.json", path.resolve().name)
        if path.exists() and is_weights(path):
            return plan_of_files(path)
        if path.is_dir():
            raise CommandError(f"{given} has neither config.json nor safetensors files: {_TAKES}")
        if path.is_file() and path.suffix == ".json":
            return _read_config(path, path.resolve().parent.name if path.name == "config.json" else path.stem)
        if path.is_file():
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
    import torch

    from longshore.cli.model import load_transformers
    from longshore.seam import did_you_mean

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{file} is not valid JSON: {one_line(error)}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise CommandError(f"{file} has no model_type, so it is not a configuration of transformers: {_TAKES}")
    transformers = load_transformers()
    kind = content["model_type"]
    if str(kind) not in transformers.CONFIG_MAPPING:
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
    plan = _plan_of(model, name)
    if content.get("quantization_config") is None:
        return plan
    note = "quantization_config is ignored: the whole model is trained, in the dtype of the plan"
    return replace(plan, notes=(*plan.notes, note))


def _model_of(transformers: Any, content: dict[str, Any], config: Any) -> Any:
    for name in content.get("architectures") or ():
        kind = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind._from_config(config)  # as the Auto classes below do it, in the configuration's dtype
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:  # it is not a causal language model
        return transformers.AutoModel.from_config(config)


def _plan_of(model: Any, name: str) -> PlannedModel:
    from longshore.plan.reading import plan_of_module

    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return plan_of_module(model, name, getattr(output, "weight", None))


def _show(plan: Plan, settings: PlanSettings, figure: Any) -> None:
    """Print the plan, and write it to ``--out``, if it is given, with a picture that matplotlib's ``figure`` draws."""
    from longshore.plan import page
    from longshore.plan.picture import picture
    from longshore.seam import replace_file

    content, out = page.values(plan), settings.out
    configuration = json.dumps(content["configuration"], indent=2)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / "plan.json", (json.dumps(content, indent=2) + "\n").encode())
        replace_file(out / "ds_config.json", (configuration + "\n").encode())
        replace_file(out / "plan.png", picture(plan, figure))
    if settings.as_json:
        print_lines([json.dumps(content, indent=2)])
        return
    print_lines(page.head(plan))
    console = make_console()
    console.print(page.table(plan))
    if (formats := page.formats(plan)) is not None:
        console.print(formats)
    print_lines(page.tail(plan))
    if out is not None:
        print_lines([f"wrote {out / 'ds_config.json'} (longshore.initialize loads it), plan.json and plan.png"])
    else:
        print_lines(["configuration:", configuration])
