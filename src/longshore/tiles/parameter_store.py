"""The interface of the store that has an optimizer's state and the gradients of the accumulation window.

Parameters are known by index, as flat tensors. :class:`~longshore.tiles.TileStore` has all of it in this process; a
sharded store has one rank's part there and asks the other ranks for the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longshore.errors import BrokenStateError, CheckpointError
from longshore.kernels import HostRule, Scale
from longshore.layout import DimRange
from longshore.tiles.events import Recorder

if TYPE_CHECKING:
    from longshore.tiles.store import TileStore

MASTER = "master"
"""The first array of every buffer."""

GRADIENT = "gradient"
"""Stands for the window's gradient of a parameter where arrays of its state are read and written by name."""


def broken_state_error(failure: BaseException, where: str = "", on: str = "") -> BrokenStateError:
    """The error of a store whose last commit, or loading of a checkpoint, ended half way with ``failure``."""
    said = (
        f"an earlier step failed half way{where}, so some weights were stepped and others were not "
        f"({type(failure).__name__}: {failure}); load the model's weights and the optimizer's state "
        f"(load_state_dict){on} before going on"
    )
    if isinstance(failure, CheckpointError):
        said = f"a checkpoint was loaded in part only ({failure}); load a whole one{on} before going on"
    error = BrokenStateError(said)
    error.__cause__ = failure
    return error


class ParameterStep(NamedTuple):
    """One parameter that has a gradient in this window."""

    rule: HostRule
    target: Tensor
    """Takes the new values; flat, contiguous, on the device."""
    gradient: Tensor | None
    """Flat, contiguous, on the device; None: the store has it already."""


class Forecast(ABC):
    """What the next commit will be given, as far as is known during backward. A wrong one costs time, never bits."""

    @abstractmethod
    def scale(self) -> Scale:
        """What gradients will be multiplied by if they are not clipped."""

    @abstractmethod
    def rules(self) -> Mapping[int, HostRule]:
        """By parameter: how each of them would be stepped now."""


class OwnedRange(NamedTuple):
    """Elements ``[offset, offset + numel)`` of a parameter, flat, whose state this process keeps."""

    key: int
    """Their index in :attr:`ParameterStore.local`."""
    offset: int
    numel: int
    tells: bool = True
    """Whether this process writes them to checkpoints, if several keep the same."""
    within: DimRange | None = None
    """The part of the parameter in which elements are counted, if tensor parallelism split it before it was sharded."""


class ParameterStore(ABC):
    """Optimizer state and gradients by parameter.

    Attributes:
        local: the tiles of this process, which have all parameters or this rank's part of them.
        broken: the failure of a commit, or of the loading of a checkpoint, that ended half way; nothing is stepped
            until a whole state is loaded.
        recorders: are told of the events of the tiles.
    """

    local: TileStore
    broken: BaseException | None = None
    recorders: tuple[Recorder, ...] = ()

    @abstractmethod
    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        """Lay out ``(index, numel, dtype)``, in forward's order if it is known: gradients come from the last one on."""

    @abstractmethod
    def __contains__(self, parameter: int) -> bool: ...

    @abstractmethod
    def set_recorders(self, recorders: Iterable[Recorder]) -> None:
        """Tell these recorders, and no others, of the events of each tile from here on."""

    # -- the accumulation window ----------------------------------------------

    def begin_backward(self, reduce: bool, last: bool) -> None:
        """A backward begins, as far as known the ``last`` of its window; without ``reduce`` gradients stay on ranks."""
        return

    def end_backward(self, failure: BaseException | None) -> None:
        """The backward that began is over; ``failure`` is what it raised."""
        if failure is not None:
            self.fail(failure)

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

    def owned(self, parameter: int, shape: Sequence[int]) -> Sequence[OwnedRange]:
        """The ranges of the parameter, which has this shape, whose state this process keeps."""
        numel = math.prod(shape)
        return [OwnedRange(parameter, 0, numel)] if numel > 0 else []

    @abstractmethod
    def close(self) -> None:
        """Wait for work under way, and end threads and streams."""
