"""A tier: one memory, the tiles in it, the kernels that step them, and the streams that copy to and from it.

Gradients are copied to a tier during backward (:meth:`Tier.bring`) or in the step (:meth:`Tier.fill`), where
``InPlace`` steps tiles and publishes them, several at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.accelerator import Mark
from longshore.errors import LongshoreError
from longshore.kernels import Buffer, Kernels, Outputs, Scale, block_of
from longshore.layout.memory import PIPELINE_DEPTH
from longshore.layout.tiles import Home, MatrixRange, padded_bytes
from longshore.tiles.arrivals import Accumulate, Arrivals, DeviceSums
from longshore.tiles.events import NO_RECORDER, PUBLISH, Recorder, Recorders
from longshore.tiles.matrix_exchange import LocalExchange, MatrixMemory
from longshore.tiles.memory import BufferKind, BufferPool, PendingReads, Slot, Slots, allocator_on
from longshore.tiles.speculation import SpeculationMemory, Speculator
from longshore.tiles.tile import (
    MASTER,
    ArrayNames,
    ParameterStep,
    Segment,
    Tile,
    TileEvent,
    TileState,
    runs_of_neighbors,
)
from longshore.transfer import Bundle, Copy, CopyStreams, wait_for_all
from longshore.transfer.runner import runner_for

_PART_OF_DEVICE = 4
"""Part of the free memory of a device that other buffers may take while a snapshot is read: one in so many."""
_SUM_SLOTS_STAY = 2
"""Number of steps without a sum after which memory for sums from the device is given back."""

Active = list[tuple[Segment, ParameterStep]]
"""The segments of a tile that have a gradient, with the steps of their parameters."""


class NewValues(NamedTuple):
    """New values of a segment, and the part of the parameter that they belong to."""

    segment: Segment
    output: Tensor
    target: Tensor


class TierSettings(NamedTuple):
    """The settings of one tier."""

    streams: CopyStreams
    kernels: Kernels
    tile_numel: int
    hold_gradients: bool
    """Whether gradients arrive in backward and stay until the step, in a slot for each tile; else tiles share a few."""
    speculation_memory: SpeculationMemory = 0
    """Memory for stepping tiles ahead of the verdict."""
    detect_writes: bool = True
    """Whether the step compares parameters in the tier's own memory with their rounded masters (law 10)."""
    accumulate: Accumulate = "host"
    """Where several gradients of a window are added."""
    home: Home = Home.HOST


class Snapshots:
    """Replacement of buffers that a snapshot has still to read, for the tiles of one tier.

    Args:
        buffers: the tiles' pool, which was made with ``pending_reads``.
        pending_reads: the buffers that are still to be read.
        speculator: lends its spare buffers, if it has any.
        device: device of the buffers.
    """

    def __init__(
        self, buffers: BufferPool, pending_reads: PendingReads, speculator: Speculator, device: torch.device
    ) -> None:
        self._buffers = buffers
        self._pending_reads = pending_reads
        self._speculator = speculator
        self._device = device
        self._most_bytes = 0
        """Limit of the tiles' pool while other buffers are taken from it, in bytes."""
        self.active = False
        """Whether a snapshot may still have buffers to read, or buffers to give back."""

    def prepare(self, memory_bytes: int) -> None:
        """Prepare to take a snapshot.

        Args:
            memory_bytes: host memory for other buffers, if the speculator has none to lend (for buffers on a device, a
                part of the free memory there is used instead). A step that needs more waits for the reader.

        Raises:
            LongshoreError: the previous snapshot is still being read.
        """
        self.collect()
        if self._pending_reads:
            raise LongshoreError("another checkpoint of this optimizer is still being written: wait for it first")
        self.active = True
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the reader is on another stream
            memory_bytes = torch.get_device_module(self._device).mem_get_info(self._device)[0] // _PART_OF_DEVICE
        self._most_bytes = self._buffers.allocated_bytes + memory_bytes

    @contextlib.contextmanager
    def buffer_for(self, tile: Tile) -> Iterator[Buffer | None]:
        """Yield the buffer to step the tile into, which the caller makes the tile's; None: step it in place."""
        old = unused = tile.buffer
        buffer = None if old is None else self._other_than(old, tile.buffer_kind)
        try:
            yield buffer
        except BaseException:
            unused = buffer
            raise
        finally:
            if buffer is not None and unused is not None:
                # An old buffer becomes free once it has been read.
                (self._speculator.spares or self._buffers).give_back(unused)

    def make_writable(self, tile: Tile) -> None:
        """Prepare for a write to the tile's buffer that is not a step."""
        with self.buffer_for(tile) as buffer:
            if buffer is not None and tile.buffer is not None:
                block_of(buffer).copy_(block_of(tile.buffer))
                tile.buffer = buffer

    def collect(self) -> None:
        """Free the buffers that have been read, and after the last of them release the memory that no tile needs."""
        pools = [pool for pool in (self._buffers, self._speculator.spares) if pool is not None]
        for pool in pools:
            pool.collect()
        if self.active and not self._pending_reads and not any(pool.unread for pool in pools):
            self.active = False
            self._buffers.clear()

    def _other_than(self, buffer: Buffer, kind: BufferKind) -> Buffer | None:
        while True:
            released = self._pending_reads.released  # read first, so that a later release ends the wait
            if buffer not in self._pending_reads:
                return None
            self.collect()
            if self._speculator.spares is not None:  # then no tile has its masters elsewhere
                spare = self._speculator.lend(kind)
            else:
                spare = self._buffers.take_within(kind, self._most_bytes)
            if spare is not None:
                return spare
            self._pending_reads.wait_for(released)


