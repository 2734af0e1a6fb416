"""What one rank brings to the next reduction: gradients by parameter, not reduced yet."""

from __future__ import annotations

from collections.abc import KeysView

import torch
from torch import Tensor


class Contributions:
    """The gradients of one round. The first of a parameter is kept as it is, later ones are added (law 1).

    Args:
        dtype: of the sums.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._gradients: dict[int, Tensor] = {}
        self._summed: set[int] = set()
        self._lent: set[int] = set()
        self.outdated = False
        """What was lent is not all that there is."""

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._gradients

    def __len__(self) -> int:
        return len(self._gradients)

    @property
    def parameters(self) -> KeysView[int]:
        """Those that have a gradient here."""
        return self._gradients.keys()

    @property
    def summed(self) -> bool:
        """Whether any of them is a sum, which its parameter's dtype may not hold."""
        return bool(self._summed)

    def add(self, parameter: int, gradient: Tensor) -> None:
        """One more gradient, flat."""
        held, lent = self._gradients.get(parameter), parameter in self._lent
        self.outdated = self.outdated or lent
        if held is None:
            self._gradients[parameter] = gradient
        elif parameter in self._summed and not lent:
            held.add_(gradient.to(self._dtype))  # rounded first, as below: the same bits lent or not
        else:
            # Out of place: the first one may be the user's own tensor, and what was lent is being read.
            self._gradients[parameter] = held.to(self._dtype) + gradient.to(self._dtype)
            self._summed.add(parameter)

    def forget(self, parameter: int) -> None:
        self.outdated = self.outdated or (parameter in self._lent and parameter in self._gradients)
        self._gradients.pop(parameter, None)
        self._summed.discard(parameter)

    def lend(self, parameters: list[int]) -> dict[int, Tensor]:
        """The gradients of these parameters, to be read while they stay here; see :attr:`outdated`."""
        self._lent.update(parameters)
        return {parameter: self._gradients[parameter] for parameter in parameters if parameter in self._gradients}

    def take(self, parameters: list[int]) -> dict[int, Tensor]:
        """The gradients of these parameters, which are no longer held here."""
        return {parameter: self._gradients.pop(parameter) for parameter in parameters if parameter in self._gradients}
