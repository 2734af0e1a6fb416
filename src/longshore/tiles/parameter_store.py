"""The interface of the store that has an optimizer's state and the gradients of the accumulation window.

Parameters are known by index, as flat tensors. :class:`~longshore.tiles.TileStore` has all of it in this process; a
sharded store has one rank's part there and asks the other ranks for the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from longshore.kernels import Scale
from longshore.tiles.events import Recorder
from longshore.tiles.steps import Forecast, OwnedRange, ParameterStep
from longshore.tiles.store import TileStore


class ParameterStore(Protocol):
    """Optimizer state and gradients by parameter.

    Attributes:
        local: the tiles of this process, which have all parameters or this rank's part of them.
        broken: the failure of a commit, or of the loading of a checkpoint, that ended half way; nothing is stepped
            until a whole state is loaded.
        recorders: are told of the events of the tiles.
    """

    local: TileStore
    broken: BaseException | None
    recorders: tuple[Recorder, ...]

    @abstractmethod
    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        """Lay out ``(index, numel, dtype)``, in forward's order if it is known: gradients come from the last one on."""

    @abstractmethod
    def __contains__(self, parameter: int) -> bool: ...

    @abstractmethod
    def set_recorders(self, recorders: Iterable[Recorder]) -> None:
        """Tell these recorders, and no others, of the events of each tile from here on."""

    # -- the accumulation window ----------------------------------------------

    @abstractmethod
    def begin_backward(self, reduce: bool, last: bool) -> None:
        """A backward begins, as far as known the ``last`` of its window; without ``reduce`` gradients stay on ranks."""

    @abstractmethod
    def end_backward(self, failure: BaseException | None) -> None:
        """The backward that began is over; ``failure`` is what it raised."""

    @abstractmethod
    def fail(self, failure: BaseException) -> None:
        """The window cannot be stepped any more; the first reason counts, and every rank hears of it in the step."""

    @abstractmethod
    def arrive(self, parameter: int, gradient: Tensor, *, by_hook: bool = True) -> Tensor | None:
        """Take one more gradient of ``parameter`` (flat, on the device) into the window; the caller may drop it.

        With ``by_hook=False``, for one that no hook saw, a store may return it, to be given to :meth:`commit`.
        """

    @abstractmethod
    def arrivals(self, parameter: int) -> int:
        """How many gradients of ``parameter`` this process brought into the window."""

    @abstractmethod
    def reduced(self, parameter: int) -> int | None:
        """How many gradients of ``parameter``, reduced over the ranks, are here; None if it is not stepped here."""

    @abstractmethod
    def discard(self, parameter: int | None = None) -> None:
        """Drop the window, or one parameter's gradients; no state changes."""

    @abstractmethod
    def foresee(self, forecast: Forecast) -> None:
        """Set the forecast of the next commit, for stores that step ahead of it."""

    @abstractmethod
    def expect_backwards(self, backwards: int) -> None:
        """The window under way will have so many; otherwise as many as the last one."""

    # -- the step -------------------------------------------------------------

    @abstractmethod
    def agree(
        self, found: Mapping[int, Tensor | None], failure: BaseException | None = None
    ) -> Mapping[int, Tensor | None]:
        """The gradients of the window, the same parameters on all ranks, from those that this process ``found``.

        If finding them was a ``failure`` on one rank, all ranks raise.
        """

    @abstractmethod
    def preparing(self, same: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
        """A context between :meth:`agree` and :meth:`commit`: if it raises on one rank, no rank commits.

        Raises RankError if tensors in ``same`` (by name; empty unless debugging) have other bits on another rank.
        """

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        """The sum of squares of all (scaled) gradients in float64.

        ``gradients`` has flat tensors on the device, or None where the window has the gradient.
        """

    @abstractmethod
    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        """Step every parameter in ``steps``, publish it, and end the window.

        On return the current stream sees the new parameters. ``then`` is the caller's bookkeeping, and part of it.

        Raises:
            GradientError: the window is incomplete; nothing was stepped.
            BrokenStateError: this or an earlier commit failed half way.
        """

    # -- state ----------------------------------------------------------------

    @abstractmethod
    def check_usable(self) -> None:
        """Raise BrokenStateError if the state is broken."""

    @abstractmethod
    def begin_load(self) -> None:
        """Discard the window and leave the broken state; whole states are about to be written."""

    @abstractmethod
    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        """Take ``values`` (flat, on the device) as the master.

        With ``keep_matching``, elements whose rounded master is the value keep all float32 digits of their master.
        """

    @abstractmethod
    def count_differing(self, parameter: int, values: Tensor) -> int:
        """How many elements of ``values`` are not the rounded master; bits are compared."""

    @abstractmethod
    def read_state(self, parameter: int, which: str) -> Tensor:
        """A copy of one array of the parameter, by name: float32, flat, on the host.

        :data:`GRADIENT` is read after :meth:`agree`; it has no elements if the window brought none.
        """

    @abstractmethod
    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        """Set one array of the parameter, by name, from a flat tensor; :data:`GRADIENT` only if there is one."""

    @abstractmethod
    def clear_state(self, parameter: int) -> None:
        """Zero all arrays of the parameter."""

    @abstractmethod
    def owned(self, parameter: int, shape: Sequence[int]) -> Sequence[OwnedRange]:
        """The ranges of the parameter, which has this shape, whose state this process keeps."""

    @abstractmethod
    def close(self) -> None:
        """Wait for work under way, and end threads and streams."""
