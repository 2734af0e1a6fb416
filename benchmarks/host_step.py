"""The host step: a bf16 gradient in, AdamW on float32 masters, a bf16 parameter out.

Every contestant steps the same arrays, allocated and touched beforehand, with
the same number of threads. What is timed is the step alone: no allocation, no
Python loop over parameters (there is one, of ``numel`` elements, which is the
best case for everybody).

A step has to move 28 bytes a parameter: master and two moments read and
written (24), the gradient read (2), the parameter written (2). The floor moves
28 as well, and computes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import host_step_formats
from benchmarks.floor import NotAvailable, load_floor
from benchmarks.report import Row, at_least
from benchmarks.timing import Case, Note, interleave, least_ratio, paired_ratio, summary
from longshore.kernels import HostKernels, InstructionSet, Scale, TileSegment
from longshore.optim.rules.adam import AdamRule
from longshore.tiles.memory import allocate_zeros

PART = "Host step"
BYTES_PER_PARAMETER = 28
TILE_NUMEL = 1 << 22
STAGGER_NUMEL = (65536 + 1024 + 64) // 4
RULE = AdamRule(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, decoupled=True)
CLIP_SCALE = 0.37


@dataclass(frozen=True)
class Settings:
    """``numel`` parameters, ``threads`` for everybody, timed ``rounds`` times."""

    numel: int
    rounds: int
    threads: int


class Arrays:
    """What is stepped. In the 2-byte slot the gradient comes in and the parameter goes out, for everybody.

    No two arrays are a power of two apart. Where they are (512 MiB here, with
    arrays laid end to end), streams that move in step fall on the same banks of
    memory, and every contestant, the floor included, is two to three times slower.
    """

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        row_numel = numel + STAGGER_NUMEL
        self.state_buffers = [allocate_zeros(3 * row_numel).view(3, row_numel) for _ in range(2)]
        self.state, self.other_state = (buffer[:, :numel] for buffer in self.state_buffers)
        self.gradient32 = allocate_zeros(numel + 3 * STAGGER_NUMEL)[3 * STAGGER_NUMEL :]
        self.gradient, self.slot, self.output = (_bfloat16(numel, 4 + index) for index in range(3))
        self.gradient.normal_(std=1e-3, generator=generator)
        self.state[0].normal_(std=0.02, generator=generator)
        self.state[1].copy_(self.gradient)
        self.state[2].copy_(self.gradient).square_()
        for touched in (self.other_state, self.gradient32, self.output):
            touched.fill_(1.0)

    def restore_gradient(self) -> None:
        self.slot.copy_(self.gradient)


def _bfloat16(numel: int, stagger: int) -> Tensor:
    start = stagger * STAGGER_NUMEL
    return allocate_zeros((start + numel + 1) // 2).view(torch.bfloat16)[start : start + numel]


# -- the contestants ----------------------------------------------------------


def ours(
    arrays: Arrays, threads: int, *, in_place: bool = True, tiled: bool = False, instructions: str | None = None
) -> Callable[[], None]:
    """The native pass. In place, the parameter overwrites its gradient; out of place, one state buffer gives the
    other.

    ``tiled``: in calls of the default tile size rather than in one.
    """
    kernels = HostKernels(threads, instruction_set=InstructionSet[instructions] if instructions else None)
    numel = arrays.slot.numel()
    output = arrays.slot if in_place else arrays.output
    source, target = arrays.state_buffers[0], arrays.state_buffers[0 if in_place else 1]
    cut = TILE_NUMEL if tiled else numel
    tables = [
        [TileSegment(start, arrays.slot[start : start + cut], output[start : start + cut], 0)]
        for start in range(0, numel, cut)
    ]

    def step() -> None:
        for table in tables:
            kernels.step_tile(source, target, table, [RULE], Scale(CLIP_SCALE))

    return step


def by_hand(arrays: Arrays) -> Callable[[], None]:
    """Plain torch with preallocated buffers: cast, scale, ``AdamW(fused=True)``, cast back."""
    master = torch.nn.Parameter(arrays.state[0])
    optimizer = torch.optim.AdamW(
        [master], lr=RULE.lr, betas=(RULE.beta1, RULE.beta2), eps=RULE.eps, weight_decay=RULE.weight_decay, fused=True
    )
    optimizer.state[master] = {
        "step": torch.tensor(RULE.step - 1.0),
        "exp_avg": arrays.state[1],
        "exp_avg_sq": arrays.state[2],
    }
    master.grad = arrays.gradient32
    return _cast_scale_step_cast(arrays, optimizer.step)


def deepspeed_cpu_adam(arrays: Arrays) -> Callable[[], None]:
    """DeepSpeed's CPUAdam between the passes that ZeRO-Offload makes: cast, scale (unscale_and_clip_grads), cast back.

    Raises:
        NotAvailable: deepspeed is not installed, or its extension does not build.
    """
    master = torch.nn.Parameter(arrays.state[0])
    step = _cpu_adam(master, arrays.state[1], arrays.state[2])
    master.grad = arrays.gradient32
    return _cast_scale_step_cast(arrays, step)


def deepspeed_bf16(arrays: Arrays) -> Callable[[], None]:
    """The same with ``bf16_optimizer_states``, for which it asks for masters and gradients in bfloat16, too.

    Raises:
        NotAvailable: as for float32.
    """
    numel = arrays.slot.numel()
    values, exp_avg, exp_avg_sq = (_bfloat16(numel, 7 + index).copy_(arrays.state[index]) for index in range(3))
    master = torch.nn.Parameter(values)
    step = _cpu_adam(master, exp_avg, exp_avg_sq)
    master.grad = arrays.slot

    @torch.no_grad()
    def run() -> None:
        arrays.slot.mul_(CLIP_SCALE)
        step()
        arrays.slot.copy_(master)

    return run


def _cpu_adam(master: torch.nn.Parameter, exp_avg: Tensor, exp_avg_sq: Tensor) -> Callable[[], Any]:
    """Return the step of DeepSpeed's CPUAdam, whose states have the dtype of the master."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotAvailable("not installed: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its extension is built at first use, by the ninja of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    values = {"lr": RULE.lr, "betas": (RULE.beta1, RULE.beta2), "eps": RULE.eps, "weight_decay": RULE.weight_decay}
    if master.dtype != torch.float32:
        values["fp32_optimizer_states"] = False
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([master], **values)
    except Exception as failure:
        raise NotAvailable(f"DeepSpeedCPUAdam does not load: {type(failure).__name__}: {failure}"[:300]) from failure
    optimizer.state[master] = {"step": RULE.step - 1, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step


def _cast_scale_step_cast(arrays: Arrays, step: Callable[[], Any]) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        arrays.gradient32.copy_(arrays.slot)
        arrays.gradient32.mul_(CLIP_SCALE)
        step()
        arrays.slot.copy_(arrays.state[0])

    return run


def check_agreement(threads: int, with_deepspeed: bool) -> None:
    """Before anything is timed: all contestants do the same work, on a small array.

    Raises:
        RuntimeError: they do not.
    """
    numel = 1 << 16
    contestants: dict[str, Callable[[Arrays], Callable[[], None]]] = {
        "ours": lambda arrays: ours(arrays, threads),
        "ours out of place": lambda arrays: ours(arrays, threads, in_place=False),
    }
    if with_deepspeed:
        contestants["DeepSpeed"] = deepspeed_cpu_adam
    expected = Arrays(numel)
    expected.restore_gradient()
    by_hand(expected)()
    for name, contestant in contestants.items():
        arrays = Arrays(numel)
        arrays.restore_gradient()
        contestant(arrays)()
        moved = name == "ours out of place"
        state, output = (arrays.other_state, arrays.output) if moved else (arrays.state, arrays.slot)
        exact = name != "DeepSpeed"  # it rounds otherwise
        same = torch.equal if exact else torch.allclose
        if not same(state, expected.state) or (exact and not torch.equal(output, expected.slot)):
            raise RuntimeError(f"{name} does not compute the step that torch computes; its time would mean nothing")


# -- measuring ----------------------------------------------------------------


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """All contestants in one process, round by round; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    torch.set_num_threads(settings.threads)
    note(f"allocating and filling arrays for {settings.numel:,} parameters")
    arrays = Arrays(settings.numel)
    missing: dict[str, str] = {}
    steps: dict[str, Callable[[], None]] = {}
    try:
        floor_pass = load_floor(settings.threads)
        steps["floor"] = lambda: floor_pass(arrays.state, arrays.gradient32)
    except NotAvailable as reason:
        missing["floor"] = str(reason)
    steps["ours"] = ours(arrays, settings.threads)
    steps["ours_tiled"] = ours(arrays, settings.threads, tiled=True)
    steps["ours_out_of_place"] = ours(arrays, settings.threads, in_place=False)
    steps |= host_step_formats.steps(arrays.state, arrays.slot, settings.threads, RULE, Scale(CLIP_SCALE))
    steps["by_hand"] = by_hand(arrays)
    note("loading DeepSpeed's CPUAdam (it compiles at first use)")
    for name, contestant in (("deepspeed", deepspeed_cpu_adam), ("deepspeed_bf16", deepspeed_bf16)):
        try:
            steps[name] = contestant(arrays)
        except NotAvailable as reason:
            missing[name] = str(reason)
    check_agreement(settings.threads, "deepspeed" in steps)
    seconds = interleave(_cases(arrays, steps), settings.rounds, note)

    slower = [name for name in ("AVX2", "BASELINE") if name in InstructionSet.__members__ and _runs(name)]
    narrow = {name: ours(arrays, settings.threads, instructions=name) for name in slower}
    note("the narrower instruction sets")
    narrow_seconds = interleave(_cases(arrays, {"ours": steps["ours"], **narrow}), max(2, settings.rounds // 3), note)
    return {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "deepspeed": _version("deepspeed") if "deepspeed" in steps else None,
        "bytes_per_parameter": BYTES_PER_PARAMETER,
        "missing": missing,
        "times": {name: summary(times) for name, times in seconds.items()},
        "instruction_sets": {name: summary(times) for name, times in narrow_seconds.items()},
    }


def _cases(arrays: Arrays, steps: Mapping[str, Callable[[], None]]) -> dict[str, Case]:
    return {name: Case(step, prepare=arrays.restore_gradient) for name, step in steps.items()}


def _runs(instructions: str) -> bool:
    try:
        HostKernels(1, instruction_set=InstructionSet[instructions])
    except ValueError:
        return False
    return True


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The figures of the table, with the goals of the host step."""
    times = {name: entry["rounds_s"] for name, entry in results["times"].items()}
    medians = {name: entry["median_s"] for name, entry in results["times"].items()}
    missing = results["missing"]
    num_bytes = BYTES_PER_PARAMETER * results["settings"]["numel"]

    def speed(name: str, best: float | None = None) -> str:
        shown = f"{1e3 * medians[name]:.0f} ms, {num_bytes / medians[name] / 1e9:.1f} GB/s"
        return shown if best is None else f"{shown}; best rounds: {best:.3g}"

    table = []
    if "floor" in times:
        floor_speed = num_bytes / medians["floor"] / 1e9
        table.append(Row(PART, "floor: bare read-modify-write", floor_speed, "GB/s", note=speed("floor")))
        for name, what, goal in (
            ("ours", "ours in place, of the floor's bandwidth", 0.9),
            ("ours_tiled", "the same in tiles of 4 Mi", None),
            ("ours_out_of_place", "ours out of place, of the floor's bandwidth", 0.7),
        ):
            share = paired_ratio(times["floor"], times[name])
            note = speed(name, least_ratio(times["floor"], times[name]))
            row = Row(PART, what, share, "", note=note) if goal is None else at_least(PART, what, share, "", goal, note)
            table.append(row)
    else:
        table.append(Row(PART, "floor: bare read-modify-write", None, "", note=missing["floor"]))
        table.append(Row(PART, "ours in place", num_bytes / medians["ours"] / 1e9, "GB/s", note=speed("ours")))
    for name, what, goal in (
        ("by_hand", "by hand in torch: its time over ours", 1.7),
        ("deepspeed", "DeepSpeed CPUAdam: its time over ours", 1.4),
    ):
        if name in times:
            note = speed(name, least_ratio(times[name], times["ours"]))
            table.append(at_least(PART, what, paired_ratio(times[name], times["ours"]), "x", goal, note))
        else:
            table.append(Row(PART, what, None, "", note=missing[name]))
    table += host_step_formats.rows(PART, results)
    sets = results["instruction_sets"]
    for name in sets:
        if name != "ours":
            ratio = paired_ratio(sets[name]["rounds_s"], sets["ours"]["rounds_s"])
            table.append(Row(PART, f"{name} code, its time over the best's", ratio, "x"))
    return table
