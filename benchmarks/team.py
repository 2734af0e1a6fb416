"""Processes that train together and wait for each other's turn: one team runs while the others block."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contestants import Setup
from benchmarks.floor import NotAvailable

_ROOT = Path(__file__).parent.parent
_SHOWN_CHARACTERS = 2000


class Team:
    """``world_size`` ranks of ``benchmarks.rank``; a context manager, which ends them.

    Args:
        job: "time" or "memory".
        setup: of all contestants.
        contestants: in every rank, in turn.
        world_size: processes; with several they meet over gloo.
        python: their interpreter.
    """

    def __init__(
        self,
        job: str,
        setup: Setup,
        contestants: Sequence[str],
        world_size: int,
        python: str = sys.executable,
    ) -> None:
        command = [python, "-m", "benchmarks.rank", job, json.dumps(asdict(setup)), json.dumps(list(contestants))]
        port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        self._printed = [Path(self._folder.name) / f"rank-{rank}.txt" for rank in range(world_size)]
        self._ranks: list[subprocess.Popen[str]] = []
        for rank, path in enumerate(self._printed):
            environment = {**os.environ, **rank_environment(rank, world_size, port, setup.threads)}
            with path.open("w") as printed:
                process = subprocess.Popen(
                    command,
                    cwd=_ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=printed,
                    text=True,
                )
            self._ranks.append(process)

    def wait_until_ready(self) -> None:
        """Wait until every rank has built its contestants.

        Raises:
            NotAvailable: a contestant cannot run here.
            RuntimeError: a rank ended; with the end of what it printed.
        """
        self._answers()

    def ask(self, rounds: int) -> list[Any]:
        """What each rank answers.

        Raises:
            NotAvailable, RuntimeError: as :meth:`wait_until_ready`.
        """
        for process in self._ranks:
            assert process.stdin is not None
            print(rounds, file=process.stdin, flush=True)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, process in enumerate(self._ranks):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                printed = self._printed[rank].read_text(errors="replace")
                raise RuntimeError(f"rank {rank} ended: {printed[-_SHOWN_CHARACTERS:]}")
            answer = json.loads(line)
            if "missing" in answer:
                raise NotAvailable(answer["missing"])
            answers.append(answer)
        return answers

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rank_environment(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """torchrun's variables, and threads for both OpenMP runtimes of a process: torch's own, and that of extensions."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
