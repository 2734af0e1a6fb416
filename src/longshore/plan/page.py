"""Output of a plan: plain values, and lines of text with a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.table import Column, Table

from longshore.plan.job import configuration
from longshore.plan.planner import DEVICE_SHARE, HIDDEN_SHARE, HOST_SHARE, Candidate, Plan
from longshore.seam import StateFormat, format_byte_size

_SHOWN_SHARE = 0.005
"""Waits of forward and backward are told from this share of a step on."""


def values(plan: Plan) -> dict[str, Any]:
    """Return the plan as values for JSON, in bytes and seconds."""
    job, machine = plan.job, plan.machine
    return {
        "model": {
            "name": plan.model.name,
            "parameters": plan.model.numel,
            "trained": sum(each.numel for each in plan.model.trainable),
            "notes": list(plan.model.notes),
        },
        "machine": {
            "name": machine.name,
            "ranks": machine.ranks,
            "ranks_per_host": machine.ranks_per_host,
            "device_bytes": machine.device_bytes if machine.staged else None,
            "host_bytes": machine.host_bytes,
            "assumptions": list(machine.assumptions),
        },
        "job": {
            "batch_size": job.batch_size,
            "seq_len": job.seq_len,
            "accumulation": job.accumulation,
            "tokens_a_step": tokens_a_step(plan),
            "dtype": None if job.dtype is None else str(job.dtype).removeprefix("torch."),
            "optimizer": job.optimizer,
            "states": job.state_format.value,
            "clipping": job.clipping,
            "activation_checkpointing": job.checkpointing,
        },
        "choices": [_candidate(each) for each in plan.candidates],
        "recommended": _candidate(plan.recommended),
        "offload": None if plan.offloaded is None else _candidate(plan.offloaded),
        "offload_is_hidden_at_tokens_a_step": plan.hidden_at,
        "choices_by_states": {name: [_counted(each) for each in found] for name, found in plan.by_format.items()},
        "configuration": configuration(job, plan.recommended.choice),
    }


def tokens_a_step(plan: Plan) -> int:
    """Return the number of tokens in a step, over all ranks."""
    return plan.job.tokens * plan.job.accumulation * plan.machine.ranks


def _candidate(candidate: Candidate) -> dict[str, Any]:
    times = candidate.times
    return {
        **_counted(candidate),
        "step_s": times and times.step_s,
        "exposed_s": times and times.exposed_s,
        "waited_s": times and times.waited_s,
        "busy_s": times and dict(times.busy_s),
    }


def _counted(candidate: Candidate) -> dict[str, Any]:
    choice = candidate.choice
    return {
        "stage": choice.stage,
        "offload_device": choice.offload,
        "offload_ratio": choice.ratio,
        "speculation_memory": choice.speculation,
        "param_device": choice.param_device,
        "host_bytes": candidate.bytes.host,
        "host_bytes_estimated": candidate.bytes.host_estimates,
        "device_bytes": candidate.bytes.device,
        "device_bytes_estimated": candidate.bytes.device_estimates,
        "fits": candidate.fits,
        "missing_device_bytes": max(0, candidate.missing_device),
        "missing_host_bytes": max(0, candidate.missing_host),
    }


def head(plan: Plan) -> Iterator[str]:
    """Yield lines about the model, the machine and the job."""
    model, machine, job = plan.model, plan.machine, plan.job
    yield f"{model.name}: {model.numel:,} parameters, {model.units or 'no'} blocks"
    where = f"{format_byte_size(machine.device_bytes)} on each device, " if machine.staged else ""
    yield f"{machine.name}: {where}{format_byte_size(machine.host_bytes)} on each host"
    of_device = f"{DEVICE_SHARE:.0%} of a device's, " if machine.staged else ""
    yield f"memory that is planned with: {of_device}{HOST_SHARE:.0%} of a host's"
    yield "spares: the share of tiles that can be stepped ahead; ratio: the share of the state that is on the host"
    if any(each.choice.streams for each in plan.candidates):
        yield "streamed: parameters rest on the host, and are copied to the device unit by unit as they are used"
    ranks = "1 rank" if machine.ranks == 1 else f"{machine.ranks} ranks"
    yield (
        f"{tokens_a_step(plan):,} tokens a step: {ranks} x {job.accumulation} backwards x "
        f"{job.batch_size} sequences x {job.seq_len} tokens"
    )
    if job.state_format is not StateFormat.FP32:
        small = " (of small parameters, bf16)" if job.state_format is StateFormat.EIGHT_BIT else ""
        yield f"format of the optimizer's states: {job.state_format.value}{small}; masters are float32"
    if machine.ranks == 1:
        yield "on one rank, stages 1, 2 and 3 are as stage 0, but for parameters that rest on the host"
    yield from (f"assumed: {each}" for each in (*machine.assumptions, *model.notes))


def table(plan: Plan) -> Table:
    """Return a table with one row for each choice, with the bytes of one rank."""
    shown = Table("choice", *(Column(name, justify="right") for name in ("device", "host", "step", "exposed", "")))
    for _, candidates in groupby(plan.distinct, lambda each: each.choice.stage):
        shown.add_section()
        for each in candidates:
            device, host = format_byte_size(each.bytes.device_total), format_byte_size(each.bytes.host_total)
            times = ("", "") if each.times is None else (_time(each.times.step_s), _time(each.times.exposed_s))
            remark = "recommended" if each is plan.recommended else "" if each.fits else each.shortage
            shown.add_row(each.choice.title, device, host, *times, remark)
    return shown


def formats(plan: Plan) -> Table | None:
    """Return a table of the bytes of one rank in the memory that has the optimizer's state, with a column for each
    format of the states; None if they have only one."""
    if len(plan.by_format) == 1:
        return None
    place = "device; with offload: host" if plan.machine.staged else "host"
    shown = Table(
        "choice",
        *(Column(name, justify="right") for name in plan.by_format),
        title=f"memory that has the optimizer's state ({place}), by --states",
        title_justify="left",
    )
    for same in zip(*plan.by_format.values(), strict=True):
        shown.add_row(same[0].choice.title, *(_with_state(plan, each) for each in same))
    return shown


def _with_state(plan: Plan, candidate: Candidate) -> str:
    """Return the bytes in the memory that has the optimizer's state, and which memory is too small, if one is."""
    host, device = candidate.bytes.host_total, candidate.bytes.device_total
    counted, missing, other = device, candidate.missing_device, "host"
    if candidate.choice.offloads:
        counted = host if plan.machine.staged else host + device
        missing, other = candidate.missing_host, "device"
    remark = "" if candidate.fits else ", no room" if missing > 0 else f", {other} full"
    return f"{format_byte_size(counted)}{remark}"


