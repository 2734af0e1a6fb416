import enum
from collections.abc import Sequence

class InstructionSet(enum.Enum):
    BASELINE = 0
    AVX2 = 1
    AVX512 = 2

class ThreadPool:
    threads: int
    def __init__(self, threads: int, cpu_set: Sequence[int]) -> None: ...

def supported_instruction_sets() -> list[InstructionSet]: ...
def step_tile(
    pool: ThreadPool,
    source_page: int,
    target_page: int,
    page_numel: int,
    segments: Sequence[tuple[int, int, int, int, int, int, int]],
    rules: Sequence[tuple[float, float, float, float, float, float, bool, bool]],
    scale: tuple[float, float],
    isa: InstructionSet,
) -> None: ...
def accumulate(
    pool: ThreadPool, target: int, source: int, dtype: int, numel: int, add: bool, isa: InstructionSet
) -> None: ...
def reconcile(
    pool: ThreadPool, master: int, parameter: int, dtype: int, numel: int, adopt: bool, isa: InstructionSet
) -> int: ...
def sum_of_squares(
    pool: ThreadPool,
    parameters: Sequence[Sequence[tuple[int, int, int]]],
    scale: tuple[float, float],
    isa: InstructionSet,
) -> float: ...
