"""``python -m benchmarks.instructions``: how many instructions a host step takes for each element, by format of states.

Counts them one by one, as a debugger steps through a program, so that the numbers are exact and need no counters of the
processor. A step of many blocks less a step of one block is what the blocks in between take. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.host_step import RULE
from longshore.kernels import EncodedBuffer, HostKernels, InstructionSet, Scale, TileSegment
from longshore.kernels import new_buffer as make_buffer
from longshore.layout.formats import BLOCK_NUMEL, Coding, StateFormat
from longshore.tiles.memory import allocate_zeros

BLOCKS = 201
_TRACE_ME, _SINGLE_STEP = 0, 9  # of <sys/ptrace.h>


def count_instructions(prepare: Callable[[], Callable[[], None]]) -> int:
    """Return how many instructions a child process takes for what ``prepare`` returns, with Python's for calling it."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    child = os.fork()
    if child == 0:
        try:
            run = prepare()
            run()  # what Python and torch do at the first call only
            ptrace(_TRACE_ME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            run()
            os.kill(os.getpid(), signal.SIGSTOP)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never on in the parent's program
    _, status = os.waitpid(child, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise RuntimeError("the step failed before it was counted; its message is above")
    steps = 0
    while True:
        if ptrace(_SINGLE_STEP, child, None, None) != 0:
            raise OSError(ctypes.get_errno(), "this system does not let a process trace its child")
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            raise RuntimeError("the step ended before it was counted")
        if os.WSTOPSIG(status) == signal.SIGSTOP:
            break
        steps += 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return steps


def step_of(format: StateFormat, blocks: int, instructions: InstructionSet) -> Callable[[], None]:
    """Return a step of AdamW with gradients and parameters in bfloat16, in place."""
    kernels = HostKernels(1, instruction_set=instructions)
    numel = blocks * BLOCK_NUMEL
    slot = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(1e-3).bfloat16()
    buffer = make_buffer(format, 3, numel, False, allocate_zeros)
    states = slot.float(), slot.float().square() + 1e-9  # no zeros, which take a longer way in 8 bits
    for index, values in enumerate(states):
        if isinstance(buffer, EncodedBuffer):
            buffer.encode(index, slice(0, numel), index == 1, values)
        else:
            buffer[index + 1].copy_(values)
    table = [TileSegment(0, slot, slot, 0, Coding(format, stream=1))]
    return lambda: kernels.step_tile(buffer, buffer, table, [RULE], Scale(1.0))


def main() -> None:
    """Print instructions for each element, by format and instruction set."""
    # The baseline's are too many to be counted in minutes.
    sets = [each for each in InstructionSet if each is not InstructionSet.BASELINE]
    table = Table("states", *(each.name for each in sets), title="instructions for each element of a host step")
    for format in StateFormat:
        row = []
        for instructions in sets:
            try:
                HostKernels(1, instruction_set=instructions)
            except ValueError:
                row.append("not on this processor")
                continue
            counts = [count_instructions(partial(step_of, format, blocks, instructions)) for blocks in (1, BLOCKS)]
            row.append(f"{(counts[1] - counts[0]) / ((BLOCKS - 1) * BLOCK_NUMEL):.2f}")
        table.add_row(format.value, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
