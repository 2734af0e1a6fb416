"""A whole training step of a small Llama in bfloat16, clipped to 1.0, as a user would write it.

Every variant has a model of its own (the same weights, the same tokens) and
does the same: forward, backward, clip, step, zero_grad. They run in turn, step
by step. Two questions are asked:

* 32 tokens, where the optimizer dominates: what does the step add to forward
  and backward alone, round by round, and what part is that of what the
  hand-written loop adds?
* 2048 tokens: how much longer is the whole than forward and backward with
  ``torch.optim.AdamW(fused=True)`` on the bfloat16 parameters themselves (14
  bytes a parameter, no masters)? That one does not clip: it is the cheapest
  thing that anybody could run instead.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import longshore
from benchmarks.llama import LlamaSize, make_llama, make_tokens
from benchmarks.report import Row, at_most
from benchmarks.timing import Case, Note, difference, interleave, paired_ratio, summary

PART = "Whole step"
MAX_NORM = 1.0
LEARNING_RATE = 1e-5

FORWARD_BACKWARD = "forward and backward alone"
BY_HAND = "hand-written loop"
PLAIN = "AdamW(fused=True) on bf16 parameters, not clipped"
OURS = "ours, optimizer.clip_grad_norm_"
OURS_TORCH_CLIP = "ours, torch's clip_grad_norm_"
OURS_RELEASED = "ours, release_gradients, optimizer.clip_grad_norm_"


@dataclass(frozen=True)
class Settings:
    """The Llama's size, and the rounds at each sequence length (0: leave it out)."""

    hidden_size: int
    layers: int
    intermediate_size: int
    threads: int
    short_tokens: int
    short_rounds: int
    long_tokens: int
    long_rounds: int


Finish = Callable[[nn.Module], None]
"""What follows backward: clip, step and zero_grad."""


def _forward_backward_only(model: nn.Module) -> Finish:
    return lambda model: model.zero_grad()


def _by_hand(model: nn.Module) -> Finish:
    """fp32 masters, preallocated fp32 gradients; cast, clip, fused AdamW, cast back."""
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    gradients = [torch.zeros_like(master) for master in masters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def finish(model: nn.Module) -> None:
        for master, gradient, parameter in zip(masters, gradients, parameters, strict=True):
            assert parameter.grad is not None
            gradient.copy_(parameter.grad)
            master.grad = gradient
        nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)
        model.zero_grad()

    return finish


def _plain(model: nn.Module) -> Finish:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def finish(model: nn.Module) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return finish


def _ours(threads: int, release_gradients: bool = False, torch_clips: bool = False) -> Callable[[nn.Module], Finish]:
    def build(model: nn.Module) -> Finish:
        optimizer = longshore.AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            release_gradients=release_gradients,
            offload=longshore.Offload(threads=threads),
        )

        def finish(model: nn.Module) -> None:
            if torch_clips:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            else:
                optimizer.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return finish

    return build


class Variant:
    """One way to train, with its own model; keeps how long the part behind backward took."""

    def __init__(self, model: nn.Module, build: Callable[[nn.Module], Finish], tokens: Tensor) -> None:
        self._model = model
        self._finish = build(model)
        self._tokens = tokens
        self.behind_backward_s: list[float] = []

    def run(self) -> None:
        self._model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        start = time.perf_counter()
        self._finish(self._model)
        self.behind_backward_s.append(time.perf_counter() - start)


