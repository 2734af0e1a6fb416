"""Sources of a window's gradients: ``.grad``, or the host, if it took them during backward (released_gradients.py).

Both sources read ``.grad`` as the user left it, so that whatever was done to it counts (accumulated, clipped, unscaled,
replaced, set to None).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set

from torch import Tensor

from longshore.errors import GradientError
from longshore.optim.parameters import ParameterRecord, check_trainable
from longshore.optim.released import elsewhere, is_released, put_gradient
from longshore.optim.shards import flat, gradient_part
from longshore.store import Store
from longshore.tiles import Ended, Fingerprint, Seen


class GradientSource(ABC):
    """Base class of objects that find the gradients of a window for an optimizer.

    Attributes:
        members: returns the indices of the parameters that are in the optimizer's groups now. Users may take some out,
            which are then left alone, as in torch.
    """

    def __init__(self, store: Store, members: Callable[[], Set[int]]) -> None:
        self.store = store
        self.members = members
        self.records: dict[int, ParameterRecord] = {}
        self.replaced_by: GradientSource | None = None
        """Source of the same optimizer after parameters were moved or converted before the first step."""
        self.added_to: dict[int, weakref.ref[Tensor]] = {}
        """What scripts had put into ``.grad`` where a backward added to it before the sum was taken to the host."""

    def watch(self, records: Sequence[ParameterRecord]) -> None:
        """Add parameters that can get gradients to the store. If one of them has a dtype that cannot be stepped, raise
        ValueError and add none."""
        new = [record for record in records if record.index not in self.store]
        for record in new:
            check_trainable(record.parameter, record.name)
        self.store.add_parameters(record.spec for record in new)

    def found(self, record: ParameterRecord, gradient: Tensor) -> Tensor:
        """Check a tensor found in ``.grad``, and return it flat, in the parameter's logical order."""
        record.check_gradient(gradient, same_dtype=self.store.tiles.streams.staged)
        found = flat(gradient if type(gradient) is Tensor else gradient_part(record.leaf(), gradient))
        # After p.grad = p.data, kernels would read the gradient where they write the parameter.
        return found.clone() if found.data_ptr() == record.held.data_ptr() else found

    @abstractmethod
    def register(self, records: Sequence[ParameterRecord]) -> None:
        """Add new parameters; if this raises, none of them is added."""

    @abstractmethod
    def collect(self) -> dict[int, Tensor | None]:
        """Return the gradient of each parameter that has one: flat, on the device, or None if the store has it.

        Raises:
            GradientError: a gradient cannot be counted; nothing was stepped.
        """

    def drop(self, records: Sequence[ParameterRecord]) -> None:
        """Forget parameters that the user took out of the groups, with their gradients."""
        for record in records:
            self.records.pop(record.index, None)
            self.store.window.arrived.pop(record.index, None)
        self.store.remove({record.index for record in records})

    def look_again(self) -> None:
        """Add parameters that were frozen, or not gathered, until now."""
        return

    def gave_up(self, index: int) -> bool:
        """Return whether a newer source has this parameter, so that its ``.grad`` is not this one's any more."""
        return False

    @property
    def superseded(self) -> bool:
        """Whether a newer source has a parameter of this one."""
        return any(self.gave_up(index) for index in self.records)

    def fingerprint(self) -> Fingerprint:
        """Return the gradients of this window as they are now.

        Raises:
            GradientError: torch does not count writes to one of them.
        """
        seen, members = {}, self.members()
        for index, record in self.records.items():
            if index in members and (gradient := record.parameter.grad) is not None:
                if gradient.is_inference():
                    raise GradientError(
                        f"the gradient of parameter {record.name} was made in inference mode, where torch counts no "
                        "writes, so that it cannot be clipped: clone it outside (p.grad = p.grad.clone())"
                    )
                changes = self.store.arrivals(index) if is_released(gradient) else gradient._version
                seen[index] = Seen(record.name, weakref.ref(gradient), changes, self.added_to.get(index))
        return seen

    def zero_grad(self, how: Ended) -> None:
        """End the window without a step, with ``.grad`` set to None."""
        self.clear_grad()
        self.store.window.end(how)

    def clear_grad(self) -> None:
        """Set ``.grad`` of the parameters to None."""
        for index in self.members() & self.records.keys():
            if not self.gave_up(index):
                put_gradient(self.records[index], None)

    def remove_hooks(self) -> None:
        """Remove hooks from the parameters."""
        return

    def close(self) -> None:
        """Remove hooks from the parameters, and close the store."""
        self.remove_hooks()
        self.store.close()


class KeptGradients(GradientSource):
    """Source that takes ``.grad`` as it is at ``step()``; a parameter whose ``.grad`` is None is not stepped."""

    def register(self, records: Sequence[ParameterRecord]) -> None:
        self.watch([record for record in records if record.parameter.requires_grad])
        self.records.update((record.index, record) for record in records)

    def collect(self) -> dict[int, Tensor | None]:
        members = self.members()
        found: dict[int, Tensor | None] = {}
        for index, record in self.records.items():
            if index in members and (gradient := record.parameter.grad) is not None:
                if is_released(gradient):
                    raise elsewhere(record)
                found[index] = self.found(record, gradient)
        if thawed := [self.records[index] for index in found if index not in self.store]:
            self.watch(thawed)
        return found
