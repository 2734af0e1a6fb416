"""``flops_profiler``: the times and floating-point operations of one step, which rank 0 prints or writes.

Operations are counted by ``torch.utils.flop_counter``, in the forwards and backwards of the step itself. No weight
depends on it. The times of that step include the counting.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from longshore.engine.config.model import FlopsProfilerConfig

_log = logging.getLogger(__name__)
_COUNTED = ("forward", "backward")


class FlopsProfiler:
    """Measures one step.

    Args:
        config: which step, and the details that are printed.
        model: the engine's model.
    """

    def __init__(self, config: FlopsProfilerConfig, model: nn.Module) -> None:
        self._config = config
        self._model = model
        self._steps = _Steps(config.profile_step)
        self.close = weakref.finalize(self, self._steps.say_if_not_profiled)  # at the end of the process at the latest
        # These are of the window under way.
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()
        self._modules: Counter[str] = Counter()
        """Operations in the forwards of each module and those inside it, by the module's name."""
        self._compiled = False
        """Whether there is something compiled, which would run eagerly, with other bits, where it is counted."""

    def profiles(self, steps: int) -> bool:
        """Return whether the step that follows ``steps`` others is the one to measure."""
        return steps == self._config.profile_step

    def stepped(self, number: int) -> None:
        """Count the step of this number, whether it was measured or not."""
        self._steps.made.append(number)
        del self._steps.made[1:-1]

    @contextlib.contextmanager
    def measuring(self, part: str, wait: Callable[[], None]) -> Iterator[None]:
        """Add the time of the block and the operations in it; ``wait`` waits for the device."""
        self._compiled = self._compiled or _compiles(self._model)
        counter = FlopCounterMode(display=False) if part in _COUNTED and not self._compiled else None
        wait()
        start = time.perf_counter()
        with contextlib.nullcontext() if counter is None else counter:
            yield
        wait()
        self._seconds[part] += time.perf_counter() - start
        self._calls[part] += 1
        if counter is not None:
            self._flops[part] += counter.get_total_flops()
        if counter is not None and part == "forward":
            for path, counts in counter.get_flop_counts().items():
                if path != "Global":
                    self._modules[path.partition(".")[2]] += sum(counts.values())

    def discard(self) -> None:
        """Forget a window that was not stepped."""
        for each in (self._seconds, self._calls, self._flops, self._modules):
            each.clear()

    def report(self, number: int, samples: int | None) -> None:
        """Print or write the profile of the step of this number, in which all ranks had ``samples``."""
        text = "\n".join((*self._summary(number, samples), *self._by_depth(), *self._detailed(), "-" * 79))
        self.discard()
        self._steps.profiled = True
        if self._config.output_file is None:
            print(text, flush=True)
            return
        try:
            path = Path(self._config.output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        except OSError as error:
            _log.warning("flops_profiler cannot write to %s: %s; training goes on", self._config.output_file, error)

    def _summary(self, number: int, samples: int | None) -> Iterator[str]:
        yield f"---- flops_profiler, step {number} ".ljust(79, "-")
        yield f"parameters: {_short(_numel(self._model))}"
        for part in (*_COUNTED, "step"):
            if not self._calls[part]:
                yield f"{part}: not measured, as it was not called by engine.{part}()"
                continue
            calls = "1 call" if self._calls[part] == 1 else f"{self._calls[part]} calls"
            line = f"{part}: {calls}, {1e3 * self._seconds[part]:.2f} ms"
            if part in self._flops:
                rate = self._flops[part] / max(self._seconds[part], 1e-9)
                line += f", {_short(self._flops[part])} FLOPs, {_short(rate)} FLOPs/s"
            yield line
        if self._compiled:
            yield (
                "FLOPs are not counted, since torch.compile was used in this process: compiled code would run eagerly "
                "while they are, with other bits"
            )
        whole = sum(self._seconds.values())
        per_second = "" if samples is None else f", {samples / max(whole, 1e-9):.1f} samples/s on all ranks"
        yield f"forward, backward and step: {1e3 * whole:.2f} ms{per_second}"

    def _by_depth(self) -> Iterator[str]:
        """The classes with most parameters, and with most operations in forward, of the modules at each depth."""
        kinds: dict[int, dict[str, Counter[str]]] = {}
        for name, module in self._model.named_modules():
            depth = name.count(".") + 1 if name else 0
            counts = kinds.setdefault(depth, {"parameters": Counter(), "forward FLOPs": Counter()})
            counts["parameters"][_kind(module)] += _numel(module)
            counts["forward FLOPs"][_kind(module)] += self._forward_flops(name, module)
        last, top = self._config.module_depth, self._config.top_modules
        for depth, counts in kinds.items():
            if top == 0 or 0 <= last < depth:
                continue
            yield f"depth {depth}:"
            for what, by_kind in counts.items():
                found = ", ".join(f"{kind} {_short(count)}" for kind, count in by_kind.most_common(top) if count)
                if found:
                    yield f"    {what}: {found}"

    def _forward_flops(self, name: str, module: nn.Module) -> int:
        """Return the operations of a module; those of its children if it has no forward, as a list has none."""
        inside = ((f"{name}.{child}" if name else child, each) for child, each in module.named_children())
        return self._modules[name] or sum(self._forward_flops(*each) for each in inside)

    def _detailed(self) -> Iterator[str]:
        if not self._config.detailed:
            return
        yield "each module: parameters, and operations of its forwards, with their shares"
        numel, flops = _numel(self._model), self._modules[""]
        for name, module in self._model.named_modules():
            depth, last = (name.count(".") + 1 if name else 0), name.rpartition(".")[2]
            shares = [(_numel(module), numel), *([(self._forward_flops(name, module), flops)] if flops else [])]
            parts = [f"{_short(count)} ({count / max(whole, 1):.1%})" for count, whole in shares]
            yield f"{'  ' * depth}{f'({last}) ' if last else ''}{_kind(module)}: {', '.join(parts)}"


class _Steps:
    """The steps of a run, to say at its end if the one to profile was not among them."""

    def __init__(self, wanted: int) -> None:
        self.profiled = False
        self.made: list[int] = []
        """Number of the first step, and of the last."""
        self._wanted = wanted

    def say_if_not_profiled(self) -> None:
        if self.profiled or not self.made:
            return
        first, last = self.made[0], self.made[-1]
        _log.warning(
            "flops_profiler printed nothing: profile_step %s means step %s, and this run made steps %s to %s; set "
            "flops_profiler.profile_step to a number from %s to %s",
            *(self._wanted, self._wanted + 1, first, last, first - 1, last - 1),
        )


def _kind(module: nn.Module) -> str:
    """Return the name of a module's class; FSDP2 puts its own before it."""
    return type(module).__name__.removeprefix("FSDP") or "FSDP"


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _short(count: float) -> str:
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if count >= factor:
            return f"{count / factor:.2f} {letter}"
    return f"{count:.0f}"


def _compiles(model: nn.Module) -> bool:
    """Return whether torch.compile was called, for the model, a module in it, or a function."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return True
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", {})  # torch.compiler.disable() is there too, without a backend
    return any(backend is not None for backend in backends.values())
