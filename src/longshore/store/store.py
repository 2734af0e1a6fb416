"""Store of an optimizer: its state, and the gradients of the accumulation window, by parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from longshore.kernels import Scale
from longshore.layout.tiles import Range, Spec
from longshore.tiles import Breakage, Ended, Forecast, ParameterStep, Recorder, Tiles


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


class Store:
    """Optimizer state and gradients by parameter. This process has all of it; a subclass shares it with other ranks.

    Parameters are known by index, as flat tensors. A parameter's elements are in ranges, which are tiled; here each
    parameter with elements has one, whose key is the parameter's index.

    Attributes:
        alone: whether this process has all of the state.
        tiles: tiles of the ranges that this process steps, by their keys.
        residence: place of the parameters between their uses.
        window: the accumulation window, which :meth:`discard`, :meth:`commit` and :meth:`begin_load` end.
        several: whether a window that several ranks stepped, in this run or in one from which it goes on, had several
            gradients of one parameter.
    """

    alone: ClassVar[bool] = True

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles
        self.residence = Residence()
        self.window = tiles.window
        self.several = False
        self._numels: dict[int, int] = {}

    @property
    def broken(self) -> Breakage | None:
        """Why a commit, or the loading of a checkpoint, ended half way; nothing is stepped until a whole state is
        loaded."""
        return self.tiles.broken

    @broken.setter
    def broken(self, broken: Breakage | None) -> None:
        self.tiles.broken = broken

    def add_parameters(self, specs: Iterable[Spec]) -> None:
        """Lay out parameters, in forward's order if it is known: gradients come in reverse order."""
        added = list(specs)
        self._numels.update((spec.key, spec.numel) for spec in added)
        self.tiles.add(added)

    def remove(self, parameters: Collection[int]) -> None:
        """Forget parameters, with their state and gradients; ranks that share the state have to keep them."""
        assert self.alone
        self.tiles.remove(parameters)
        for parameter in parameters:
            self._numels.pop(parameter, None)

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._numels

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
        ranges = self.owned(parameter) if parameter in self else ()
        return min((self.tiles.reduced(each.key) for each in ranges), default=0)

    def forget(self, parameter: int) -> None:
        """Drop the gradients of one parameter; no state changes."""
        self.tiles.discard(parameter)

    def discard(self, how: Ended = Ended.DISCARDED) -> None:
        """Drop all gradients, and end the window; no state changes."""
        self.tiles.discard()
        self.window.end(how)

    def foresee(self, forecast: Forecast) -> None:
        """Set the forecast of the next commit, for tiles that are stepped ahead of it."""
        self.tiles.foresee(forecast)

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
        self.check_usable()
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

    # -- state ----------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise BrokenStateError if the state is broken."""
        self.tiles.check_usable()

    def meet(self, loading: bool) -> None:
        """Wait until all ranks are about to save or load a checkpoint. Raises RankError if one does something else."""
        return

    def begin_load(self) -> None:
        """Discard the window and reset ``broken``, because whole states are about to be written."""
        self.tiles.begin_load()
        self.window.end(Ended.DISCARDED)

    def _before_writing(self) -> None:
        """Prepare to write state; called before any of it is written."""
        return

    def owned(self, parameter: int) -> Sequence[Range]:
        """Return the ranges of a parameter whose state this process keeps."""
        numel = self._numels[parameter]
        return [Range(parameter, parameter, 0, numel)] if numel > 0 else []

    def part(self, parameter: int, values: Tensor) -> Tensor:
        """Return the part of a whole parameter, flat, in which the ranges that this process keeps count."""
        return values

    def held(self, parameter: int, values: Tensor) -> Tensor:
        """Return the part of a whole parameter, flat, that this process has where parameters compute."""
        return values

    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        """Set the master to ``values`` (flat, on the device).

        With ``keep_matching``, elements whose rounded master equals the value keep all float32 digits of their master.
        """
        self.check_usable()
        self._before_writing()
        for each in self.owned(parameter):
            self.tiles.adopt(each.key, values[each.held], keep_matching=keep_matching)

    def count_differing(self, parameter: int, values: Tensor) -> int:
        """Return how many elements of ``values`` differ from the rounded master; bits are compared."""
        return sum(self.tiles.count_differing(each.key, values[each.held]) for each in self.owned(parameter))

    def differs(self, parameter: int, which: str, values: Tensor) -> bool:
        """Return whether any bit of one array of the parameter, of the part in this process, is not that of ``values``
        (float32, flat, on the CPU)."""
        values = self.part(parameter, values)
        return any(self.tiles.differs(each.key, which, values[each.elements]) for each in self.owned(parameter))

    def read_state(self, parameter: int, which: str) -> Tensor:
        """Return a copy of one whole array of the parameter, by name: float32, flat, on the host. All ranks have to
        call this.

        :data:`GRADIENT` is read after :meth:`agree`; it has no elements if the window brought no gradient.
        """
        self.check_usable()
        parts = [self.tiles.read_state(each.key, which) for each in self.owned(parameter)]
        return parts[0] if parts else torch.empty(0, dtype=torch.float32, device="cpu")

    def read_values(self, parameter: int, held: Tensor) -> Tensor:
        """Return the whole parameter, flat; ``held`` is the part of it that this process has on its device."""
        return held

    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        """Set one array of the parameter, by name, from a flat tensor; :data:`GRADIENT` only if there is one."""
        self._before_writing()
        values = self.part(parameter, values)
        for each in self.owned(parameter):
            self.tiles.write_state(each.key, which, values[each.elements])

    def clear_state(self, parameter: int) -> None:
        """Zero all arrays of the parameter; one that was never trained has none."""
        self._before_writing()
        for each in self.owned(parameter) if parameter in self else ():
            self.tiles.clear_state(each.key)

    def close(self) -> None:
        """Wait for work under way, and end threads and streams."""
        self.tiles.close()
