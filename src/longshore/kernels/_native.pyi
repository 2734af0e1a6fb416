import enum
from collections.abc import Sequence

class InstructionSet(enum.Enum):
    BASELINE = 0
    AVX2 = 1
    AVX512 = 2

class Outputs(enum.Enum):
    WRITTEN = 0
    COMPARED = 1
    MASTERS = 2

class ThreadPool:
    threads: int
    def __init__(self, threads: int, cpu_set: Sequence[int]) -> None: ...

def supported_instruction_sets() -> list[InstructionSet]: ...

_Buffer = tuple[int, int, int, int, int]
_Segments = Sequence[tuple[int, int, int, int, int, int, int, int, int]]
_Rules = tuple[Sequence[Sequence[float]], Sequence[int]]

def rules() -> list[str]: ...
def check(rule: int, buffer: _Buffer, segments: _Segments, rules: _Rules, outputs: Outputs) -> None: ...
def step(
    pool: ThreadPool,
    rule: int,
    buffer: _Buffer,
    segments: _Segments,
    rules: _Rules,
    outputs: Outputs,
    isa: InstructionSet,
) -> None: ...

class SegmentTable:
    def __init__(self, rows: Sequence[tuple[int, int, int, int, int, int, int, int]]) -> None: ...

def step_table(
    pool: ThreadPool,
    rule: int,
    buffer: _Buffer,
    table: SegmentTable,
    places: tuple[Sequence[int], Sequence[int], Sequence[int]],
    rules: _Rules,
    outputs: Outputs,
    isa: InstructionSet,
) -> None: ...
def accumulate(
    pool: ThreadPool, target: int, source: int, dtype: int, numel: int, add: bool, isa: InstructionSet
) -> None: ...
def sum_of_two(
    pool: ThreadPool, target: int, first: int, second: int, dtype: int, numel: int, isa: InstructionSet
) -> None: ...
def reconcile(
    pool: ThreadPool, master: int, parameter: int, dtype: int, numel: int, adopt: bool, isa: InstructionSet
) -> int: ...
def block_sums(
    pool: ThreadPool,
    parameters: Sequence[Sequence[tuple[int, int, int]]],
    scale: tuple[float, float],
    isa: InstructionSet,
) -> list[list[float]]: ...