class Tier:
    """One memory in which tiles of a store rest, with the kernels that step them there.

    Args:
        settings: the settings of this tier.
        pending_reads: the store's buffers that a snapshot has still to read.

    Attributes:
        elementwise: names of the arrays of parameters whose elements are stepped one by one.
        of_matrices: names of the arrays of matrices.
        ranges: matrices, or parts of them, by their key.
    """

    def __init__(self, settings: TierSettings, pending_reads: PendingReads) -> None:
        self.home = settings.home
        self.hold_gradients = settings.hold_gradients
        streams, kernels, tile_numel = settings.streams, settings.kernels, settings.tile_numel
        assert not streams.staged or kernels.device.type == "cpu"
        self.streams = streams
        self.kernels = kernels
        self._outputs = Outputs.COMPARED if settings.detect_writes and not streams.publishes else Outputs.WRITTEN
        self.tile_numel = tile_numel
        # Grow with parameters.
        self.elementwise = ArrayNames((MASTER,))
        self.of_matrices = ArrayNames((MASTER,), of_matrices=True)
        self.ranges: dict[int, MatrixRange] = {}
        self.tiles: list[Tile] = []
        self.parts: dict[int, list[tuple[Tile, Segment]]] = {}
        """For each parameter, its tiles in this tier, and its segments in them."""
        self.slots = Slots(streams)
        memory = allocator_on(kernels.device)
        self.buffers = BufferPool(memory, pending_reads)
        # Change with each window. The worker's jobs never take the store's lock.
        self.sums = BufferPool(memory)
        self.worker = runner_for(kernels.asynchronous, max(4 * 4 * tile_numel, 1 << 24), streams.begin_job)
        """Runner of the jobs that add later arrivals and step ahead."""
        self.arrivals = Arrivals(streams, kernels, self.sums, self.worker)
        self.device_sums = DeviceSums(streams, settings.accumulate if self.hold_gradients else "host")
        self._without_sums = 0
        """Number of steps since a window had several gradients of a parameter."""
        ahead = 0 if kernels.asynchronous or not self.hold_gradients else settings.speculation_memory
        self._own_masters = not (kernels.asynchronous or streams.publishes or ahead)
        """Whether float32 parameters can be their own masters. A step ahead needs the master as it was, whatever is
        written to the parameter meanwhile."""
        spares = BufferPool(memory, pending_reads)
        self.speculator = Speculator(ahead, spares, streams, kernels, self.worker, self.parts.__getitem__)
        self.snapshots = Snapshots(self.buffers, pending_reads, self.speculator, kernels.device)
        self.exchange = LocalExchange(streams)
        """Transforms matrices of which this process has all."""
        self.matrix_memory = MatrixMemory(streams)

    def outputs_of(self, dtype: torch.dtype, masters: bool) -> Outputs:
        """Return the contents that a step of parameters of this dtype finds in its outputs; ``masters``: the store can
        find the parameters at any time."""
        return Outputs.MASTERS if masters and self._own_masters and dtype == torch.float32 else self._outputs

    def add(self, added: Sequence[Tile]) -> None:
        """Add new tiles, and allocate the staging memory that they need."""
        for tile in added:
            self.tiles.append(tile)
            for parameter, segment in tile.segments.items():
                self.parts[parameter].append((tile, segment))
        if not added or not self.streams.staged:
            return
        shared = [
            tile for tile in added if not self.hold_gradients or (self.streams.publishes and not tile.outputs_fit)
        ]
        if self.hold_gradients:
            sizes = [tile.gradient_bytes for tile in added]
            for tile, slot in zip(added, self.slots.own(sizes), strict=True):
                tile.slot = slot
            self.arrivals.make_slots(max(sizes))
        else:
            for tile in self.tiles:
                tile.slot = None  # growing may free it
        if shared:
            self.slots.grow(max(tile.output_bytes for tile in shared), min(PIPELINE_DEPTH, len(self.tiles)))

    def set_states(self, elementwise: Sequence[str], of_matrices: Sequence[str]) -> None:
        """See :meth:`RangeStates.set_states`; no work may be under way."""
        changed = {
            arrays: (MASTER, *states)
            for arrays, states in ((self.elementwise, elementwise), (self.of_matrices, of_matrices))
            if arrays.names != (MASTER, *states)
        }
        if not changed:
            return
        tiles = [tile for tile in self.tiles if tile.arrays in changed]
        for tile in tiles:
            self.speculator.void(tile)
        self.speculator.forget(tiles)
        self.buffers.forget(tile.buffer_kind for tile in tiles)
        rows = {arrays: [names.index(name) for name in arrays.names] for arrays, names in changed.items()}
        for arrays, names in changed.items():
            arrays.names = names
        for tile in tiles:
            tile.widen_buffer(rows[tile.arrays], self.buffers)

    def remove(self, parameters: Collection[int]) -> None:
        """Forget parameters; a tile of which nothing is left gives its memory back."""
        for parameter in parameters:
            self.device_sums.pop(parameter)
            self.ranges.pop(parameter, None)
            for tile, segment in self.parts.pop(parameter, ()):
                self.speculator.void(tile)
                if segment.arrivals > 0 and tile.forget(segment) == 0:
                    self.end_window([tile], TileEvent.DISCARD)
        gone = [tile for tile in self.tiles if not tile.segments.keys() & self.parts.keys()]
        for tile in gone:
            if tile.buffer is not None:
                self.buffers.give_back(tile.buffer)
            if tile.slot is not None and self.hold_gradients:
                self.slots.own_bytes -= padded_bytes(tile.gradient_bytes)
            if tile.sum_slot is not None:
                self.slots.sum_bytes -= padded_bytes(4 * tile.layout.buffer_numel)
            tile.buffer = tile.slot = tile.sum_slot = tile.sums = None
        self.tiles = [tile for tile in self.tiles if tile not in gone]
        self.buffers.clear()

    def set_recorders(self, recorders: Sequence[Recorder]) -> Recorder:
        """Report to these recorders from now on, and return them as one."""
        recorder = Recorders(recorders) if recorders else NO_RECORDER
        self.streams.time_copies(any(each.times_copies for each in recorders))
        self.worker.working = lambda: recorder.working("host")
        self.exchange.recorder = recorder
        for tile in self.tiles:
            tile.recorder = recorder
        return recorder

    def state_bytes(self) -> dict[str, int]:
        """Return bytes by kind: buffers, gradients (slots, or tensors that arrived), spares, staging, sums."""
        arrived = 0
        for tile in self.tiles if not self.streams.staged else ():
            for segment in tile.segments.values():
                gradient = segment.gradient  # read once, as the worker may replace it by the sum
                if gradient is not None and not segment.summed:
                    arrived += gradient.nbytes
        return {
            "state": self.buffers.allocated_bytes,
            "gradients": self.slots.own_bytes + arrived,
            "spares": self.speculator.spare_bytes,
            "staging": self.slots.passing_bytes + self.arrivals.slot_bytes + self.matrix_memory.num_bytes,
            "accumulators": self.sums.allocated_bytes + self.slots.sum_bytes,
        }

    # -- gradients ------------------------------------------------------------

    def arrive(self, parameter: int, gradient: Tensor) -> None:
        """Take one more gradient of a parameter into the window. This returns at once."""
        parts = self.parts[parameter]
        if parts and not self._keep(parameter, parts, gradient):
            ready = self.streams.mark()
            for tile, segment in parts:
                self.bring(tile, segment, segment.part_of(gradient), ready)
        for tile in [tile for tile, _ in parts if tile.complete]:
            for each in tile.segments if self.device_sums else ():
                if self.device_sums.may_leave(each, self.parts[each]):
                    self._leave(each)
            if self.device_sums.isdisjoint(tile.segments):
                self.speculator.consider(tile)

    def _keep(self, parameter: int, parts: Sequence[tuple[Tile, Segment]], gradient: Tensor) -> bool:
        """Keep a gradient on the device, or add it there; return whether this was done."""
        first, last = parts[0][1], parts[-1][1].layout
        begin, end = first.layout.parameter_offset, last.parameter_offset + last.numel
        if parameter in self.device_sums:
            if not self.device_sums.add(parameter, gradient[begin:end]):
                self._leave(parameter)
                return False
        elif first.arrivals == 0 and self.device_sums.has_room(end - begin, first.expected):
            self.device_sums.keep(parameter, gradient[begin:end], self.streams.mark())
        else:
            return False
        for tile, segment in parts:
            self.arrivals.count(tile, segment)
            self.speculator.drop(tile)
        return True

    def _leave(self, parameter: int) -> None:
        """Copy a gradient that stayed on the device, or a sum, to the host."""
        kept = self.device_sums.checked(parameter)
        parts = self.parts[parameter]
        begin = parts[0][1].layout.parameter_offset
        for tile, segment in parts:
            offset = segment.layout.parameter_offset - begin
            part = kept.values[offset : offset + segment.layout.numel]
            self.arrivals.copy(tile, segment, part, kept.ready)
        self.device_sums.pop(parameter)  # after Ctrl-C it leaves once more

    def let_sums_leave(self) -> BaseException | None:
        """Copy all gradients and sums that stayed on the device to the host; return the first failure, if any. This is
        not called in a hook."""
        try:
            self._make_sum_slots()
            for parameter in self.device_sums:
                self._leave(parameter)
        except Exception as failure:
            return failure
        return None

    def _make_sum_slots(self) -> None:
        """Give tiles pinned memory for the sums that are on the device, if they have none; see :func:`cut_slots`."""
        tiles = {id(tile): tile for parameter in self.device_sums.sums() for tile, _ in self.parts[parameter]}
        without = [tile for tile in tiles.values() if not tile.takes_sums and tile.sums is None]
        if not without:
            return
        self.sums.clear()  # or there would be twice as much memory for a while
        with contextlib.suppress(RuntimeError, OSError, MemoryError):  # other memory is slower
            slots = self.slots.for_sums([4 * tile.layout.buffer_numel for tile in without])
            for tile, slot in zip(without, slots, strict=True):
                tile.have_sum_slot(slot)

    def bring(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Sequence[Mark]) -> None:
        """Take one more gradient of a segment into the window; see :meth:`Arrivals.bring`."""
        self.arrivals.bring(tile, segment, gradient, ready)
        self.speculator.drop(tile)

    def drain(self) -> BaseException | None:
        """Wait for every arrival and every step ahead; return the first failure since the last call, if any."""
        failure: BaseException | None = None
        for tile in self.tiles:
            try:
                if tile.coalesced is not None:
                    tile.coalesced.begin()
            except Exception as error:
                failure = failure or error
        if self.worker.used:
            failure = self.worker.drain() or failure
        self.speculator.harvest()
        return failure

    def block_sums(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> dict[int, Sequence[float]]:
        """Return, by parameter, sums of squares of its blocks here; see :meth:`Store.sum_of_squares`."""
        known = self.speculator.known_squares(scale)
        measured: dict[int, list[Tensor]] = {}
        copies: list[Copy] = []
        for parameter, gradient in gradients.items():
            segments = [segment for _, segment in self.parts[parameter]]
            if parameter in known or not segments:
                continue
            if gradient is None:
                copies += [segment.handle for segment in segments if segment.handle is not None]
                measured[parameter] = [segment.held() for segment in segments]
            else:
                first, last = segments[0].layout, segments[-1].layout
                part = gradient[first.parameter_offset : last.parameter_offset + last.numel]
                measured[parameter] = [self.streams.read(part)]
        wait_for_all(copies)
        sums = self.kernels.block_sums(list(measured.values()), scale)
        return {**known, **dict(zip(measured, sums, strict=True))}

    # -- the step -------------------------------------------------------------

    def fill(self, tile: Tile, active: Active, ready: Sequence[Mark]) -> None:
        """Bring the gradients of a tile that are not on their way yet, and are there once ``ready`` is reached."""
        if self.streams.staged and not self.hold_gradients:
            tile.slot = self.slots.next()
        active.sort(key=lambda pair: pair[0].layout.buffer_offset)
        for segment, step in active:
            if step.gradient is not None:
                assert segment.arrivals == 0  # the worker would still have to add a second one
                self.bring(tile, segment, segment.part_of(step.gradient), ready)
        if tile.coalesced is not None:
            tile.coalesced.begin()

    def output_slot(self, tile: Tile, own: bool = True) -> Slot | None:
        """Return the slot in which a tile's new parameters travel, if they do. ``own``: False if other tiles may have
        been filled since, where tiles share slots."""
        if not self.streams.publishes or (own and tile.outputs_fit):
            return tile.slot
        slot = self.slots.next()
        if slot.last_publish is not None:
            slot.last_publish.wait()  # the kernel writes at once, on no stream
        return slot

    def end_step(self, scale: Scale) -> None:
        """End the window that was stepped with ``scale``, also for tiles with gradients that were not stepped."""
        self.end_window([tile for tile in self.tiles if tile.state is TileState.COMMITTED], TileEvent.PUBLISHED)
        self.end_window([tile for tile in self.tiles if tile.state is not TileState.EMPTY], TileEvent.DISCARD)
        self.sums.trim()
        self.speculator.end_window(self.tiles, scale)
        several, self.arrivals.had_several = self.arrivals.had_several, False
        self.device_sums.end_window(several)
        self._without_sums = 0 if several else self._without_sums + 1
        if self.slots.sum_bytes and self._without_sums > _SUM_SLOTS_STAY:
            self.slots.sum_bytes = 0
            for tile in self.tiles:
                if tile.sum_slot is not None:
                    tile.sum_slot = tile.sums = None

    def end_window(self, tiles: Iterable[Tile], event: TileEvent) -> None:
        for tile in tiles:
            tile.move(event)
            self.speculator.drop(tile)
            sums = tile.end_window(event is TileEvent.PUBLISHED)
            if sums is not None:
                self.sums.give_back(sums)

    def close(self) -> None:
        self.worker.close()
        self.streams.close()

    # -- publishing -----------------------------------------------------------

    def publish(self, tile: Tile, slot: Slot | None, new: Sequence[NewValues]) -> None:
        """Copy new values of a tile to its parameters: those of small neighbors together.

        Args:
            slot: where the new values are, in order; None: they are in no slot.
            new: in the order of the tile's buffer.
        """
        together = self.streams.publishes and slot is not None
        small = [each for each in new if together and each.segment.layout.small]
        alone = [[each] for each in new if not (together and each.segment.layout.small)]
        for run in [*runs_of_neighbors(small, lambda each: each.segment.place), *alone]:
            handle = self._publish_run(tile, slot, run)
            if slot is not None:
                slot.last_publish = handle

    def _publish_run(self, tile: Tile, slot: Slot | None, run: Sequence[NewValues]) -> Copy:
        begin_ns = tile.recorder.begin(PUBLISH, tile.layout.index)
        handle: Copy | None = None
        if slot is not None and len(run) > 1:
            whole, offsets = slot.view_of_run(tile.dtype, [each.segment.layout for each in run])
            targets = Bundle([(each.target, offset) for each, offset in zip(run, offsets, strict=True)])
            with contextlib.suppress(torch.OutOfMemoryError):  # of the memory that they pass through
                handle = self.streams.publish(whole, targets)
        if handle is None:
            for each in run:
                handle = self.streams.publish(each.output, each.target)
        assert handle is not None
        tile.recorder.copying(PUBLISH, tile.layout.index, handle, begin_ns)
        return handle
