"""``longshore import-deepspeed``: a checkpoint that DeepSpeed saved, as one that the engine loads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from longshore.cli.failure import SettingsError
from longshore.cli.terminal import make_console, warn


def import_deepspeed(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of checkpoints that DeepSpeed saved.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint; load_checkpoint takes it.")],
    tag: Annotated[str | None, typer.Option(help="Which of the checkpoints. Default: the latest.")] = None,
) -> None:
    """Write a checkpoint of DeepSpeed's (ZeRO stages 1, 2 and 3, Adam or AdamW) as one of longshore's.

    Needs no DeepSpeed, and runs nothing that the files name.
    """
    from longshore.checkpoint.deepspeed import import_deepspeed as write

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        try:
            path = write(checkpoint, out, tag)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        finally:
            for each in told:
                warn(str(each.message))
    make_console().print(f"written to {path}", markup=False, soft_wrap=True)
