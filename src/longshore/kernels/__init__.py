"""Native host kernels, and their oracle in :mod:`longshore.kernels.reference`."""

from longshore.kernels._native import InstructionSet, supported_instruction_sets
from longshore.kernels.host import SUPPORTED_DTYPES, HostKernels, TileSegment, default_threads
from longshore.kernels.rules import UNSCALED, AdagradRule, AdamRule, LionRule, Rule, Scale, SGDRule

__all__ = [
    "SUPPORTED_DTYPES",
    "UNSCALED",
    "AdagradRule",
    "AdamRule",
    "HostKernels",
    "InstructionSet",
    "LionRule",
    "Rule",
    "SGDRule",
    "Scale",
    "TileSegment",
    "default_threads",
    "supported_instruction_sets",
]
