"""Store of an optimizer: its state, and the gradients of the accumulation window, by parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.kernels import Scale
from longshore.layout.tiles import Range, Spec
from longshore.tiles import Breakage, Ended, Forecast, ParameterStep, RangeStates, Recorder, Tiles


class Residence:
    """Place of the parameters between their uses: here their device, all of them all the time."""

    def is_whole(self, parameter: int) -> bool:
        """Return whether a sharded parameter is whole now, inside a block of ``gather()``."""
        return False

    def check_handles(self) -> None:
        """Raise ParameterError if scripts changed sharded parameters where that would not be seen."""

    def interrupted(self, trains: bool) -> bool:
        """Return whether the others have to know that a forward raised, if this rank discards the window, which may
        also go on. ``trains``: not for evaluation."""
        return trains

    def free(self) -> None:
        """Free the parameters that were gathered: they are about to change, or their memory is needed."""


class Ownership:
    """Parameters of a store, by index, and the part of their state that this process has: here all of it.

    A parameter's state is kept by ranges of its elements, each under a key; here a parameter with elements has one
    range, whose key is its index. Values of whole parameters are flat.

    Attributes:
        alone: whether this process has all of the state.
    """

    alone = True

    def __init__(self) -> None:
        self._numels: dict[int, int] = {}

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._numels

    def add(self, specs: Iterable[Spec]) -> Sequence[Spec]:
        """Add parameters, and return the ranges of them that this process steps."""
        added = list(specs)
        self._numels.update((spec.key, spec.numel) for spec in added)
        return added

    def remove(self, parameters: Collection[int]) -> None:
        """Forget parameters."""
        for parameter in parameters:
            self._numels.pop(parameter, None)

    def owned(self, parameter: int) -> Sequence[Range]:
        """Return the ranges of a parameter whose state this process keeps."""
        numel = self._numels[parameter]
        return [Range(parameter, parameter, 0, numel)] if numel > 0 else []

    def part(self, parameter: int, values: Tensor) -> Tensor:
        """Return the part of a whole parameter in which the ranges that this process keeps count."""
        return values

    def held(self, parameter: int, values: Tensor) -> Tensor:
        """Return the part of a whole parameter that this process has where parameters compute."""
        return values

    def assemble(self, parameter: int, which: str, read: Callable[[Range], Tensor]) -> Tensor:
        """Return a whole parameter's state (float32) from its ranges; ``read`` returns that of an owned range, and
        ``which`` is its name. All ranks have to call this method."""
        parts = [read(each) for each in self.owned(parameter)]
        return parts[0] if parts else torch.empty(0, dtype=torch.float32, device="cpu")

    def assemble_values(self, parameter: int, held: Tensor) -> Tensor:
        """Return a whole parameter (at stage 3 float32, on the CPU); ``held`` is the part that this process has on its
        device. All ranks have to call this method."""
        return held

    def check_open(self) -> None:
        """Raise LongshoreError if the store was closed, and needs others to read or write its state."""

    def drain(self) -> None:
        """Wait for gradients that come from other ranks; each may start work that reads state. Raises their failure."""


class States:
    """State of parameters, by index, and by the name of an array: that of a state, :data:`MASTER` or :data:`GRADIENT`.

    Values are flat.

    Attributes:
        ranges: state of the ranges that this process has.
    """

    def __init__(self, tiles: Tiles, ownership: Ownership) -> None:
        self.ranges = RangeStates(tiles)
        self._tiles = tiles
        self._ownership = ownership

    def check_usable(self) -> None:
        """Raise BrokenStateError if the state is broken, LongshoreError if it is closed or another process's."""
        self._ownership.check_open()
        self._tiles.check_usable()

    def read(self, parameter: int, which: str) -> Tensor:
        """Return a copy of one whole array of the parameter: float32, on the host. All ranks have to call this.

        :data:`GRADIENT` is read after :meth:`Store.agree`; it has no elements if the window brought no gradient.
        """
        self.check_usable()
        return self._ownership.assemble(parameter, which, lambda each: self.ranges.read(each.key, which))

    def differs(self, parameter: int, which: str, values: Tensor) -> bool:
        """Return whether any bit of one array, of the part in this process, is not that of ``values`` (float32, of the
        whole parameter, on the CPU)."""
        values = self._ownership.part(parameter, values)
        return any(
            self.ranges.differs(each.key, which, values[each.elements]) for each in self._ownership.owned(parameter)
        )

    # -- writing --------------------------------------------------------------

    def before_writing(self) -> None:
        """Wait for gradients that come from other ranks; a failure of theirs fails the window."""
        self._ownership.check_open()
        try:
            self._ownership.drain()
        except LongshoreError as failure:
            self._tiles.window.fail(failure)

    def write(self, parameter: int, which: str, values: Tensor) -> None:
        """Set one array from values of the whole parameter; :data:`GRADIENT` only if there is one."""
        self.before_writing()
        values = self._ownership.part(parameter, values)
        for each in self._ownership.owned(parameter):
            self.ranges.write(each.key, which, values[each.elements])

    def clear(self, parameter: int) -> None:
        """Zero all arrays of the parameter; one that was never trained has none."""
        self.before_writing()
        for each in self._ownership.owned(parameter) if parameter in self._ownership else ():
            self.ranges.clear(each.key)

    def begin_load(self) -> None:
        """Discard the window and end a breakage, because whole states are about to be written."""
        self.before_writing()
        self._tiles.begin_load()
        self._tiles.window.end(Ended.DISCARDED)

    def load_failed(self, reason: str) -> None:
        """Break the state, because a checkpoint was loaded in part only: nothing is stepped until a whole one is."""
        self._tiles.broken = Breakage(reason, loading=True, shared=not self._ownership.alone)

    # -- parameters that others wrote -----------------------------------------

    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        """Set the master to ``values``, the part that this process has where parameters compute.

        With ``keep_matching``, elements whose rounded master equals the value keep all float32 digits of their master.
        """
        self.check_usable()
        self.before_writing()
        for each in self._ownership.owned(parameter):
            self.ranges.adopt(each.key, values[each.held], keep_matching=keep_matching)

    def count_differing(self, parameter: int, values: Tensor) -> int:
        """Return how many elements of ``values``, as of :meth:`adopt`, differ from the rounded master; bits are
        compared."""
        owned = self._ownership.owned(parameter)
        return sum(self.ranges.count_differing(each.key, values[each.held]) for each in owned)


