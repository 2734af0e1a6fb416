"""Interface of the store that has an optimizer's state and the gradients of the accumulation window.

Parameters are known by index, as flat tensors. :class:`~longshore.tiles.TileStore` has the whole state in this process;
a sharded store has one rank's part of it and asks the other ranks for the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from torch import Tensor

from longshore.kernels import Scale
from longshore.layout.tiles import Range, Spec
from longshore.tiles.events import Recorder
from longshore.tiles.steps import Breakage, Forecast, ParameterStep
from longshore.tiles.store import TileStore


class ParameterStore(Protocol):
    """Optimizer state and gradients by parameter.

    Attributes:
        alone: whether this process has the whole state.
        broken: why a commit, or the loading of a checkpoint, ended half way; nothing is stepped until a whole state is
            loaded.
        recorders: recorders that receive the events of the tiles.
    """

    alone: ClassVar[bool]
    broken: Breakage | None
    recorders: tuple[Recorder, ...]

    @property
    def local(self) -> TileStore:
        """Tiles of this process, which have all parameters or this rank's part of them."""
        ...

    @abstractmethod
    def add_parameters(self, specs: Iterable[Spec]) -> None:
        """Lay out parameters, in forward's order if it is known: gradients come in reverse order."""

    @abstractmethod
    def __contains__(self, parameter: int) -> bool: ...

    @abstractmethod
    def set_recorders(self, recorders: Iterable[Recorder]) -> None:
        """Report the events of each tile to these recorders, and to no others, from now on."""

    # -- the accumulation window ----------------------------------------------

    @abstractmethod
    def begin_backward(self, reduce: bool, last: bool) -> None:
        """Begin a backward, the ``last`` of its window as far as known; without ``reduce``, gradients stay on ranks."""

    @abstractmethod
    def end_backward(self, failure: BaseException | None) -> None:
        """End the backward that began; ``failure`` is the error that it raised, if any."""

    @abstractmethod
    def fail(self, failure: BaseException) -> None:
        """Mark the window as failed; the first failure counts, and every rank is told of it in the step."""

    @abstractmethod
    def arrive(self, parameter: int, gradient: Tensor, *, by_hook: bool = True) -> Tensor | None:
        """Take one more gradient of ``parameter`` (flat, on the device) into the window; the caller may drop it.

        With ``by_hook=False``, for a gradient that no hook saw, a store may return it; :meth:`commit` then gets it.
        """

    @abstractmethod
    def arrivals(self, parameter: int) -> int:
        """Return how many gradients of ``parameter`` this process brought into the window."""

    @abstractmethod
    def reduced(self, parameter: int) -> int | None:
        """Return how many gradients of ``parameter``, reduced over ranks, are here; None if it is not stepped here."""

    @abstractmethod
    def discard(self, parameter: int | None = None) -> None:
        """Drop the gradients of the window, or of one parameter; no state changes."""

    @abstractmethod
    def foresee(self, forecast: Forecast) -> None:
        """Set the forecast of the next commit, for stores that step ahead of it."""

    @abstractmethod
    def expect_backwards(self, backwards: int) -> None:
        """Set the number of backwards of the current window; without this, it is expected to be that of the last."""

    # -- the step -------------------------------------------------------------

    @abstractmethod
    def agree(
        self, found: Mapping[int, Tensor | None], failure: BaseException | None = None, *, reading: bool = False
    ) -> Mapping[int, Tensor | None]:
        """Return the window's gradients, for the same parameters on all ranks, from those that this process ``found``.

        If one rank passes the ``failure`` that it had while finding them, all ranks raise. ``reading``: no step
        follows, so that parameters may be whole meanwhile.
        """

    @abstractmethod
    def preparing(self, same: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
        """Return a context for work between :meth:`agree` and :meth:`commit`: if it raises on one rank, none commits.

        Raises RankError if tensors in ``same`` (by name; empty unless debugging) have other bits on another rank.
        """

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        """Return the sum of squares of all (scaled) gradients in float64.

        ``gradients`` has flat tensors on the device, or None where the window has the gradient.
        """

    @abstractmethod
    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        """Step every parameter in ``steps``, publish it, and end the window.

        On return, the current stream sees the new parameters. The commit calls ``then``, the caller's bookkeeping.

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
        """Discard the window and reset ``broken``, because whole states are about to be written."""

    @abstractmethod
    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        """Set the master to ``values`` (flat, on the device).

        With ``keep_matching``, elements whose rounded master equals the value keep all float32 digits of their master.
        """

    @abstractmethod
    def count_differing(self, parameter: int, values: Tensor) -> int:
        """Return how many elements of ``values`` differ from the rounded master; bits are compared."""

    @abstractmethod
    def differs(self, parameter: int, which: str, values: Tensor) -> bool:
        """Return whether any bit of one array of the parameter, of the part in this process, is not that of ``values``
        (float32, flat, on the CPU)."""

    @abstractmethod
    def read_state(self, parameter: int, which: str) -> Tensor:
        """Return a copy of one array of the parameter, by name: float32, flat, on the host.

        :data:`GRADIENT` is read after :meth:`agree`; it has no elements if the window brought no gradient.
        """

    @abstractmethod
    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        """Set one array of the parameter, by name, from a flat tensor; :data:`GRADIENT` only if there is one."""

    @abstractmethod
    def clear_state(self, parameter: int) -> None:
        """Zero all arrays of the parameter."""

    @abstractmethod
    def owned(self, parameter: int, shape: Sequence[int]) -> Sequence[Range]:
        """Return the ranges of a parameter of this shape whose state this process keeps."""

    @abstractmethod
    def close(self) -> None:
        """Wait for work under way, and end threads and streams."""
