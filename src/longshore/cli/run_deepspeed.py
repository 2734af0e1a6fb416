"""``longshore run-deepspeed``: run a script as ``python SCRIPT`` does, with longshore in place of deepspeed."""

from __future__ import annotations

import io
import os
import shutil
import socket
import sys
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

    SCRIPT may also be a Python program on the PATH, such as a launcher: longshore run-deepspeed accelerate launch ...
    Ranks that it starts with torchrun get longshore too.
    """
    name, arguments = script[0], script[1:]
    if not module and not os.path.exists(name):
        name = _program(name)
    _set_rank()
    _set_python_of_ranks()
    if local_rank:
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    from longshore.compat.finder import stand_in_for_deepspeed

    stand_in_for_deepspeed()
    sys.argv = [name, *arguments]
    try:
        _run(name, module)
    except SystemExit:
        raise  # python prints its message or exits with its code
    except BaseException as error:
        # Print the error as python does, without the frames of longshore.
        error.with_traceback(_script_frames(error))
        sys.excepthook(type(error), error, error.__traceback__)
        raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))


def _program(name: str) -> str:
    """Return the path of a program on the PATH that is a Python script, as pip installs them."""
    path = None if os.sep in name else shutil.which(name)
    if path is None:
        from longshore.compat.absent import NAME, advice

        instead = f"; {advice('launcher.launch')}" if name == NAME else ""
        raise SettingsError(f"there is no script {name}{instead}")
    with open(path, "rb") as file:
        start = file.read(1024)
    # pip writes "#!/bin/sh" and a line with exec where the path of python is long.
    if not start.startswith(b"#!") or b"python" not in start:
        raise SettingsError(f"{path} is not a Python script; give the script, or -m and a module")
    return path


def _set_python_of_ranks() -> None:
    """Have torchrun, if the script starts it, run its ranks with this command: torchrun reads PYTHON_EXEC."""
    own = str(Path(__file__).parents[1] / "compat" / "rank.sh")
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if python != own:
        os.environ.update(LONGSHORE_PYTHON=python, PYTHON_EXEC=own)


def _run(name: str, is_module: bool) -> None:
    """Run a module, or a script: a file, or a folder or an archive with ``__main__.py``."""
    import runpy

    path = Path(name)
    has_main = not is_module and (path.is_dir() or path.suffix in (".zip", ".pyz"))
    if has_main:
        sys.path[0] = name
    elif not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else str(path.resolve().parent)
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if has_main:
        runpy.run_path(name, run_name="__main__")
        return
    with io.open_code(str(path.absolute())) as file:
        # dont_inherit: otherwise compile() would apply the __future__ imports of this file too.
        code = compile(file.read(), name, "exec", dont_inherit=True)
    # The module stays in sys.modules to the end, as python's own __main__ does, for functions that run at exit.
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path.absolute()), __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _script_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without its first frames, of this file and runpy; None if the script does not compile."""
    own = (__file__, "<frozen runpy>", "runpy.py")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.endswith(own):
        frames = frames.tb_next
    return frames if frames is not None or isinstance(error, SyntaxError) else error.__traceback__
