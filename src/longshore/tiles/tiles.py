"""Tiles of one process: the state of the elements that it steps, and the gradients of the accumulation window.

They know elements under a number, the key of a range, as flat tensors; stores know parameters and ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longshore.errors import GradientError, LongshoreError
from longshore.kernels import (
    HostKernels,
    HostRule,
    Scale,
    SegmentTable,
    total_of_blocks,
)
from longshore.kernels.base import DTYPE_CODES
from longshore.layout.formats import Coding
from longshore.layout.tiles import NORM_BLOCK_NUMEL, Home, Spec, TileRun, runs_by_home
from longshore.tiles.events import DISCARD, NO_RECORDER, NORM, Recorder
from longshore.tiles.in_place import InPlace
from longshore.tiles.matrix_exchange import MatrixExchange
from longshore.tiles.memory import PendingReads
from longshore.tiles.tier import Active, Tier, TierSettings
from longshore.tiles.tile import (
    ArrayNames,
    ParameterStep,
    Segment,
    Tile,
    TileEvent,
    TileState,
)
from longshore.tiles.window import Breakage, Window


class Tiles:
    """Tiles of one process, and the tiers that keep and step them.

    "Parameter" stands here for the elements under one key: a parameter, or the range of one that this process steps.

    Args:
        tiers: settings of the tiers, in the order in which they step. The last one takes matrices, and all that others
            leave; the one before it takes the first parameters. Their gradients come last, when little of backward is
            left to overlap with a copy or a step. One parameter may be divided over both tiers.
        gradient_dtype: dtype of the gradients that arrive; None: the dtype of their parameters.
        ratio: share of the elements, apart from matrices, whose state the last tier keeps.
        values_of: returns the elements of a parameter, flat. With it, a float32 parameter in host memory is its own
            master where it is stepped in place.
        window: is told if a gradient does not arrive; None: one of its own.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings],
        gradient_dtype: torch.dtype | None = None,
        ratio: float = 1.0,
        values_of: Callable[[int], Tensor] | None = None,
        window: Window | None = None,
    ) -> None:
        # Fixed.
        self.window = Window() if window is None else window
        self._gradient_dtype = gradient_dtype
        self._ratio = ratio
        self.values_of = values_of
        self._settings = tiers[-1]
        self.streams = self._settings.streams
        self.kernels = self._settings.kernels
        # Grow with parameters.
        self.tiles: list[Tile] = []
        self.pending_reads = PendingReads()
        self.tiers = tuple(Tier(settings, self.pending_reads) for settings in tiers)
        self.tier = self.tiers[-1]
        """The tier of all parameters but those that another one has."""
        self.recorder: Recorder = NO_RECORDER
        """Receives events of the last tier; a device profiler shows the kernels of the other one."""
        self.recorders: tuple[Recorder, ...] = ()
        # Changes when a commit, or the loading of a checkpoint, ends half way.
        self.broken: Breakage | None = None
        self._released = False
        self._owner_pid = os.getpid()
        # Change with each window. Several autograd threads may bring gradients of one tile.
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Tile]:
        return iter(self.tiles)

    def __len__(self) -> int:
        return len(self.tiles)

    def placed(self, parameter: int) -> Iterator[tuple[Tier, Tile, Segment]]:
        """Yield the tiles of a parameter, each with its tier and the parameter's segment."""
        for tier in self.tiers:
            for tile, segment in tier.parts[parameter]:
                yield tier, tile, segment

    def add(self, specs: Iterable[Spec]) -> None:
        """Lay out parameters in new tiles, in the order in which their gradients come last to first."""
        added = list(specs)
        for tier in self.tiers:
            tier.parts.update((spec.key, []) for spec in added)
        self.tier.ranges.update((spec.key, spec.matrix) for spec in added if spec.matrix is not None)
        tier_of = {tier.home: tier for tier in self.tiers}
        runs = runs_by_home(added, self._ratio, {home: tier.tile_numel for home, tier in tier_of.items()})
        self._check_share(runs)
        codings = {spec.key: spec.coding for spec in added}
        for (home, of_matrices), alike in itertools.groupby(runs, lambda run: (run.home, run.of_matrix)):
            tier = tier_of[home]
            self._add(tier, tier.of_matrices if of_matrices else tier.elementwise, alike, codings)

    def _check_share(self, runs: Sequence[TileRun]) -> None:
        """Warn if fewer elements stay on the device than a quarter of those that ``ratio`` leaves there."""
        if len(self.tiers) == 1:
            return
        numels = [(run.home, run.tiles * run.numel) for run in runs if not run.of_matrix]
        kept, whole = (sum(numel for home, numel in numels if home in homes) for homes in ((Home.DEVICE,), Home))
        share = kept / whole if whole else 1.0
        if share < (1.0 - self._ratio) / 4:
            warnings.warn(
                f"ratio={self._ratio:g} leaves {1.0 - self._ratio:.0%} of the optimizer's state on the device, and "
                f"{share:.0%} stays there: the first parameters stay, and what is left is too small for a part of the "
                f"next one ({NORM_BLOCK_NUMEL:,} elements or a multiple). Lower ratio, or use device='none' to keep "
                "all of it there",
                stacklevel=2,
            )

    def _add(self, tier: Tier, arrays: ArrayNames, runs: Iterable[TileRun], codings: Mapping[int, Coding]) -> None:
        """Make the tiles of ``runs``."""
        ours = tier is self.tier
        first = 1 + max((tile.layout.index for tile in self.tiles), default=-1)
        added: list[Tile] = []
        for run in runs:
            outputs = tier.outputs_of(run.dtype, ours and self.values_of is not None)
            for layout in run.layouts(first + len(added)):
                added.append(Tile(layout, run.dtype, self._gradient_dtype or run.dtype, arrays, outputs, codings))
        for tile in added if ours else ():
            tile.recorder = self.recorder
        self.tiles += added
        tier.add(added)

    def remove(self, parameters: Collection[int]) -> None:
        """Forget parameters, with their state and gradients."""
        self.settle()
        for tier in self.tiers:
            tier.remove(parameters)
        self.tiles = [tile for tier in self.tiers for tile in tier.tiles]

    def set_recorders(self, recorders: Iterable[Recorder]) -> None:
        with self._lock:
            self.recorders = tuple(recorders)
            self.recorder = self.tier.set_recorders(self.recorders)

    # -- the accumulation window ----------------------------------------------

    def arrive(self, parameter: int, gradient: Tensor) -> None:
        """Take one more gradient (flat, where parameters compute). This returns at once, and the caller may drop it:
        the copy runs on its stream, and the worker adds a later arrival."""
        self.check_usable()
        with self._lock:
            for tier in self.tiers:
                tier.arrive(parameter, gradient)

    def expect_backwards(self, backwards: int) -> None:
        """Set the number of backwards of the current window; without this, it is expected to be that of the last."""
        with self._lock:
            for tile in self.tiles:
                tile.expect(backwards)

    def arrivals(self, parameter: int) -> int:
        """Return how many gradients of ``parameter`` arrived in this window."""
        for tier in self.tiers:
            for _, segment in tier.parts.get(parameter, ()):
                return segment.arrivals  # all segments have equally many
        return 0

    def settle(self) -> None:
        """Wait until every arrival is on the host and added; raise GradientError if the window is incomplete."""
        self.check_usable()
        with self._lock:
            self._fail_by(tier.let_sums_leave() for tier in self.tiers)
        self.drain()
        self.window.check()

    def drain(self) -> None:
        """Wait for the work under way, which reads states, and fail the window if any of it failed."""
        # A worker reports a failure once; the window stays incomplete until it is discarded.
        self._fail_by(tier.drain() for tier in self.tiers)

    def _fail_by(self, failures: Iterable[BaseException | None]) -> None:
        for failure in [*failures]:  # all, whatever failed before
            if failure is not None:
                self.window.fail(failure, "a gradient could not be added on the host")

    def discard(self, parameter: int | None = None) -> None:
        """Drop all gradients, or those of one parameter; no state changes. The window goes on."""
        self.check_usable()
        with self._lock:
            for tier in self.tiers:
                tier.device_sums.clear() if parameter is None else tier.device_sums.pop(parameter)
            if parameter is not None:
                self.drain()
                for tier, tile, segment in self.placed(parameter):
                    if tile.forget(segment) == 0:
                        tier.end_window([tile], TileEvent.DISCARD)
                    tier.speculator.drop(tile)
                return
            for tier in self.tiers:
                tier.drain()  # what failed is dropped, too
                tier.end_window(tier.tiles, TileEvent.DISCARD)
                tier.speculator.end_window(tier.tiles, None)
            self.recorder.mark(DISCARD, None)

    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        begin_ns = self.recorder.begin(NORM, None)
        for tier in self.tiers:
            tier.speculator.pause()
        try:
            self.settle()
            found = [tier.block_sums(gradients, scale) for tier in self.tiers]
        finally:
            for tier in self.tiers:
                tier.speculator.resume()
            self.recorder.span(NORM, None, begin_ns)
        return total_of_blocks(sums[parameter] for parameter in gradients for sums in found if parameter in sums)

    def commit(
        self,
        steps: Mapping[int, ParameterStep],
        scale: Scale,
        then: Callable[[], None] = lambda: None,
        exchange: MatrixExchange | None = None,
    ) -> None:
        """Step parameters; see :meth:`Store.commit`. ``exchange``: brings together the matrices of which this
        process has a part."""
        self.settle()
        work: dict[int, Active] = {}
        for parameter, step in steps.items():
            for _, tile, segment in self.placed(parameter):
                work.setdefault(tile.layout.index, []).append((segment, step))
        stepped: list[Tile] = []
        with self.committing(stepped, (parameter for parameter, step in steps.items() if step.gradient is not None)):
            steps_of = [
                InPlace(
                    tier,
                    [(tile, work[tile.layout.index]) for tile in tier.tiles if tile.layout.index in work],
                    scale,
                    stepped,
                    exchange if tier is self.tier else None,
                )
                for tier in self.tiers
            ]
            for each in steps_of:
                each.run_matrices()
            for each in steps_of:  # a CUDA device steps its tiles while the host steps others
                each.run()
            for tier in self.tiers:
                tier.end_step(scale)
            then()

    @contextlib.contextmanager
    def committing(self, stepped: Sequence[Tile], brought: Iterable[int]) -> Iterator[None]:
        """Break the state if the block ends half way; drop gradients that it ``brought`` if no tile was ``stepped``."""
        try:
            yield
        except BaseException as failure:  # Ctrl-C, too
            stepping = (TileState.COMMITTING, TileState.COMMITTED, TileState.BROKEN)
            if stepped or any(tile.state in stepping for tile in self.tiles):
                self.broken = Breakage.by(failure)
                for tier in self.tiers:  # copies have to end before the user loads new weights on the device
                    with contextlib.suppress(Exception):
                        tier.streams.end_publish()
                raise
            for parameter in brought:  # no state has changed, and these gradients are still in ``.grad``
                self.discard(parameter)
            raise

    # -- memory ---------------------------------------------------------------

    def host_bytes(self) -> dict[str, int]:
        """Return the host bytes by kind, which are counted, not measured."""
        counted = self.tier.state_bytes()
        return counted if self.tier.home is Home.HOST else dict.fromkeys(counted, 0)

    def device_bytes(self) -> dict[str, int]:
        """Return the device bytes by kind, which are counted, not measured; empty if all is on the host."""
        counted: Counter[str] = Counter()
        for tier in self.tiers:
            if tier.home is Home.DEVICE:
                counted.update(tier.state_bytes())
            elif tier.device_sums:
                counted.update({"accumulators": tier.device_sums.num_bytes})
        return dict(counted)

    # -- usability ------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise BrokenStateError if the state is broken, LongshoreError if it is gone or another process's."""
        if os.getpid() != self._owner_pid and any(tile.buffer is not None for tile in self.tiles):
            raise LongshoreError(
                "this process was forked from the one that has the optimizer's state, and has no copy of it: save and "
                "step there, and build optimizers here after the fork"
            )
        if self._released:
            raise LongshoreError(
                "engine.destroy() was called, which gave the memory of the optimizer's state back: read and save state "
                "before it; call initialize() again to train on"
            )
        if self.broken is not None:
            raise self.broken.error()

    def begin_load(self) -> None:
        """Drop all gradients and reset ``broken``, because whole states are about to be written."""
        with self._lock:
            for tier in self.tiers:
                tier.device_sums.clear()
            self.drain()
            for tier in self.tiers:
                tier.end_window(tier.tiles, TileEvent.LOAD)
                tier.sums.trim()
                tier.speculator.end_window(tier.tiles, None)
            self.broken = None

    def close(self) -> None:
        """Wait for work under way, and end threads and streams."""
        if any(tier.device_sums for tier in self.tiers):
            self.window.fail(
                GradientError(
                    "the optimizer was closed before the step for which gradients were on the device, and they are "
                    "gone: call close() after step() or zero_grad(), and build the optimizer anew to train on"
                )
            )
        for tier in self.tiers:
            tier.device_sums.clear()
            tier.close()

    def release(self) -> None:
        """Give all memory back, after :meth:`close`. Calls that need states or gradients raise LongshoreError then. The
        parameters stay known; none of them has an element here."""
        self._released, former = True, self.tier
        self.tier = Tier(self._settings, self.pending_reads)
        self.tiers = (self.tier,)
        self.tier.elementwise, self.tier.of_matrices = former.elementwise, former.of_matrices
        self.tier.parts.update((index, []) for index in former.parts)
        self.tiles = []


