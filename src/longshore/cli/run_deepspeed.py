"""``longshore run-deepspeed``: runs a script that imports deepspeed as ``python SCRIPT`` does, on longshore."""

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

from longshore.cli.terminal import ALONE, SettingsError, launched_rank

AS_PYTHON = {"allow_interspersed_args": False}
"""typer settings with which everything after the script is an argument of the script."""


_Script = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script and its arguments.")]
_Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")]
_LocalRank = Annotated[
    bool, typer.Option("--local-rank", help="Pass --local_rank=N to the script first, as DeepSpeed's launcher does.")
]


def run_deepspeed(script: _Script, module: _Module = False, local_rank: _LocalRank = False) -> None:
    """Run an unmodified DeepSpeed script: its `import deepspeed` gets longshore, in this process only.

    On several ranks: torchrun --nproc-per-node=2 -m longshore run-deepspeed train.py ...
    """
    name, arguments = script[0], script[1:]
    if not module and not os.path.exists(name):
        raise SettingsError(f"there is no script {name}")
    _set_rank()
    if local_rank:
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    from longshore.compat.finder import stand_in_for_deepspeed

    stand_in_for_deepspeed()
    sys.argv = [name, *arguments]
    code = _guarded(lambda: _run_module(name) if module else _run_file(name))
    if code:
        raise typer.Exit(code)


def run(
    script: _Script,
    as_deepspeed: Annotated[bool, typer.Option("--as-deepspeed", help="Needed.")] = False,
    module: _Module = False,
    local_rank: _LocalRank = False,
) -> None:
    """Run an unmodified DeepSpeed script. The former name of run-deepspeed."""
    if not as_deepspeed:
        raise SettingsError("the command is longshore run-deepspeed SCRIPT, or longshore run --as-deepspeed SCRIPT")
    run_deepspeed(script, module, local_rank)


def _set_rank() -> None:
    """Set the variables of DeepSpeed's launcher, which scripts read, if this process has no launcher."""
    if launched_rank() != ALONE or "RANK" in os.environ:
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
        # Without the __future__ imports of this file, which compile() would apply too.
        code = compile(file.read(), name, "exec", dont_inherit=True)
    # It stays there to the end, as python's own __main__ does, for functions that run at exit.
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
    """Run ``main``, return the exit code, and print an exception as python does, without the frames of longshore."""
    try:
        main()
    except SystemExit:
        raise  # python prints its message or exits with its code
    except BaseException as error:
        error.with_traceback(_script_frames(error))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _script_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the first frames, of this file and runpy; None if the script does not compile."""
    own = (__file__, "<frozen runpy>", "runpy.py")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.endswith(own):
        frames = frames.tb_next
    return frames if frames is not None or isinstance(error, SyntaxError) else error.__traceback__
