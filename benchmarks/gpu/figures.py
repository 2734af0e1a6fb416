"""Two pictures of a contest: time and memory beside no offload, and loss curves laid over each other."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.contestants import BY_HAND
from benchmarks.gpu.rows import GIB, median_s
from longshore.cli.pictures import Series, load_figure, loss_curves
from longshore.cli.terminal import CommandError


def draw(results: Mapping[str, Any]) -> tuple[dict[str, bytes], str]:
    """PNGs by name, and why there are fewer than two, if so."""
    pictures: dict[str, bytes] = {}
    try:
        if any("failed" not in run for run in results["runs"]):
            pictures["time-memory"] = _time_and_memory(results)
        if any("losses" in curve for curve in results["curves"].values()):
            pictures["loss"] = _losses(results["curves"])
    except CommandError as missing:
        return pictures, f"no pictures: {missing}"
    return pictures, "" if len(pictures) == 2 else "nothing to draw: see the table"


def _losses(curves: Mapping[str, Any]) -> bytes:
    """Each line thinner than the one below it, so that all are seen where they are the same."""
    series = []
    for place, (name, curve) in enumerate(curves.items()):
        if "losses" in curve:
            losses = curve["losses"]
            series.append(Series(name, list(range(1, len(losses) + 1)), losses, width=7.0 - 2.5 * place, alpha=0.8))
    return loss_curves(series, "The same training, offloaded and not")


def _time_and_memory(results: Mapping[str, Any]) -> bytes:
    """Left: step times by tokens a step, over those of no offload; right: memory at the fewest tokens."""
    runs = [run for run in results["runs"] if "failed" not in run]
    by_hand = {run["tokens_per_step"]: median_s(run) for run in runs if run["contestant"] == BY_HAND}
    figure = load_figure()(figsize=(13, 5.5), layout="constrained")
    times, memory = figure.subplots(1, 2)
    names = list(dict.fromkeys(run["contestant"] for run in runs))
    for name in names:
        points = [(run["tokens_per_step"], median_s(run)) for run in runs if run["contestant"] == name]
        # Without the one to compare with: seconds.
        values = [seconds / by_hand.get(tokens, 1.0) for tokens, seconds in points]
        times.plot([tokens for tokens, _ in points], values, marker="o", label=name)
    times.set_xscale("log", base=2)
    ticks = sorted({run["tokens_per_step"] for run in runs})
    times.set_xticks(ticks, [str(tokens) for tokens in ticks])
    times.set_xlabel("tokens a step")
    times.set_ylabel("step time, of that without offload" if by_hand else "step time (s)")
    times.set_ylim(bottom=0)
    times.grid(alpha=0.3)
    fewest = min(run["tokens_per_step"] for run in runs)
    shown = [run for run in runs if run["tokens_per_step"] == fewest][::-1]
    places = range(len(shown))
    device = [run.get("device_allocated_bytes", 0) / GIB for run in shown]
    host = [run["host_grown_bytes"] / GIB for run in shown]
    memory.barh([place + 0.2 for place in places], device, 0.4, label="device, most allocated")
    memory.barh([place - 0.2 for place in places], host, 0.4, label="host, most resident, grown")
    memory.set_yticks(list(places), [run["contestant"] for run in shown])
    memory.set_xlabel(f"GiB, at {fewest} tokens a step")
    memory.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
