"""Two calls that training scripts make before ``initialize``."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

from longshore.engine.ranks import DEFAULT_TIMEOUT, join


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    **ignored: Any,
) -> None:
    """Join the other ranks now rather than in ``initialize()``, which then finds the process group.

    Args:
        dist_backend: of torch.distributed; default: nccl for CUDA, gloo for the CPU.
        auto_mpi_discovery: accepted; launchers are always looked for.
        distributed_port: of rank 0, where no launcher names one.
        verbose: accepted; nothing is printed.
        timeout: of each collective.

    Raises:
        ValueError: launcher variables that contradict each other, or an argument that cannot be honoured.
        RendezvousError: the other ranks did not come in time.
    """
    if ignored:
        raise ValueError(f"init_distributed() does not do {', '.join(sorted(ignored))}; leave it out")
    join(backend=dist_backend, timeout=timeout, environ=with_port(distributed_port))


def with_port(port: int | None) -> dict[str, str] | None:
    """The environment, with a port for the ranks to meet at where a launcher started several and named none."""
    if port is None or "WORLD_SIZE" not in os.environ:
        return None
    return {"MASTER_PORT": str(port), **os.environ}


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config PATH``, which ``initialize(args=...)`` reads."""
    group = parser.add_argument_group("longshore", "the engine's configuration")
    group.add_argument("--deepspeed", action="store_true", help="accepted; scripts ask for the engine with it")
    group.add_argument("--deepspeed_config", default=None, help="a configuration file")
    return parser
