"""Ranks for tests: processes that stay for the whole run, since each takes seconds to import torch.

A case is a function at the top of a module, called on every rank with its
arguments; what it returns or raises comes back.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 20
_MOST_GROUPS = 24
"""Process groups with which a process goes on. torch keeps those of meshes, and each has a thread of gloo that looks at
its sockets 100 times a second: hundreds of them take a core."""
_LAST_WORDS = 8000
"""Letters of a crashed rank's standard error that are shown."""


_PRELOADED = [
    "longshore",
    "longshore.engine",
    "torch.distributed.fsdp",
    "torch._dynamo.variables.builder",
    "torch.onnx",
]
"""The last two are what torch imports when the first optimizer is made."""


def forking_context() -> Any:
    """Starts processes that have torch already: a server imports it once, runs nothing of it, and forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class RankFailure(AssertionError):
    """A case raised something on a rank."""


def _serve(rank: int, world_size: int, folder: Path, pipe: Connection, timeout_s: float, device: str) -> None:
    # What a crash says, wherever the standard error of the test that came first went.
    os.dup2(os.open(_words_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # all threads of a rank that does not answer

    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "sim":
        import simulated_device

        simulated_device.register()
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    from torch_needs import ignored_warnings

    warnings.simplefilter("error")
    for text in ignored_warnings():
        warnings.filterwarnings("ignore", text)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    module = None
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        if function.__module__ != module:  # as in conftest.py
            gc.collect()
            gc.freeze()
            module = function.__module__
        try:
            result = function(*args, **kwargs)
            pipe.send((True, (result, len(dist.distributed_c10d._world.pg_map))))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _words_of(folder: Path, rank: int) -> Path:
    """The file with a rank's standard error."""
    return folder / f"{rank}.stderr"


def _cpu_seconds(process: int) -> float:
    """The processor's time that a process has used; 0.0 where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Ranks:
    """``world_size`` processes with a group, in which they wait for each other for ``timeout_s``.

    On the CPU its backend is gloo. Otherwise each rank has a device of this type, which is current.
    """

    def __init__(self, world_size: int, timeout_s: float = TIMEOUT_S, device: str = "cpu") -> None:
        self.world_size = world_size
        self._timeout_s, self._device = timeout_s, device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = Path()

    def _start(self) -> None:
        context = forking_context()
        self._folder = Path(tempfile.mkdtemp(prefix="longshore-ranks-"))
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, self._folder, theirs, self._timeout_s, self._device),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a case on all ranks; returns its results by rank.

        Raises:
            RankFailure: with the tracebacks of the ranks that raised.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: list[Any] = []
        failures: list[str] = []
        groups: int = 0
        result: Any
        for rank, pipe in enumerate(self._pipes):
            try:
                done, result = (
                    pipe.recv() if self._answers(rank) else (False, f"did not answer in time{self._stacks_of(rank)}")
                )
            except EOFError:
                self._processes[rank].join(self._timeout_s)
                code = self._processes[rank].exitcode
                words = _words_of(self._folder, rank).read_text(errors="replace")[-_LAST_WORDS:]
                done, result = False, f"ended with exit code {code}"
                if code < 0 and code != -signal.SIGKILL and words:
                    result += f":\n{words}"
            if done:
                results.append(result[0])
                groups = max(groups, result[1])
            else:
                failures.append(f"rank {rank}: {result}")
        if failures:
            self.stop()  # the ranks may wait for each other now
            raise RankFailure("\n".join(failures))
        if groups > _MOST_GROUPS:
            self.stop()
        return results

    def _answers(self, rank: int) -> bool:
        """Wait for a rank's answer: twice the group's timeout, or longer while it computes, as on a busy machine."""
        used_s, slice_s = 0.0, self._timeout_s / 2
        for number in range(1, 17):
            if self._pipes[rank].poll(slice_s):
                return True
            before_s, used_s = used_s, _cpu_seconds(self._processes[rank].pid)
            if number >= 4 and used_s - before_s < 0.02 * slice_s:
                break
        return False

    def _stacks_of(self, rank: int) -> str:
        """What a rank that does not answer is doing, on all its threads."""
        words = _words_of(self._folder, rank)
        before = words.stat().st_size
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        until = time.monotonic() + 2.0
        while words.stat().st_size == before and time.monotonic() < until:
            time.sleep(0.1)
        return f"; it was here:\n{words.read_bytes()[before:].decode(errors='replace')[-_LAST_WORDS:]}"

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes = [], []
