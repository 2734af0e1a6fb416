"""The backends of one store, and where in them its parameters are."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longshore.kernels import master_of, write_state
from longshore.layout.formats import FLOAT32_STATES, NEVER_NEGATIVE, Coding, StateFormat
from longshore.layout.tiles import MatrixLayout, Range, divided, tile_runs
from longshore.tiles.backend import Backend, BackendSettings
from longshore.tiles.events import NO_RECORDER, Recorder
from longshore.tiles.matrices import MatrixBackend, MatrixRange
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
        self._codings: dict[int, Coding] = {}
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

    def set_codings(self, codings: Mapping[int, Coding]) -> None:
        self._codings.update(codings)

    def add_matrices(self, state: str, layouts: Mapping[int, MatrixLayout]) -> None:
        self.add_matrix_ranges(state, {index: MatrixRange(index, layout) for index, layout in layouts.items()})

    def add_matrix_ranges(self, state: str, ranges: Mapping[int, MatrixRange]) -> None:
        """Announce parts of matrices, by index, which are added next, with the name of their one state. There may be
        none of matrices that other ranks have."""
        if self.matrices is None:
            self.matrices = MatrixBackend(self._settings, self._pending_reads, state)
            mine, others = self.matrices.speculator, self.backend.speculator
            mine.forecast = others.forecast
            mine.beside, others.beside = [weakref.proxy(others)], [weakref.proxy(mine)]
            self.matrices.parts.update((index, []) for index in self.backend.parts)
            self.matrices.set_recorders(self.recorders)
        self.matrices.ranges.update(ranges)

    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        added = list(parameters)
        for backend in self.backends:
            backend.parts.update((index, []) for index, _, _ in added)
        if self.matrices is not None:
            whole = [Range(each[0], 0, *each[1:]) for each in added if each[0] in self.matrices.ranges]
            added = [each for each in added if each[0] not in self.matrices.ranges]
            self._add(self.matrices, [[each] for each in whole])
        kept, rest = divided(added, self._ratio)
        if self.on_device is not None:
            self._add(self.on_device, [kept])
        self._add(self.backend, [rest])

    def _add(self, backend: Backend, ranges: Iterable[Sequence[Range]]) -> None:
        """Lay out ranges in new tiles; those that are not in one sequence are never in one tile."""
        ours = backend.streams is self.streams
        first = 1 + max((tile.layout.index for tile in self.tiles), default=-1)
        added: list[Tile] = []
        for together in ranges:
            offsets = {each.parameter: each.offset for each in together}
            keyed = ((each.parameter, each.numel, each.dtype, self._format_of(each.parameter)) for each in together)
            for run in tile_runs(keyed, backend.tile_numel):
                outputs = backend.outputs_of(run.dtype, ours and self._values_of is not None)
                for layout in run.layouts(first + len(added), offsets):
                    added.append(Tile(layout, run.dtype, self._gradient_dtype or run.dtype, outputs, self._codings))
        for tile in added if ours else ():
            tile.recorder = self.recorder
        self.tiles += added
        backend.add(added)

    def _format_of(self, parameter: int) -> StateFormat:
        return self._codings.get(parameter, FLOAT32_STATES).format

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