class RepeatedCommit:
    """Commits of the same tiles, each with the same parameters: the tables are computed once.

    Args:
        tiles: tiles of one tier, on the host, that copies nothing.
        parameters: indices of parameters; gradients have the dtypes of their parameters.
    """

    def __init__(self, tiles: Tiles, parameters: Sequence[int]) -> None:
        assert isinstance(tiles.kernels, HostKernels)
        self._tiles = tiles
        self._kernels = tiles.kernels
        places = {parameter: place for place, parameter in enumerate(parameters)}
        self._tables: list[tuple[Tile, SegmentTable, list[int]]] = []
        """Tiles of these parameters, each with the places of its segments' parameters."""
        for tile in tiles:
            segments = [each for each in tile.layout.segments if each.parameter in places]
            code, itemsize = DTYPE_CODES[tile.dtype], tile.dtype.itemsize
            starts = [each.parameter_offset * itemsize for each in segments]
            rows = [
                (each.buffer_offset, each.numel, start, start, code, code, *tile.segments[each.parameter].coding[1:])
                for each, start in zip(segments, starts, strict=True)
            ]
            self._tables.append((tile, SegmentTable(rows), [places[each.parameter] for each in segments]))

    @staticmethod
    def possible(tiles: Tiles) -> bool:
        """Return whether all tiles are stepped on the host, one element at a time, and nothing is copied."""
        alone = len(tiles.tiers) == 1 and not tiles.tier.ranges
        return alone and not tiles.streams.staged and not tiles.kernels.asynchronous

    @property
    def undisturbed(self) -> bool:
        """Whether no recorder is told of the tiles' events, and no snapshot has buffers still to read."""
        return not self._tiles.recorders and not self._tiles.tier.snapshots.active

    def commit(
        self,
        addresses: tuple[Sequence[int], Sequence[int], Sequence[int]],
        rules: Sequence[HostRule],
        scale: Scale,
        then: Callable[[], None],
    ) -> None:
        """Step, as :meth:`Tiles.commit` does; ``then`` follows.

        ``addresses`` has for each parameter the address of its gradient (0: it has none and is not stepped), its own
        address, and the number of its rule.
        """
        gradients, outputs, numbers = addresses
        stepped: list[Tile] = []
        with self._tiles.committing(stepped, ()):
            for tile, table, places in self._tables:
                found = [gradients[place] for place in places]
                if not any(found):
                    continue
                assert tile.buffer is not None
                tile.move(TileEvent.ARRIVAL)
                tile.move(TileEvent.COMMIT)
                try:
                    there = found, [outputs[place] for place in places], [numbers[place] for place in places]
                    self._kernels.step_table(tile.buffer, table, there, rules, scale, tile.outputs)
                except BaseException:
                    tile.move(TileEvent.COMMIT_FAILED)
                    raise
                tile.move(TileEvent.COMMIT_DONE)
                stepped.append(tile)
            for tile in stepped:
                tile.move(TileEvent.PUBLISHED)
                tile.window += 1
                tile.version += 1
            then()
