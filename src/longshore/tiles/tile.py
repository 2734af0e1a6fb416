"""Tiles: the state machine of a tile, its buffer, its slot, the gradients of its segments, and the step of a parameter.

Small gradients of one tile are copied to the host together, in one copy, since each has a cost of its own.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from longshore.accelerator import Mark
from longshore.errors import BrokenStateError, LongshoreError
from longshore.kernels import Buffer, HostRule, Outputs, Scale, TileSegment, take_arrays
from longshore.layout.formats import FLOAT32_STATES, Coding, StateFormat
from longshore.layout.tiles import SMALL_NUMEL, SegmentLayout, TileLayout
from longshore.tiles.events import NO_RECORDER, STEP_IN_PLACE, Recorder
from longshore.tiles.memory import BufferKind, BufferPool, Slot
from longshore.tiles.window import without_frames
from longshore.transfer import Copy, wait_for_all

MASTER = "master"
"""Name of the first array of every buffer."""

GRADIENT = "gradient"
"""Name of the window's gradient of a parameter where the arrays of its state are read and written by name."""


class Arrival(NamedTuple):
    """A gradient that has arrived: its segment, which is at this place of its tile, and the position from which on the
    gradient is valid (see ``CopyStreams.mark``)."""

    place: int
    segment: SegmentLayout
    gradient: Tensor
    ready: Sequence[Mark]

    @property
    def travels_with_others(self) -> bool:
        """Whether it may wait for others. A part of something large would keep all of that in memory."""
        most_bytes = SMALL_NUMEL * self.gradient.element_size()
        return self.segment.small and self.gradient.untyped_storage().nbytes() < most_bytes


