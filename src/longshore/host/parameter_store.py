"""What an optimizer asks of the place that keeps its state and the gradients of the accumulation window.

Parameters are known by index, as flat tensors. :class:`~longshore.host.HostStore` keeps all of it in this process; a
sharded store keeps one rank's part there and asks the other ranks for the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longshore.errors import BrokenStateError, CheckpointError
from longshore.host.events import Recorder, joined
from longshore.host.stepping import Forecast, ParameterStep
from longshore.kernels import Scale
from longshore.layout import Slab

if TYPE_CHECKING:
    from longshore.host.store import HostStore

MASTER = "master"
"""The first array of every page."""


def broken_state_error(failure: BaseException, where: str = "", on: str = "") -> BrokenStateError:
    """The error of a store after a commit, or the loading of a checkpoint, ended half way with ``failure``."""
    if isinstance(failure, CheckpointError):
        error = BrokenStateError(
            f"a checkpoint was loaded in part only ({failure}); load a whole one{on} before going on"
        )
    else:
        error = BrokenStateError(
            f"an earlier step failed half way{where}, so some weights were stepped and others were not "
            f"({type(failure).__name__}: {failure}); load the model's weights and the optimizer's state "
            f"(load_state_dict){on} before going on"
        )
    error.__cause__ = failure
    return error


class OwnedRun(NamedTuple):
    """Elements ``[offset, offset + numel)`` of a parameter, flat, whose state this process keeps."""

    key: int
    """Their index in :attr:`ParameterStore.local`."""
    offset: int
    numel: int
    tells: bool = True
    """Whether this process writes them to checkpoints, where several keep the same."""


class ParameterStore(ABC):
    """Optimizer state and gradients by parameter.

    Attributes:
        local: the tiles of this process, which hold all parameters or this rank's part of them.
        broken: what a commit, or the loading of a checkpoint, ended half way with; nothing is stepped until a whole
            state is loaded.
    """

    local: HostStore
    broken: BaseException | None = None
    recorders: tuple[Recorder, ...] = ()

    # -- layout ---------------------------------------------------------------

    @abstractmethod
    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        """Lay out ``(index, numel, dtype)``, in the order in which forward uses them as far as is known: backward
        brings their gradients from the last to the first."""

    @abstractmethod
    def __contains__(self, parameter: int) -> bool: ...

    @abstractmethod
    def record(self, recorder: Recorder) -> None:
        """Tell ``recorder`` alone of the life of each tile from here on; ``NO_RECORDER``: nobody."""

    def add_recorder(self, recorder: Recorder) -> None:
        """Tell ``recorder`` too."""
        self.recorders = (*self.recorders, recorder)
        self.record(joined(self.recorders))

    def remove_recorder(self, recorder: Recorder) -> None:
        """The end of :meth:`add_recorder`."""
        self.recorders = tuple(each for each in self.recorders if each is not recorder)
        self.record(joined(self.recorders))

    # -- the accumulation window ----------------------------------------------

    def begin_backward(self, reduce: bool, last: bool) -> None:
        """A backward begins, on all ranks. ``reduce`` is false where its gradients are to stay on this rank;
        ``last``: it is the last of its window, as far as known."""
        return

    @abstractmethod
    def fail(self, failure: BaseException) -> None:
        """The window cannot be stepped any more; the first reason counts, and every rank hears of it in the step."""

    @abstractmethod
    def end_backward(self, failure: BaseException | None) -> None:
        """The backward that began is over; ``failure`` is what it raised."""

    def forward_failed(self) -> None:
        """A forward raised."""
        return

    @abstractmethod
    def arrive(self, parameter: int, gradient: Tensor) -> None:
        """Take one more gradient of ``parameter`` (flat, on the device) into the window; the
        caller may let go of it."""

    def bring(self, parameter: int, gradient: Tensor) -> Tensor | None:
        """A gradient (flat, on the device) that was found where no hook saw it. Returned where
        ``commit`` is to be given it; None where the store has taken it."""
        return gradient

    @abstractmethod
    def arrivals(self, parameter: int) -> int:
        """How many gradients of ``parameter`` this process brought into the window."""

    @abstractmethod
    def reduced(self, parameter: int) -> int | None:
        """How many gradients of ``parameter``, each of all ranks together, wait here for the step; None where
        this process steps nothing of it."""

    @abstractmethod
    def discard(self, parameter: int | None = None) -> None:
        """Drop the window, or one parameter's part of it; no state changes."""

    @abstractmethod
    def foresee(self, forecast: Forecast) -> None:
        """Who knows, during backward, what the next commit will be given; for stores that step ahead of it."""

    @abstractmethod
    def expect_backwards(self, backwards: int) -> None:
        """The window under way will have so many; otherwise as many as the last one."""

    # -- the step -------------------------------------------------------------

    @abstractmethod
    def agree(
        self, found: Mapping[int, Tensor | None], failure: BaseException | None = None
    ) -> Mapping[int, Tensor | None]:
        """The gradients of the window, the same parameters on all ranks.

        Args:
            found: those of this process.
            failure: what finding them raised. Where there is one, all ranks raise.
        """

    @abstractmethod
    def preparing(self) -> AbstractContextManager[Any]:
        """What is computed between :meth:`agree` and :meth:`commit`: where it raises on one rank, no rank commits."""

    def check_same(self, values: Mapping[str, Tensor]) -> None:
        """With ``LONGSHORE_DEBUG=1``: tensors by name have the same bits on all ranks.

        Raises:
            RankError: naming the first that has not, and the ranks.
        """
        return

    @abstractmethod
    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        """The sum of squares of all (scaled) gradients in float64.

        ``gradients`` gives each parameter's flat gradient on the device, or
        None where the window holds it.
        """

    @abstractmethod
    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        """Step every parameter in ``steps``, publish it, and end the window.

        On return the current stream sees the new parameters. ``then`` does the caller's own bookkeeping; where it
        fails, the commit has failed.

        Raises:
            GradientError: the window is incomplete; nothing was stepped.
            BrokenStateError: this or an earlier commit failed half way.
        """

    # -- state ----------------------------------------------------------------

    @abstractmethod
    def check_usable(self) -> None:
        """Raises BrokenStateError where the state is broken."""

    @abstractmethod
    def begin_load(self) -> None:
        """Discard the window and leave the broken state; whole states are about to be written."""

    @abstractmethod
    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        """Take ``values`` (flat, on the device) as the master.

        With ``keep_matching``, an element whose rounded master is already the
        value keeps its master, with all of its float32 digits.
        """

    @abstractmethod
    def count_differing(self, parameter: int, values: Tensor) -> int:
        """How many elements of ``values`` are not the rounded master; bits are compared."""

    @abstractmethod
    def read_state(self, parameter: int, which: str) -> Tensor:
        """A copy of one array of the parameter, by name: float32, flat, on the host."""

    @abstractmethod
    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        """Set one array of the parameter, by name, from a flat tensor."""

    @abstractmethod
    def clear_state(self, parameter: int) -> None:
        """Zero all arrays of the parameter."""

    @abstractmethod
    def read_gradient(self, parameter: int) -> Tensor | None:
        """A copy of the window's gradient of the parameter: float32, flat, on the host; None where there is none."""

    @abstractmethod
    def write_gradient(self, parameter: int, values: Tensor) -> None:
        """Replace the window's gradient of the parameter, which has one: float32, flat, on the host."""

    def read_values(self, parameter: int, held: Tensor) -> Tensor:
        """The whole parameter, flat, where ``held`` is what this process has of it on its device."""
        return held

    def part_to_hold(self, parameter: int, values: Tensor) -> Tensor:
        """Return the range of the whole parameter, flat, that this process has on its device."""
        return values

    def meet(self, loading: bool) -> None:
        """All processes are about to save, or to load, a checkpoint. Raises RankError where one does something else."""
        return

    def owned(self, parameter: int, numel: int) -> Sequence[OwnedRun]:
        """What of the parameter, which has ``numel`` elements, this process keeps the state of; its elements are
        counted in :meth:`slab_of` it."""
        return [OwnedRun(parameter, 0, numel)] if numel > 0 else []

    def slab_of(self, parameter: int) -> Slab | None:
        """Where tensor parallelism cut the parameter before it was sharded; None: it did not."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, and let go of threads and lanes."""
