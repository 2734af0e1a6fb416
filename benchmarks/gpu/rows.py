"""The table of a contest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.contestants import AHEAD, BY_HAND, MAX_NORM, REMARKS, RESIDENT
from benchmarks.report import Row, equal

PART = "Training on one device"
GIB = 2**30


def rows(results: Mapping[str, Any]) -> list[Row]:
    """Times with memory, point by point, and what the loss curves say. Times have no goal: they depend on the link."""
    preparation = results.get("preparation", {})
    if "failed" in preparation:
        return [Row(PART, "weights to begin from", None, "", note=preparation["failed"])]
    table = [Row(PART, "parameters", preparation["parameters"] / 1e9, "G")] if preparation else []
    by_hand = {
        run["tokens_per_step"]: median_s(run)
        for run in results["runs"]
        if run["contestant"] == BY_HAND and "failed" not in run
    }
    for run in results["runs"]:
        what = f"{run['tokens_per_step']} tokens a step: {run['contestant']}"
        if "failed" in run:
            table.append(Row(PART, what, None, "", note=run["failed"]))
        else:
            table.append(Row(PART, what, 1e3 * median_s(run), "ms", note=_note(run, by_hand)))
    return table + _curve_rows(results)


def median_s(run: Mapping[str, Any]) -> float:
    """Of the steps on the clock."""
    return statistics.median(run["steps_s"])


def _note(run: Mapping[str, Any], by_hand: Mapping[int, float]) -> str:
    parts = []
    if (alone := by_hand.get(run["tokens_per_step"])) is not None:
        parts.append(f"{median_s(run) / alone:.2f} x no offload")
    if "device_allocated_bytes" in run:
        allocated, reserved = run["device_allocated_bytes"] / GIB, run["device_reserved_bytes"] / GIB
        parts.append(f"device {allocated:.1f} GiB ({reserved:.1f} reserved)")
    counted = sum(run["host_counted_bytes"].values())
    host = [f"{run['host_grown_bytes'] / GIB:.1f} GiB resident"]
    host.append(f"{run['host_taken_from_machine_bytes'] / GIB:.1f} taken from the machine")
    if counted:
        host.append(f"{counted / GIB:.1f} counted")
    parts.append("host " + " / ".join(host))
    norms = [norm for norm in run["grad_norms"] if norm is not None]
    if norms:
        parts.append(f"norm above {MAX_NORM} in {sum(norm > MAX_NORM for norm in norms)} of {len(norms)} steps")
    if run["stepped_ahead"] is not None:
        parts.append(f"{run['stepped_ahead']['kept']} tiles kept at the last")
    return ", ".join(filter(None, [*parts, REMARKS.get(run["contestant"], "")]))


def _curve_rows(results: Mapping[str, Any]) -> list[Row]:
    curves = results["curves"]
    table = [
        Row(PART, f"loss curve: {name}", None, "", note=curve["failed"])
        for name, curve in curves.items()
        if "failed" in curve
    ]
    differences = results.get("largest_loss_difference", {})
    if (difference := differences.get(AHEAD)) is not None:
        steps = len(curves[AHEAD]["losses"])
        what = f"losses of {steps} steps, stepping ahead on the host and on the device: largest difference"
        table.append(equal(PART, what, difference, "", 0.0, 0.0))
        different = float(curves[AHEAD]["weights_sha256"] != curves[RESIDENT]["weights_sha256"])
        table.append(equal(PART, "the same: weights that differ at the end (0: no bit does)", different, "", 0.0, 0.0))
    if (difference := differences.get(BY_HAND)) is not None:
        what = "losses, longshore on the device and by hand: largest difference"
        table.append(Row(PART, what, difference, "", note="torch measures the norm in float32, and rounds differently"))
    return table