def tail(plan: Plan) -> Iterator[str]:
    """Yield lines about the recommended choice."""
    best, times = plan.recommended, plan.recommended.times
    assert times is not None
    yield f"recommended: {best.choice.title}"
    counted = {
        "host": best.bytes.host,
        "host, estimated": best.bytes.host_estimates,
        "device": best.bytes.device,
        "device, estimated": best.bytes.device_estimates,
    }
    for where, kinds in counted.items():
        parts = ", ".join(f"{kind} {format_byte_size(count)}" for kind, count in kinds.items() if count)
        if parts:
            yield f"  {where}: {parts}"
    yield (
        f"  a step takes {_time(times.step_s)}: {_time(times.compute_s)} are forward and backward, and "
        f"{_time(times.exposed_s)} come after them (exposed); {tokens_a_step(plan) / times.step_s:,.0f} tokens/s"
    )
    if best.choice.streams or times.waited_s > _SHOWN_SHARE * times.step_s:
        what = "parameters" if best.choice.streams else "other ranks"
        yield f"  forward and backward wait {_time(times.waited_s)} for {what}"
    if plan.job.checkpointing:
        yield (
            "  activation checkpointing is switched on in the model, not in the configuration: call its "
            "gradient_checkpointing_enable(), or longshore train --activation-checkpointing"
        )
    if plan.offloaded is not None:
        which = "its offload" if plan.offloaded is best else plan.offloaded.choice.title
        when = "at no number of tokens" if plan.hidden_at is None else f"from {plan.hidden_at:,} tokens a step on"
        what = "exposed, or waits for parameters" if plan.offloaded.choice.streams else "exposed"
        yield f"  {which} is hidden (at most {HIDDEN_SHARE:.0%} of a step is {what}) {when}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