def _model(settings: Settings) -> nn.Module:
    longest = max(settings.short_tokens, settings.long_tokens)
    return make_llama(LlamaSize(settings.hidden_size, settings.layers, settings.intermediate_size, longest))


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Both sequence lengths; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    if importlib.util.find_spec("transformers") is None:
        return {"settings": asdict(settings), "missing": "not installed: pip install transformers"}
    torch.set_num_threads(settings.threads)
    threads = settings.threads
    short = {
        FORWARD_BACKWARD: _forward_backward_only,
        BY_HAND: _by_hand,
        OURS: _ours(threads),
        OURS_TORCH_CLIP: _ours(threads, torch_clips=True),
        OURS_RELEASED: _ours(threads, release_gradients=True),
    }
    long = {PLAIN: _plain, OURS: _ours(threads)}
    results: dict[str, Any] = {"settings": asdict(settings), "torch": torch.__version__, "lengths": []}
    for tokens, rounds, variants in (
        (settings.short_tokens, settings.short_rounds, short),
        (settings.long_tokens, settings.long_rounds, long),
    ):
        if rounds:
            results["lengths"].append(_measure_length(settings, tokens, rounds, variants, note))
    return results


def _measure_length(
    settings: Settings, tokens: int, rounds: int, builders: Mapping[str, Callable[[nn.Module], Finish]], note: Note
) -> dict[str, Any]:
    note(f"{tokens} tokens: building {len(builders)} models")
    batch = make_tokens(tokens)
    variants = {name: Variant(_model(settings), build, batch) for name, build in builders.items()}
    cases = {name: Case(variant.run) for name, variant in variants.items()}
    # A round goes ahead of the clock: the first step makes the optimizers' state.
    times = interleave(cases, rounds, lambda text: note(f"{tokens} tokens: {text}"))
    return {
        "tokens": tokens,
        "parameters": sum(parameter.numel() for parameter in _model(settings).parameters()),
        "steps": {name: summary(seconds) for name, seconds in times.items()},
        "behind_backward": {name: summary(variant.behind_backward_s[-rounds:]) for name, variant in variants.items()},
    }


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The figures of the table, with the goals of the whole step."""
    if "missing" in results:
        return [Row(PART, "a Llama in bf16", None, "", note=results["missing"])]
    table = []
    for length in results["lengths"]:
        times = {name: entry["rounds_s"] for name, entry in length["steps"].items()}
        table += _short_rows(length, times) if BY_HAND in times else _long_rows(length, times)
    return table


def _short_rows(length: Mapping[str, Any], times: Mapping[str, list[float]]) -> list[Row]:
    where = f"{length['tokens']} tokens"
    added = {name: difference(seconds, times[FORWARD_BACKWARD]) for name, seconds in times.items()}
    base = 1e3 * statistics.median(times[FORWARD_BACKWARD])
    title = f"{where}: forward and backward of {length['parameters'] / 1e6:.0f} M parameters"
    table = [Row(PART, title, base, "ms")]
    by_hand = statistics.median(added[BY_HAND])
    table.append(Row(PART, f"{where}: {BY_HAND} adds", 1e3 * by_hand, "ms"))
    for name in (OURS, OURS_TORCH_CLIP, OURS_RELEASED):
        mine = statistics.median(added[name])
        what, note = f"{where}: {name}, of that", f"adds {1e3 * mine:.0f} ms"
        if name == OURS:
            table.append(at_most(PART, what, mine / by_hand, "", 0.7, note))
        else:
            table.append(Row(PART, what, mine / by_hand, "", note=note))
    return table


def _long_rows(length: Mapping[str, Any], times: Mapping[str, list[float]]) -> list[Row]:
    where = f"{length['tokens']} tokens"
    behind = {name: entry["median_s"] for name, entry in length["behind_backward"].items()}
    plain_s = statistics.median(times[PLAIN])
    whole = 100 * (paired_ratio(times[OURS], times[PLAIN]) - 1)
    # The same from the part behind backward alone, which forward and backward do not make noisy.
    from_parts = 100 * (behind[OURS] - behind[PLAIN]) / plain_s
    note = f"{1e3 * behind[OURS]:.0f} ms behind backward, plain {1e3 * behind[PLAIN]:.0f} ms"
    return [
        Row(PART, f"{where}: forward, backward and plain AdamW", plain_s, "s"),
        at_most(PART, f"{where}: ours takes longer by", whole, "%", 3.0, note),
        Row(PART, f"{where}: the same, from the parts behind backward", from_parts, "%"),
    ]
