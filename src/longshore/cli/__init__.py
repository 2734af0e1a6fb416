"""The command line: ``longshore train``, ``plan``, ``report`` and the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from longshore.cli import terminal
from longshore.cli.checkpoints import export, import_deepspeed, inspect
from longshore.cli.launch import RAW_ARGUMENTS, launch
from longshore.cli.plan import plan
from longshore.cli.report import report
from longshore.cli.run_deepspeed import AS_PYTHON, run, run_deepspeed
from longshore.cli.train import demo, train

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train PyTorch models with the optimizer's state in host memory, bit for bit.",
)
app.command()(train)
app.command(add_help_option=False, context_settings=RAW_ARGUMENTS)(launch)
app.command()(demo)
app.command(context_settings=AS_PYTHON)(run_deepspeed)
app.command(context_settings=AS_PYTHON, hidden=True)(run)
for _command in (export, inspect, import_deepspeed, report, plan):
    app.command()(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"longshore {metadata.version('longshore')}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)]


@app.callback()
def _global_options(_: _Version = False) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``arguments`` (default: those of the process), and return the exit code.

    Errors are one line on stderr. Only a bug in longshore shows a traceback.
    """
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except terminal.StopNow as stop:
        return _fail("ended at once; the file that was being written is removed", stop.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130) if terminal.launched_rank().speaks else 130
    except terminal.CommandError as error:
        everywhere = isinstance(error, (terminal.SettingsError, terminal.SharedError))
        return _fail(str(error), error.exit_code, everywhere)
    except BrokenPipeError:
        terminal.silence_stdout()
        return 1
    except OSError as error:
        terminal.silence_stdout()
        return _fail(f"{error.filename or 'standard output'}: {terminal.os_reason(error)}", 1)
    except Exception as error:
        return _fail(*_explain(error), everywhere=_is_usage(error))


def _dispatch(arguments: list[str]) -> int:
    # app() is not called: its handling of interrupts and errors differs between versions of typer.
    command = typer.main.get_command(app)
    try:
        with command.make_context("longshore", _with_resume_auto(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    finally:
        if sys.stdout is not None:  # it is None after >&-
            sys.stdout.flush()
    return 0


def _with_resume_auto(arguments: Sequence[str]) -> list[str]:
    """Replace ``train --resume auto`` by ``--resume-auto``, since an option has a value always or never."""
    found: list[str] = []
    for given in arguments:
        if given == "--resume=auto" or (given == "auto" and found[-1:] == ["--resume"]):
            found[len(found) - (given == "auto") :] = ["--resume-auto"]
        else:
            found.append(given)
    return found if arguments[:1] == ["train"] else [*arguments]


def _explain(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code for an error of another package; re-raise an unknown one."""
    if _is_usage(error):
        said, commands = error.format_message().rstrip("."), _commands_of(error)  # pyright: ignore
        hint = f"the commands are {', '.join(commands)}" if commands else "see longshore --help"
        return f"{said} ({hint})", getattr(error, "exit_code", 2)
    from longshore import LongshoreError

    if isinstance(error, LongshoreError):
        return str(error), 1
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "can't allocate memory" in str(error):
        advice = "try a smaller --batch-size, --seq-len or model; where parameters take most of a device, --stream"
        return f"out of memory ({terminal.one_line(error)}): {advice}", 1
    raise error


def _commands_of(error: Exception) -> list[str]:
    """Return the names of all commands, if the error is that one is missing or unknown."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    commands = getattr(command, "commands", {})  # no group is inside another one
    return [name for name, each in commands.items() if not each.hidden]


def _is_usage(error: Exception) -> bool:
    return hasattr(error, "format_message")  # typer uses click's class or a copy of it


def _fail(message: str, exit_code: int, everywhere: bool = False) -> int:
    """Print ``message`` on each rank or, if it is the same ``everywhere``, on one rank of each machine."""
    rank, world_size, speaks = terminal.launched_rank()
    if not everywhere:
        terminal.warn(message if world_size == 1 else f"rank {rank}: {message}")
    elif speaks:
        terminal.warn(message)
    else:
        # A launcher ends all ranks as soon as one has ended: the first rank might not yet have printed its line.
        time.sleep(terminal.GRACE_S)
    return exit_code