class Waiting:
    """The gradients that wait in coalesced copies; the oldest go when they have more bytes than ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # The worker may begin a coalesced copy while another thread adds to one.
        self._lock = threading.Lock()
        self._bytes = 0
        self._coalesced: deque[CoalescedCopy] = deque()

    def opened(self, opened: CoalescedCopy) -> None:
        self._coalesced.append(opened)

    def change(self, num_bytes: int) -> None:
        """Count bytes that begin to wait, or fewer that do."""
        with self._lock:
            self._bytes += num_bytes

    def limit(self) -> None:
        """Begin the oldest coalesced copies, until few enough bytes wait. Those that have begun are forgotten."""
        while self._coalesced and (self._coalesced[0].begun or self._bytes >= self._most_bytes):
            oldest = self._coalesced.popleft()
            if not oldest.begun:
                oldest.begin()


class CoalescedCopy(Copy):
    """Handle of the copies of small gradients, which begin when it is full or is waited for.

    Args:
        size: how many gradients are expected.
        waiting: counts the bytes that wait.
        start: starts the copies of entries that are neighbors in the tile's buffer.
    """

    def __init__(self, size: int, waiting: Waiting, start: Callable[[Sequence[Arrival]], list[Copy]]) -> None:
        self._size = size
        self._waiting = waiting
        self._start = start
        # The thread that brings gradients adds, and the worker waits.
        self._lock = threading.Lock()
        self._entries: list[Arrival] = []
        self._copies: list[Copy] | None = None
        self._failure: Exception | None = None
        waiting.opened(self)

    @property
    def begun(self) -> bool:
        return self._copies is not None

    def add(self, entry: Arrival) -> bool:
        """Add a gradient, unless the copies have begun; return whether it was added."""
        with self._lock:
            if self._copies is not None:
                return False
            self._entries.append(entry)
            self._waiting.change(entry.gradient.nbytes)
            full = len(self._entries) >= self._size
        if full:
            self.begin()
        self._waiting.limit()
        return True

    def begin(self) -> list[Copy]:
        """Start the copies, if they have not begun, and return them; raise the error of copies that could not start."""
        with self._lock:
            if self._copies is None:
                try:
                    runs = runs_of_neighbors(self._entries, lambda each: each.place)
                    copies = [copy for run in runs for copy in self._start(run)]
                except Exception as failure:  # after Ctrl-C they start once more
                    self._failure, copies = without_frames(failure), []
                self._waiting.change(-sum(entry.gradient.nbytes for entry in self._entries))
                self._copies, self._entries = copies, []
            if self._failure is not None:
                raise copy.copy(self._failure) from self._failure.__cause__  # with this frame: it would be a cycle
            return self._copies

    @property
    def order(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(copy.order for copy in self.begin())

    def done(self) -> bool:
        return self._copies is not None and all(copy.done() for copy in self._copies)

    def wait(self) -> None:
        wait_for_all(self.begin())


Item = TypeVar("Item")


def runs_of_neighbors(items: Iterable[Item], place_of: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
    """Divide items into runs whose segments are next to each other in their tile. Elements between two runs may have
    gradients that arrived before, or values that do not change."""
    ordered = sorted(items, key=place_of)
    begin = 0
    for end, (item, following) in enumerate(pairwise(ordered), start=1):
        if place_of(following) != place_of(item) + 1:
            yield ordered[begin:end]
            begin = end
    if ordered:
        yield ordered[begin:]


class ParameterStep(NamedTuple):
    """Step of one parameter that has a gradient in this window."""

    rule: HostRule
    target: Tensor
    """Tensor for the new values; flat, contiguous, on the device."""
    gradient: Tensor | None
    """Flat, contiguous, on the device; None: the store has it already."""


class Forecast(ABC):
    """Arguments of the next commit, as far as known during backward. A wrong forecast costs time but changes no bit."""

    @abstractmethod
    def scale(self) -> Scale:
        """Return the scale of the gradients if they are not clipped."""

    @abstractmethod
    def rules(self) -> Mapping[int, HostRule]:
        """Return, by parameter, the rule by which it would be stepped now."""


class IllegalTransitionError(LongshoreError):
    """Error of a transition that the state machine of a tile does not have: a bug in longshore."""


class TileState(Enum):
    """State of a tile in its accumulation window."""

    __hash__ = object.__hash__  # that of Enum is a function in Python, and each arrival looks a state up

    EMPTY = auto()
    """No gradient of this window has arrived."""
    FILLING = auto()
    """Some gradients have arrived; more may come, or are still being copied or added."""
    READY = auto()
    """Every gradient that is expected in the window has arrived, or is queued ahead of any pass."""
    STEPPING = auto()
    """A speculative pass writes a spare buffer; the tile's own buffer is only read."""
    STEPPED = auto()
    """The spare buffer holds the step; the tile's own buffer is untouched."""
    COMMITTING = auto()
    """A pass steps the tile in place with the true scale; the buffer is partly old and partly new."""
    COMMITTED = auto()
    """The buffer has the new values; the parameters on the device are still old."""
    BROKEN = auto()
    """A pass failed while it wrote in place. Only loading a state ends this."""


class TileEvent(Enum):
    """Events that change the state of a tile."""

    __hash__ = object.__hash__

    ARRIVAL = auto()
    FORGET = auto()
    """One parameter's gradient is discarded, and others stay."""
    COMPLETE = auto()
    SPECULATE = auto()
    SPECULATED = auto()
    KEEP = auto()
    """The verdict is commit, with the scale that the speculation assumed."""
    REDO = auto()
    """The verdict is commit, with another scale."""
    COMMIT = auto()
    """The verdict is commit, and nothing was speculated."""
    COMMIT_DONE = auto()
    COMMIT_FAILED = auto()
    PUBLISHED = auto()
    DISCARD = auto()
    """The window is discarded, or its step is skipped."""
    LOAD = auto()
    """A state is loaded over whatever the tile held."""


_S, _E = TileState, TileEvent
_WITH_GRADIENTS = (_S.FILLING, _S.READY, _S.STEPPING, _S.STEPPED)
_MOVES: dict[TileEvent, tuple[Iterable[TileState], TileState]] = {
    _E.ARRIVAL: ((_S.EMPTY, *_WITH_GRADIENTS), _S.FILLING),
    _E.FORGET: (_WITH_GRADIENTS, _S.FILLING),
    _E.COMPLETE: ((_S.FILLING,), _S.READY),
    _E.SPECULATE: ((_S.READY,), _S.STEPPING),
    _E.SPECULATED: ((_S.STEPPING,), _S.STEPPED),
    _E.KEEP: ((_S.STEPPED,), _S.COMMITTED),
    _E.REDO: ((_S.STEPPED,), _S.READY),
    _E.COMMIT: ((_S.FILLING, _S.READY), _S.COMMITTING),
    _E.COMMIT_DONE: ((_S.COMMITTING,), _S.COMMITTED),
    _E.COMMIT_FAILED: ((_S.COMMITTING,), _S.BROKEN),
    _E.PUBLISHED: ((_S.COMMITTED,), _S.EMPTY),
    _E.DISCARD: ((_S.EMPTY, *_WITH_GRADIENTS), _S.EMPTY),
    _E.LOAD: (TileState, _S.EMPTY),
}
TRANSITIONS = {(state, event): after for event, (befores, after) in _MOVES.items() for state in befores}
"""The next state for each pair of a state and an event that it allows."""


