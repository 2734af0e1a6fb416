"""What the ranks of the pool run (tests/ranks), each in its own process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from typing import Any

from longshore.cli import main


def command(arguments: list[str], signals: dict[int, tuple[int, int]] | None = None) -> tuple[int, str, str]:
    """``longshore`` on this rank: exit code, standard output and error.

    Args:
        arguments: of the command.
        signals: by rank, a step and the signal that it gets right after its backwards.
    """
    import torch.distributed as dist

    from longshore.cli import terminal
    from longshore.cli.loop import Loop

    terminal.GRACE_S = 0.0  # no launcher ends this rank meanwhile
    number = dict(signals or {}).get(dist.get_rank())
    backward = Loop._backward

    def interrupted(loop: Any, step: int, lr: float) -> float:
        if number is not None and step == number[0]:
            os.kill(os.getpid(), number[1])
        return backward(loop, step, lr)

    out, err = io.StringIO(), io.StringIO()
    former = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Loop._backward = interrupted
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = os.environ["RANK"], "none", "1"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        return code, out.getvalue(), err.getvalue()
    finally:
        Loop._backward = backward
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        for each, handler in former.items():
            signal.signal(each, handler)
