"""Host kernels of each instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from longshore.kernels import HostKernels, InstructionSet, supported_instruction_sets


@pytest.fixture(scope="module")
def kernels_of() -> Iterator[Callable[..., HostKernels]]:
    """Kernels by instruction set and threads, made once."""
    made: dict[tuple[InstructionSet, int], HostKernels] = {}

    def get(isa: InstructionSet, threads: int = 2) -> HostKernels:
        if (isa, threads) not in made:
            made[isa, threads] = HostKernels(threads=threads, instruction_set=isa)
        return made[isa, threads]

    yield get
    made.clear()


@pytest.fixture(params=supported_instruction_sets(), ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest, kernels_of: Callable[..., HostKernels]) -> HostKernels:
    return kernels_of(request.param)