class Segment:
    """One parameter's range of a tile, with its gradient of the window."""

    def __init__(self, layout: SegmentLayout, place: int, coding: Coding = FLOAT32_STATES) -> None:
        self.layout = layout
        self.coding = coding
        """How the states of its elements are encoded."""
        self.place = place
        """How many segments are before this one in the buffer."""
        self.expected = 0
        """Number of arrivals in this window if it is like the last one; 0: unknown."""
        self.clear()

    def clear(self) -> None:
        self.arrivals = 0
        """The only count of arrivals (law 1): the first gradient is copied, each later one is added in float32."""
        self.gradient: Tensor | None = None
        """The gradient that arrived, or the sum of several; complete once ``handle`` is done."""
        self.handle: Copy | None = None
        self.summed = False
        """Whether ``gradient`` is the float32 sum in the tile's memory for sums."""
        self.adding = False
        """Whether the host adds later gradients to that sum, or will."""

    def part_of(self, values: Tensor) -> Tensor:
        """Return a view of the segment's range of ``values``, which has a value for each element of the parameter."""
        offset, numel = self.layout.parameter_offset, self.layout.numel
        return values if numel == values.numel() else values[offset : offset + numel]

    def sum_is(self, total: Tensor) -> None:
        """Set the gradient to a sum in the tile's memory for sums."""
        self.summed, self.gradient, self.handle = True, total, None

    def wait(self) -> Tensor:
        """Wait until the gradient's copy is done, and return the gradient."""
        if self.handle is not None:
            self.handle.wait()
        return self.held()

    def held(self) -> Tensor:
        """Return the gradient, whose copy may still be under way."""
        assert self.gradient is not None
        return self.gradient


class SegmentStep(NamedTuple):
    """Step of one segment that has a gradient in this window: its rule, and the tensor for its new values."""

    segment: Segment
    rule: HostRule
    output: Tensor


def step_table(
    steps: Sequence[SegmentStep], gradients: Sequence[Tensor | None]
) -> tuple[list[TileSegment], list[HostRule]]:
    """Return a kernel's arguments: a row for each segment, with its gradient, and the rules that the rows refer to."""
    # Keyed by identity: parameters of one group and history share a rule, and hashing a rule costs more than a row.
    rules: dict[int, tuple[int, HostRule]] = {}
    rows = []
    for (segment, rule, output), gradient in zip(steps, gradients, strict=True):
        index, _ = rules.setdefault(id(rule), (len(rules), rule))
        assert gradient is not None
        rows.append(TileSegment(segment.layout.buffer_offset, gradient, output, index, segment.coding))
    return rows, [rule for _, rule in rules.values()]


class ArrayNames:
    """Names of the arrays of the buffers of several tiles: the master, then the states of their rule.

    ``of_matrices``: whether each parameter is stepped as matrices, and has tiles of its own.
    """

    def __init__(self, names: tuple[str, ...], of_matrices: bool = False) -> None:
        self.names = names
        self.of_matrices = of_matrices


