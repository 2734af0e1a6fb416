"""The oldest torch of longshore and of each feature: the table of checks, of skipped tests and of the documentation.

``make test-versions`` runs the tests on these versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int]


def text_of(version: Version) -> str:
    """Return ``2.13`` for ``(2, 13)``."""
    return ".".join(map(str, version))


def installed() -> str:
    """Return the version of the torch that is imported here, with its build: ``2.13.0+cpu``."""
    import torch  # here: the documentation and the command line's help read the table without it

    return str(torch.__version__)


@dataclass(frozen=True)
class Feature:
    """A feature for which some torch is too old.

    Attributes:
        name: as users know it.
        oldest: the first torch with which it works.
        why: the end of the sentence about older ones, after "they".
        instead: advice for an older one.
    """

    name: str
    oldest: Version
    why: str
    instead: str = "upgrade torch"

    def refusal(self) -> ValueError | None:
        """Return the error that refuses it with the torch that is imported here, or None if it works with that."""
        found = installed()
        numbers = re.match(r"(\d+)\.(\d+)", found)
        if numbers is None or (int(numbers[1]), int(numbers[2])) >= self.oldest:
            return None
        return ValueError(
            f"{self.name} needs torch {text_of(self.oldest)} or newer, and this is {found}; {self.instead}"
        )


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("longshore", (2, 8), "were not tried"),
        # longshore.Muon does without; its plain twin is asked for by longshore train --optimizer muon --plain.
        Feature(
            "torch.optim.Muon", (2, 9), "have no such optimizer; `longshore.Muon` does without", "leave out --plain"
        ),
        Feature("longshore.stream", (2, 11), "were not tried"),
        Feature(
            "stage 3",
            (2, 13),
            "have no `reset_iter_state()` in FSDP2, by which training goes on after an exception",
            "upgrade torch, or use stage 2",
        ),
    )
}
"""By name. Another needs no more than longshore itself."""


def require(name: str) -> None:
    """Raise ValueError if this torch is too old for a feature of :data:`FEATURES`."""
    if (error := FEATURES[name].refusal()) is not None:
        raise error
