"""One optimizer's state in two places: some of it stays on the device, the rest is on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.host.parameter_store import ParameterStore, check_not_broken
from longshore.host.recorder import Recorder
from longshore.host.snapshot import JoinedSnapshot, Read, Snapshot
from longshore.host.speculator import Forecast
from longshore.host.speculator import Record as SpeculationRecord
from longshore.host.stepping import ParameterStep
from longshore.host.store import HostStore
from longshore.host.tile import Tile
from longshore.kernels import NORM_BLOCK_NUMEL, Scale, total_of_blocks


class _Part(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, and the store that has them."""

    store: HostStore
    start: int
    stop: int

    def of(self, values: Tensor) -> Tensor:
        """This part of a flat tensor of the whole parameter."""
        return values[self.start : self.stop]


def kept_on_device(numels: Sequence[int], ratio: float) -> list[int]:
    """Of parameters with so many elements, how many of each stay on the device where ``ratio`` of all are on the host:
    the first ones, and of one of them the first blocks of the norm."""
    total = sum(numels)
    left = total - round(total * ratio)
    kept_numels = []
    for numel in numels:
        kept = numel if left >= numel else left // NORM_BLOCK_NUMEL * NORM_BLOCK_NUMEL
        left = left - kept if kept == numel else 0
        kept_numels.append(kept)
    return kept_numels