class Tile:
    """Consecutive elements of parameters, the unit that is copied, stepped and published."""

    def __init__(
        self,
        layout: TileLayout,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        arrays: ArrayNames,
        outputs: Outputs = Outputs.WRITTEN,
        codings: Mapping[int, Coding] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        found = [codings.get(segment.parameter, FLOAT32_STATES) for segment in layout.segments]
        self.format: StateFormat = found[0].format if found else StateFormat.FP32
        """Format of the states of all its segments."""
        self.dtype = dtype
        self.gradient_dtype = gradient_dtype
        self.arrays = arrays
        self.outputs = outputs
        """What the memory that a step in place writes new parameters to has before it."""
        self.recorder: Recorder = NO_RECORDER
        self.segments = {
            segment.parameter: Segment(segment, place, coding.behind(segment.parameter_offset))
            for place, (segment, coding) in enumerate(zip(layout.segments, found, strict=True))
        }
        self._small = [segment for segment in self.segments.values() if segment.layout.small]
        self.output_bytes = layout.buffer_numel * dtype.itemsize
        self.gradient_bytes = layout.buffer_numel * gradient_dtype.itemsize
        self.outputs_fit = gradient_dtype == dtype
        """Whether new parameters can replace their gradients in memory, element by element."""
        self.slot: Slot | None = None
        """Slot for gradients on their way in and, if ``outputs_fit``, for new parameters on their way out."""
        # Set when the first gradient arrives.
        self.buffer: Buffer | None = None
        # Change with each window.
        self.state = TileState.EMPTY
        self.window = 0
        """Number of windows that have ended."""
        self.version = 0
        """Changes with every arrival, every discarded gradient and every window; work for an old version is dropped."""
        self.filled = 0
        """Number of segments that have a gradient."""
        self._missing = 0
        """Number of segments that still expect gradients."""
        self._expects = False
        """Whether any segment expects gradients in this window, arrived ones included."""
        self.small_expected = len(self._small)
        """Number of small segments that expect gradients in this window; all, if it is not known."""
        self.coalesced: CoalescedCopy | None = None
        """The small gradients of this window that arrived last, to be copied together."""
        self.sums: Tensor | None = None
        """Sums of several gradients, float32 ``[1, buffer_numel]``."""
        self.sum_slot: Slot | None = None
        """Slot for sums that come from the device, which has ``sums`` then."""
        self.spare: Buffer | None = None
        """The buffer that a step ahead of the verdict has written."""

    @property
    def own_master(self) -> bool:
        """Whether the parameters are their own masters, which the buffer then lacks."""
        return self.outputs is Outputs.MASTERS

    @property
    def buffer_kind(self) -> BufferKind:
        return BufferKind(self.layout.buffer_numel, len(self.arrays.names), self.format, self.own_master)

    def move(self, event: TileEvent) -> None:
        """Change to the state that follows ``event``.

        Raises:
            BrokenStateError: the tile is broken, and ``event`` is not LOAD.
            IllegalTransitionError: the table has no such transition.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is not None:
            self.state = after
        elif self.state is TileState.BROKEN:
            raise BrokenStateError(
                "an earlier step failed half way, so some weights were stepped and others were not; "
                "load a saved state with load_state_dict (and the model's weights) before going on"
            )
        else:
            raise IllegalTransitionError(f"a tile that is {self.state.name} cannot take {event.name}")

    @contextlib.contextmanager
    def stepping(self, buffer: Buffer, rows: Sequence[TileSegment]) -> Iterator[None]:
        """Record a pass in the block, which may write in place: if it fails, a tile that is COMMITTING is BROKEN."""
        begin_ns = self.recorder.begin(STEP_IN_PLACE, self.layout.index)
        try:
            yield
        except BaseException:
            if self.state is TileState.COMMITTING:
                self.move(TileEvent.COMMIT_FAILED)
            raise
        finally:
            self.recorder.passed(STEP_IN_PLACE, self.layout.index, buffer, rows, begin_ns)

    def arrived(self, segment: Segment) -> None:
        """Count one more arrival, which invalidates a step ahead, finished or under way."""
        self.move(TileEvent.ARRIVAL)
        self.version += 1
        self.filled += segment.arrivals == 0
        segment.arrivals += 1
        self._missing -= segment.arrivals == segment.expected

    @property
    def complete(self) -> bool:
        """Whether every gradient that is expected in this window has arrived."""
        return self._expects and self._missing == 0

    def expect(self, arrivals: int) -> None:
        """Expect ``arrivals`` gradients for each segment that got any in the last window."""
        for segment in self.segments.values():
            if segment.expected > 0:
                segment.expected = arrivals
        self._count_missing()

    def _count_missing(self) -> None:
        self._missing = sum(segment.arrivals < segment.expected for segment in self.segments.values())
        self._expects = any(segment.expected > 0 for segment in self.segments.values())
        self.small_expected = sum(segment.expected > 0 for segment in self._small) or len(self._small)

    def forget(self, segment: Segment) -> int:
        """Drop one segment's gradient, and return how many other segments have one."""
        self.filled -= segment.arrivals > 0
        self._missing += 0 < segment.expected <= segment.arrivals
        segment.clear()
        if self.filled > 0:
            self.move(TileEvent.FORGET)
            self.version += 1
        return self.filled

    def queued_gradient(self, segment: Segment) -> Tensor:
        """Return the segment's gradient, or the sum of several, which is valid once its queued jobs are done."""
        if segment.adding:
            return self.sum_of(segment)
        assert segment.gradient is not None
        return segment.gradient

    def sum_of(self, segment: Segment) -> Tensor:
        """Return the memory of a segment's sum."""
        assert self.sums is not None
        return self.sums[0, segment.layout.in_buffer]

    def have_sum_slot(self, slot: Slot) -> None:
        self.sum_slot, self.sums = slot, slot.whole(torch.float32).unsqueeze(0)

    @property
    def takes_sums(self) -> bool:
        """Whether there is memory to which sums can be copied from the device."""
        return self.gradient_dtype == torch.float32 or self.sum_slot is not None

    def slot_for(self, gradient: Tensor) -> Slot | None:
        """Return the slot for a gradient, or for a sum that comes from the device; None: there is none."""
        return self.slot if self.slot is None or gradient.dtype == self.gradient_dtype else self.sum_slot

    def dtype_in(self, slot: Slot) -> torch.dtype:
        """Return the dtype of gradients, or sums, in a slot."""
        return torch.float32 if slot is self.sum_slot else self.gradient_dtype

    def have_buffer(self, buffers: BufferPool) -> Buffer:
        """Return the buffer; take one of zeros if there is none yet."""
        if self.buffer is None:
            self.buffer = buffers.take_zeros(self.buffer_kind)
        return self.buffer

    def widen_buffer(self, rows: Sequence[int], buffers: BufferPool) -> None:
        """Move to a buffer with more arrays; ``rows`` are the new rows of the present arrays, other rows are zero."""
        assert self.spare is None  # a spare would have the old shape
        buffer = self.buffer
        if buffer is not None:
            self.buffer = buffers.take_zeros(self.buffer_kind)
            take_arrays(self.buffer, buffer, [row - self.own_master for row in rows if row >= self.own_master])
            buffers.give_back(buffer)

    def idle_parts(self, steps: Sequence[SegmentStep]) -> list[slice]:
        """Return the ranges of the buffer that ``steps`` do not change."""
        stepped = {step.segment.layout.parameter for step in steps}
        return [segment.in_buffer for segment in self.layout.segments if segment.parameter not in stepped]

    def keep_spare(self, spares: BufferPool) -> None:
        """Make the spare the tile's buffer, and return the old buffer to the pool (STEPPED -> COMMITTED)."""
        self.move(TileEvent.KEEP)
        old, self.buffer, self.spare = self.buffer, self.spare, None
        assert old is not None
        spares.give_back(old)

    def redo(self, spares: BufferPool) -> None:
        """Drop a step with the wrong scale (STEPPED -> READY); the buffer was never changed."""
        self.move(TileEvent.REDO)
        self.drop_spare(spares)

    def drop_spare(self, spares: BufferPool) -> None:
        """Give the spare back to the pool, if there is one."""
        spare, self.spare = self.spare, None  # in this order: after Ctrl-C it may be lost, but is not given back twice
        if spare is not None:
            spares.give_back(spare)

    def end_window(self, stepped: bool) -> Tensor | None:
        """End the window, and return memory of its sums that others may have now. If it was stepped, the next window is
        expected to be like it."""
        for segment in self.segments.values():
            if stepped:
                segment.expected = segment.arrivals
            segment.clear()
        self.filled = 0
        self.coalesced = None
        self._count_missing()
        self.window += 1
        self.version += 1
        if self.sum_slot is not None:
            return None
        sums, self.sums = self.sums, None
        return sums
