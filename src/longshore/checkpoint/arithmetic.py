"""Which arithmetic, and which kind of processor, a checkpoint's run had."""

from __future__ import annotations

import platform
import warnings
from typing import Any

from longshore.checkpoint.folder import WholeCheckpoint
from longshore.kernels import ARITHMETIC

ARITHMETIC_ENTRY = "arithmetic"
"""Entry of the manifest: version of the arithmetic of all rules. Checkpoints without it have version 1."""
PROCESSOR_ENTRY = "processor"
"""Entry of the manifest: the processor of rank 0, as ``platform.machine()`` names it."""


def arithmetic_entries() -> dict[str, Any]:
    """Return the entries of the manifest of a new checkpoint."""
    return {ARITHMETIC_ENTRY: ARITHMETIC, PROCESSOR_ENTRY: platform.machine()}


def report_arithmetic(whole: WholeCheckpoint) -> None:
    """Warn if a run goes on with other bits than where it was saved; for one rank, once its optimizer is loaded."""
    theirs = whole.entry(ARITHMETIC_ENTRY, int, 1)
    if theirs != ARITHMETIC:
        warnings.warn(
            f"the checkpoint is of a run with version {theirs} of the arithmetic, and this longshore computes version "
            f"{ARITHMETIC}: the run goes on with other last bits than there (the changelog says which rules changed)",
            stacklevel=2,
        )
    processor = whole.entry(PROCESSOR_ENTRY, str)
    if processor is not None and processor != (own := platform.machine()):
        warnings.warn(
            f"the checkpoint was written on {processor}, and this is {own}: longshore's steps have the same bits on "
            "both, but what torch computes on the CPU (forward, backward, its own optimizers, Newton-Schulz, random "
            "numbers) has other last bits",
            stacklevel=2,
        )
