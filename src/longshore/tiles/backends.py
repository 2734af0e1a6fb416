"""The backends of one store, and where in them its parameters are."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from longshore.kernels import master_of, write_state
from longshore.layout.formats import NEVER_NEGATIVE, Coding
from longshore.layout.tiles import NORM_BLOCK_NUMEL, Homes, Spec, TileRun, runs_by_home
from longshore.tiles.backend import Backend, BackendSettings
from longshore.tiles.events import NO_RECORDER, Recorder
from longshore.tiles.matrices import MatrixBackend
from longshore.tiles.memory import PendingReads, read_array
from longshore.tiles.steps import MASTER
from longshore.tiles.tile import Segment, Tile


class Backends:
    """The backends of one store, with its tiles.

    Args:
        settings: settings of the backend that keeps the state.
        gradient_dtype: dtype of the gradients that arrive; None: the dtype of their parameters.
        on_device: settings of a backend on the device for the first parameters that are no matrices. Their gradients
            come last, when little of backward is left to overlap with a copy or a step. One parameter may be divided
            over both backends.
        ratio: share of the elements, apart from matrices, whose state is kept by the backend of ``settings``.
        values_of: returns the elements of a parameter, flat. With it, a float32 parameter in host memory is its own
            master where it is stepped in place.
    """

    def __init__(
        self,
        settings: BackendSettings,
        gradient_dtype: torch.dtype | None = None,
        on_device: BackendSettings | None = None,
        ratio: float = 1.0,
        values_of: Callable[[int], Tensor] | None = None,
    ) -> None:
        # Fixed.
        self._settings = settings
        self._gradient_dtype = gradient_dtype
        self._ratio = ratio
        self._values_of = values_of
        self.streams = settings.streams
        self.kernels = settings.kernels
        # Grow with parameters.
        self.tiles: list[Tile] = []
        self._pending_reads = PendingReads()
        self.backend = Backend(settings, (MASTER,), self._pending_reads)
        """The backend of all parameters but matrices, and those that ``on_device`` has."""
        self.on_device = None if on_device is None else Backend(on_device, (MASTER,), self._pending_reads)
        self.matrices: MatrixBackend | None = None
        self.recorder: Recorder = NO_RECORDER
        """Receives events of the backends of ``settings``; a device profiler shows the kernels of the other one."""
        self.recorders: tuple[Recorder, ...] = ()

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All backends, in the order in which they step: what takes the device comes before what takes the host."""
        found = (self.matrices, self.on_device, self.backend)
        return tuple(backend for backend in found if backend is not None)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays of a parameter that is no matrix: ``"master"``, then the states of its rule."""
        return self.backend.arrays

    def _placed(self, parameter: int) -> Iterator[tuple[Backend, Tile, Segment]]:
        """Yield the tiles of a parameter, each with its backend and the parameter's segment."""
        for backend in self.backends:
            for tile, segment in backend.parts[parameter]:
                yield backend, tile, segment

    def _masters(self, parameter: int) -> Iterator[tuple[Backend, Segment, Tensor]]:
        """Yield the parts of a parameter's master in state buffers, which may not have been made before a step; none if
        the parameter is its own master."""
        for backend, tile, segment in self._placed(parameter):
            buffer = tile.have_buffer(backend.buffers)
            if not tile.own_master:
                yield backend, segment, master_of(buffer)[segment.layout.in_buffer]

    def _read(self, parameter: int, which: str) -> Iterator[tuple[Segment, Tensor]]:
        """Yield the parts of one array of a parameter, float32: in state buffers, or in the parameter that is its own
        master."""
        for backend, tile, segment in self._placed(parameter):
            buffer = tile.have_buffer(backend.buffers)
            if which != MASTER or not tile.own_master:
                yield segment, read_array(buffer, backend.arrays, which, segment.layout.in_buffer)
            elif self._values_of is not None:
                yield segment, segment.part_of(self._values_of(parameter))

    def _write(self, parameter: int, which: str, values: Tensor) -> None:
        """Write one array of a parameter to state buffers; a parameter that is its own master stays as it is."""
        for backend, tile, segment in self._placed(parameter):
            buffer, from_last = tile.have_buffer(backend.buffers), len(backend.arrays) - backend.arrays.index(which)
            part = segment.part_of(values)
            if which != MASTER:
                write_state(buffer, from_last, segment.layout.in_buffer, which in NEVER_NEGATIVE, part)
            elif not tile.own_master:
                master_of(buffer)[segment.layout.in_buffer].copy_(part)

    def add_matrices(self, state: str) -> None:
        """Announce that parameters which are added next are matrices, or that other ranks have some."""
        if self.matrices is not None:
            return
        self.matrices = MatrixBackend(self._settings, self._pending_reads, state)
        mine, others = self.matrices.speculator, self.backend.speculator
        mine.forecast = others.forecast
        mine.beside, others.beside = [weakref.proxy(others)], [weakref.proxy(mine)]
        self.matrices.parts.update((index, []) for index in self.backend.parts)
        self.matrices.set_recorders(self.recorders)

    def add_parameters(self, specs: Iterable[Spec]) -> None:
        added = list(specs)
        for backend in self.backends:
            backend.parts.update((spec.key, []) for spec in added)
        device_tile_numel = self.backend.tile_numel if self.on_device is None else self.on_device.tile_numel
        homes = runs_by_home(added, self._ratio, self.backend.tile_numel, device_tile_numel)
        codings = {spec.key: spec.coding for spec in added}
        if self.matrices is not None:
            self.matrices.ranges.update((spec.key, spec.matrix) for spec in added if spec.matrix is not None)
            self._add(self.matrices, homes.matrices, codings)
        if self.on_device is not None:
            self._check_share(homes)
            self._add(self.on_device, homes.device, codings)
        self._add(self.backend, homes.host, codings)

    def _check_share(self, homes: Homes) -> None:
        """Warn if fewer elements stay on the device than a quarter of those that ``ratio`` leaves there."""
        kept, rest = (sum(run.tiles * run.numel for run in runs) for runs in (homes.device, homes.host))
        share = kept / (kept + rest) if kept + rest else 1.0
        if share < (1.0 - self._ratio) / 4:
            warnings.warn(
                f"ratio={self._ratio:g} leaves {1.0 - self._ratio:.0%} of the optimizer's state on the device, and "
                f"{share:.0%} stays there: the first parameters stay, and what is left is too small for a part of the "
                f"next one ({NORM_BLOCK_NUMEL:,} elements or a multiple). Lower ratio, or use device='none' to keep "
                "all of it there",
                stacklevel=2,
            )

    def _add(self, backend: Backend, runs: Iterable[TileRun], codings: Mapping[int, Coding]) -> None:
        """Make the tiles of ``runs``."""
        ours = backend.streams is self.streams
        first = 1 + max((tile.layout.index for tile in self.tiles), default=-1)
        added: list[Tile] = []
        for run in runs:
            outputs = backend.outputs_of(run.dtype, ours and self._values_of is not None)
            for layout in run.layouts(first + len(added)):
                added.append(Tile(layout, run.dtype, self._gradient_dtype or run.dtype, outputs, codings))
        for tile in added if ours else ():
            tile.recorder = self.recorder
        self.tiles += added
        backend.add(added)

    def _forget_tiles(self) -> None:
        """Drop all tiles with their memory. The parameters stay known; none of them has an element here."""
        known = self.backend.parts
        self.backend = Backend(self._settings, self.arrays, self._pending_reads)
        self.backend.parts.update((index, []) for index in known)
        self.on_device = self.matrices = None
        self.tiles = []

    def __contains__(self, parameter: int) -> bool:
        return parameter in self.backend.parts

    def _record(self, recorders: tuple[Recorder, ...]) -> None:
        self.recorders = recorders
        for backend in self.backends:
            if backend is not self.on_device:
                self.recorder = backend.set_recorders(recorders)

    def host_bytes(self) -> dict[str, int]:
        """Return the host bytes by kind, which are counted, not measured."""
        return self._bytes(on_device=False) or dict.fromkeys(self.backend.state_bytes(), 0)

    def device_bytes(self) -> dict[str, int]:
        """Return the device bytes by kind, which are counted, not measured; empty if all is on the host."""
        return self._bytes(on_device=True)

    def _bytes(self, on_device: bool) -> dict[str, int]:
        counted: Counter[str] = Counter()
        for backend in self.backends:
            if (backend is self.on_device or not backend.on_host) == on_device:
                counted.update(backend.state_bytes())
        return dict(counted)