class SplitStore(ParameterStore):
    """Steps the first parameters where they are, and the others on the host.

    The gradients of the first ones come last, when little of backward is left
    to hide a copy or a step behind. One parameter may lie in both parts.

    Args:
        host: gets ``ratio`` of the elements.
        device: gets the others; its tiles are where the parameters are, and nothing is copied.
        ratio: from 0.0 to 1.0; rounded so that the norm of the gradients is added up in the same blocks as ever.
    """

    def __init__(self, host: HostStore, device: HostStore, ratio: float) -> None:
        # Fixed.
        self.transfer = host.transfer
        self.host = host
        self.device = device
        self._ratio = ratio
        # Grow with parameters.
        self._parts: dict[int, list[_Part]] = {}

    # -- layout ---------------------------------------------------------------

    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        entries = list(parameters)
        on_device: list[tuple[int, int, torch.dtype]] = []
        on_host: list[tuple[int, int, torch.dtype]] = []
        kept_numels = kept_on_device([numel for _, numel, _ in entries], self._ratio)
        for (index, numel, dtype), kept in zip(entries, kept_numels, strict=True):
            parts = self._parts[index] = []
            if kept > 0:
                parts.append(_Part(self.device, 0, kept))
                on_device.append((index, kept, dtype))
            if kept < numel or numel == 0:
                parts.append(_Part(self.host, kept, numel))
                on_host.append((index, numel - kept, dtype))
        self.device.add_parameters(on_device)
        self.host.add_parameters(on_host)

    @property
    def arrays(self) -> tuple[str, ...]:
        return self.host.arrays

    def set_states(self, states: Sequence[str]) -> None:
        for store in self._stores:
            store.set_states(states)

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._parts

    @property
    def _stores(self) -> tuple[HostStore, HostStore]:
        return self.device, self.host

    @property
    def tiles(self) -> Sequence[Tile]:
        return [*self.device.tiles, *self.host.tiles]

    def record(self, recorder: Recorder) -> None:
        # What stays on the device is stepped by kernels that only a profiler of the device sees.
        self.host.record(recorder)

    def host_bytes(self) -> dict[str, int]:
        return self.host.host_bytes()

    def device_bytes(self) -> dict[str, int]:
        return self.device.state_bytes()

    # -- the window -----------------------------------------------------------

    def end_backward(self, failure: BaseException | None) -> None:
        for store in self._stores:
            store.end_backward(failure)

    def arrive(self, parameter: int, gradient: Tensor) -> None:
        self.check_usable()
        for part in self._parts[parameter]:
            part.store.arrive(parameter, part.of(gradient))

    def arrivals(self, parameter: int) -> int:
        parts = self._parts.get(parameter)
        return parts[0].store.arrivals(parameter) if parts else 0  # all have as many

    def reduced(self, parameter: int) -> int:
        return min(part.store.reduced(parameter) for part in self._parts[parameter])

    def discard(self, parameter: int | None = None) -> None:
        self.check_usable()
        for store in self._stores if parameter is None else [part.store for part in self._parts[parameter]]:
            store.discard(parameter)

    def foresee(self, forecast: Forecast) -> None:
        self.host.foresee(forecast)  # of a parameter that lies in both, the rule is the same

    def expect_backwards(self, backwards: int) -> None:
        self.host.expect_backwards(backwards)

    @property
    def speculation(self) -> SpeculationRecord | None:
        return self.host.speculation

    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        self.check_usable()
        found = {store: store.block_sums(self._mine(store, gradients), scale) for store in self._stores}
        return total_of_blocks(
            found[part.store][parameter] for parameter in gradients for part in self._parts[parameter]
        )

    def _mine(self, store: HostStore, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
        return {
            parameter: None if gradient is None else part.of(gradient)
            for parameter, gradient in gradients.items()
            for part in self._parts[parameter]
            if part.store is store
        }

    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        self.check_usable()
        for store in self._stores:
            store.settle()  # neither steps unless both can
        own: dict[HostStore, dict[int, ParameterStep]] = {store: {} for store in self._stores}
        for parameter, step in steps.items():
            for part in self._parts[parameter]:
                gradient = None if step.gradient is None else part.of(step.gradient)
                own[part.store][parameter] = ParameterStep(step.rule, part.of(step.target), gradient)
        stepped: list[HostStore] = []
        try:
            # A CUDA device does its part while the host steps.
            self.device.commit(own[self.device], scale, lambda: stepped.append(self.device))
            self.host.commit(own[self.host], scale, then)
        except BaseException as failure:
            if stepped:  # the device's part is, whatever became of the host's; Ctrl-C may come between the two
                self._broken = failure
            raise

    # -- state ----------------------------------------------------------------

    @property
    def broken(self) -> bool:
        return self._broken is not None or any(store.broken for store in self._stores)

    def check_usable(self) -> None:
        for store in self._stores:
            store.check_usable()
        check_not_broken(self._broken)

    def begin_load(self) -> None:
        for store in self._stores:
            store.begin_load()
        self._broken = None

    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        self.check_usable()
        for part in self._parts[parameter]:
            part.store.adopt(parameter, part.of(values), keep_matching=keep_matching)

    def count_differing(self, parameter: int, values: Tensor) -> int:
        self.check_usable()
        return sum(part.store.count_differing(parameter, part.of(values)) for part in self._parts[parameter])

    def read_state(self, parameter: int, which: str) -> Tensor:
        self.check_usable()
        return torch.cat([part.store.read_state(parameter, which) for part in self._parts[parameter]])

    def snapshot(self, reads: Sequence[Read], memory_bytes: int) -> Snapshot:
        self.check_usable()
        parts_of = {key: [self._stores.index(part.store) for part in self._parts[key]] for key, _ in reads}
        joined = JoinedSnapshot(parts_of)
        try:
            for place, store in enumerate(self._stores):
                joined.add(store.snapshot([read for read in reads if place in parts_of[read[0]]], memory_bytes))
        except BaseException:
            joined.close()
            raise
        return joined

    def read_gradient(self, parameter: int) -> Tensor | None:
        self.check_usable()
        pieces = [part.store.read_gradient(parameter) for part in self._parts[parameter]]
        found = [piece for piece in pieces if piece is not None]
        return torch.cat(found) if found else None

    def write_gradient(self, parameter: int, values: Tensor) -> None:
        self.check_usable()
        for part in self._parts[parameter]:
            part.store.write_gradient(parameter, part.of(values))

    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        self.check_usable()
        for part in self._parts[parameter]:
            part.store.write_state(parameter, which, part.of(values))

    def clear_state(self, parameter: int) -> None:
        for part in self._parts.get(parameter, ()):
            part.store.clear_state(parameter)

    def close(self) -> None:
        for store in self._stores:
            store.close()
