"""``longshore run --as-deepspeed``: a script that says ``import deepspeed``, run as by ``python SCRIPT``."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated

import typer

from longshore.cli.failure import SettingsError
from longshore.cli.launched import ALONE, place

AS_PYTHON = {"allow_interspersed_args": False}
"""What follows the script is the script's, whatever it looks like."""


def run(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script, and everything that it gets.")
    ],
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="`import deepspeed` gives longshore, in this process only.")
    ] = False,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
    local_rank: Annotated[
        bool, typer.Option("--local-rank", help="Give the script --local_rank=N first, as DeepSpeed's launcher does.")
    ] = False,
) -> None:
    """Run an unmodified script on longshore.

    On several ranks: torchrun --nproc-per-node=2 -m longshore run --as-deepspeed train.py ...
    """
    if not as_deepspeed:
        raise SettingsError("run needs to know as what a script is to run: longshore run --as-deepspeed SCRIPT")
    name, arguments = script[0], script[1:]
    if not module and not os.path.exists(name):
        raise SettingsError(f"there is no script {name}")
    _tell_rank()
    if local_rank:
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    from longshore.compat.finder import stand_in_for_deepspeed

    stand_in_for_deepspeed()
    sys.argv = [name, *arguments]
    code = _guarded(lambda: _run_module(name) if module else _run_file(name))
    if code:
        raise typer.Exit(code)


def _tell_rank() -> None:
    """What DeepSpeed's launcher would say to the one rank that was started without any: scripts read it."""
    if place() != ALONE or "RANK" in os.environ:
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _run_file(name: str) -> None:
    import runpy

    path = Path(name)
    if path.is_dir() or path.suffix in (".zip", ".pyz"):
        sys.path[0] = name
        runpy.run_path(name, run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(path.resolve().parent)
    with io.open_code(str(path.absolute())) as file:
        # Without our own __future__ imports, which compile() would hand down.
        code = compile(file.read(), name, "exec", dont_inherit=True)
    # It stays there to the end, as python's own does: what runs at exit finds its names.
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path.absolute()), __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _run_module(name: str) -> None:
    import runpy

    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _guarded(main: Callable[[], None]) -> int:
    """The exit code. What the script raises is printed as python prints it, without the frames that are ours."""
    try:
        main()
    except SystemExit:
        raise  # as it is: python itself prints its message or ends with its code
    except BaseException as error:
        error.with_traceback(_of_script(error))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_script(error: BaseException) -> TracebackType | None:
    """From the first frame that is neither ours nor runpy's on; none where the script cannot be compiled."""
    own = (__file__, "<frozen runpy>", "runpy.py")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.endswith(own):
        frames = frames.tb_next
    return frames if frames is not None or isinstance(error, SyntaxError) else error.__traceback__