class Store:
    """Optimizer state and gradients by parameter. This process has all of it; a subclass shares it with other ranks.

    Parameters are known by index, as flat tensors. A parameter's elements are in ranges, which are tiled.

    Attributes:
        tiles: tiles of the ranges that this process steps, by their keys.
        ownership: the parameters, and the part of their state that this process has.
        alone: whether that is all of it.
        states: the state.
        residence: place of the parameters between their uses.
        window: the accumulation window, which :meth:`discard`, :meth:`commit` and :meth:`States.begin_load` end.
        several: whether a window that several ranks stepped, in this run or in one from which it goes on, had several
            gradients of one parameter.
    """

    def __init__(self, tiles: Tiles, ownership: Ownership | None = None) -> None:
        self.tiles = tiles
        self.ownership = Ownership() if ownership is None else ownership
        self.alone = self.ownership.alone
        self.states = States(tiles, self.ownership)
        self.residence = Residence()
        self.window = tiles.window
        self.several = False

    def add_parameters(self, specs: Iterable[Spec]) -> None:
        """Lay out parameters, in forward's order if it is known: gradients come in reverse order."""
        self.tiles.add(self.ownership.add(specs))

    def remove(self, parameters: Collection[int]) -> None:
        """Forget parameters, with their state and gradients; ranks that share the state have to keep them."""
        assert self.alone
        self.tiles.remove(parameters)
        self.ownership.remove(parameters)

    def set_recorders(self, recorders: Iterable[Recorder]) -> None:
        """Report the events of each tile to these recorders, and to no others, from now on."""
        self.tiles.set_recorders(recorders)

    # -- the accumulation window ----------------------------------------------

    def begin_backward(self, reduce: bool, last: bool) -> None:
        """Begin a backward, the ``last`` of its window as far as known; without ``reduce``, gradients stay on ranks."""
        return

    def end_backward(self, failure: BaseException | None) -> None:
        """End the backward that began; ``failure`` is the error that it raised, if any: it ends the window, and every
        rank is told of it."""
        if failure is not None:
            self.window.fail(failure)
            self.window.gave_up = True

    def arrive(self, parameter: int, gradient: Tensor, *, by_hook: bool = True) -> Tensor | None:
        """Take one more gradient of ``parameter`` (flat, on the device) into the window; the caller may drop it.

        With ``by_hook=False``, for a gradient that no hook saw, a store may return it; :meth:`commit` then gets it.
        """
        if not by_hook:
            return gradient
        self.tiles.arrive(parameter, gradient)
        return None

    def interrupted(self, trains: bool) -> None:
        """Note that a forward raised, after which the window may still go on. ``trains``: not for evaluation."""
        if self.residence.interrupted(trains):
            self.window.interrupted = True

    def arrivals(self, parameter: int) -> int:
        """Return how many gradients of ``parameter`` this process brought into the window."""
        return self.tiles.arrivals(parameter)

    def reduced(self, parameter: int) -> int | None:
        """Return how many gradients of ``parameter``, reduced over ranks, are here; None if it is stepped elsewhere."""
        ranges = self.ownership.owned(parameter) if parameter in self.ownership else ()
        return min((segment.arrivals for each in ranges for _, _, segment in self.tiles.placed(each.key)), default=0)

    def forget(self, parameter: int) -> None:
        """Drop the gradients of one parameter; no state changes."""
        self.tiles.discard(parameter)

    def discard(self, how: Ended = Ended.DISCARDED) -> None:
        """Drop all gradients, and end the window; no state changes."""
        self.tiles.discard()
        self.window.end(how)

    def foresee(self, forecast: Forecast) -> None:
        """Set the forecast of the next commit, for tiles that are stepped ahead of it."""
        for tier in self.tiles.tiers:
            tier.speculator.forecast = forecast

    def expect_backwards(self, backwards: int) -> None:
        """Set the number of backwards of the current window; without this, it is expected to be that of the last."""
        self.tiles.expect_backwards(backwards)

    # -- the step -------------------------------------------------------------

    def ranks_with_raw(self, raw: bool) -> Sequence[int]:
        """Return the ranks that come with ``raw`` True to a ``step()`` that no ``engine.backward()`` came before; none
        if this process is alone."""
        return ()

    def agree(
        self, found: Mapping[int, Tensor | None], failure: BaseException | None = None, *, reading: bool = False
    ) -> Mapping[int, Tensor | None]:
        """Return the window's gradients, for the same parameters on all ranks, from those that this process ``found``.

        If one rank passes the ``failure`` that it had while finding them, all ranks raise. ``reading``: no step
        follows, so that parameters may be whole meanwhile.
        """
        self.states.check_usable()
        self.window.check()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame: a cycle, with the store in it
        return found

    def preparing(self, same: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
        """Return a context for work between :meth:`agree` and :meth:`commit`: if it raises on one rank, none commits.

        Raises RankError if tensors in ``same`` (by name; empty unless debugging) have other bits on another rank.
        """
        return nullcontext()

    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        """Return the sum of squares of all (scaled) gradients in float64.

        ``gradients`` has flat tensors on the device, or None where the window has the gradient.
        """
        return self.tiles.sum_of_squares(gradients, scale)

    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        """Step every parameter in ``steps``, publish it, and end the window.

        On return, the current stream sees the new parameters. The commit calls ``then``, the caller's bookkeeping.

        Raises:
            GradientError: the window is incomplete; nothing was stepped.
            BrokenStateError: this or an earlier commit failed half way.
        """
        self.tiles.commit(steps, scale, then)
        self.window.end(Ended.STEPPED)

    def meet(self, loading: bool) -> None:
        """Wait until all ranks are about to save or load a checkpoint. Raises RankError if one does something else."""
        return

    def close(self) -> None:
        """Wait for work under way, and end threads and streams."""
        self.tiles.close()
