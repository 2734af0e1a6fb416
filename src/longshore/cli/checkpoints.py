"""``longshore export``, ``inspect`` and ``import-deepspeed``: commands for checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from longshore.cli.output import CHECKPOINTS, RUN
from longshore.cli.settings import DTYPES
from longshore.cli.terminal import SettingsError, make_console, plural, print_lines, warn, warnings_as_lines
from longshore.seam import format_byte_size, parse_byte_size

if TYPE_CHECKING:
    from rich.table import Table

    from longshore.seam import CheckpointSummary, Inspection

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of checkpoints, or of one.")]
_Tag = Annotated[str | None, typer.Option(help="Tag of the checkpoint. Default: the latest.")]
_SHOWN_FILES = 20


def export(
    checkpoint: _Folder,
    out: Annotated[Path, typer.Option(help="Folder to write, which must be new or empty.")],
    tag: _Tag = None,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of tensors in a file: 500MB, 5GB, 2GiB.")] = "5GB",
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(DTYPES)}: dtype of the weights (fp32: the masters). Default: as trained."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Write a checkpoint's weights as safetensors files that from_pretrained of transformers loads.

    One tensor is in memory at a time, whatever the size of the model.
    """
    try:
        max_shard_bytes = parse_byte_size(max_shard_size)
    except ValueError as error:
        raise SettingsError(f"--max-shard-size: {error}") from error
    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    from longshore.seam import export as write
    from longshore.seam import precision

    console = make_console()
    with _bar(console) as progress, warnings_as_lines():
        try:
            done = write(
                _folder_of(checkpoint),
                out,
                max_shard_bytes,
                None if dtype is None else precision.DTYPES[dtype],
                tag=tag,
                overwrite=overwrite,
                progress=progress,
            )
        except ValueError as error:
            raise SettingsError(str(error).replace("overwrite=True", "--overwrite")) from error
    files = plural(sum(name.endswith(".safetensors") for name in done.files), "file")
    tensors = f"{plural(done.num_tensors, 'tensor')}, {format_byte_size(done.num_bytes)}"
    console.print(f"{done.tag} (step {done.step}): {tensors}, in {files} of {done.path}", markup=False)
    if "config.json" not in done.files:
        warn("the checkpoint has no config.json (its model is not from transformers); from_pretrained needs one")


def inspect(
    checkpoint: _Folder,
    tag: _Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors too.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their checksums.")] = False,
) -> None:
    """Show which checkpoints a folder has, whether they are complete, and the contents of one of them.

    The exit code is 1 if none is complete.
    """
    from longshore.seam import inspect as look

    try:
        found = look(_folder_of(checkpoint), tag, verify)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if as_json:
        print_lines([found.to_json()])
    else:
        _show(make_console(), found, tensors, verify)
    raise typer.Exit(0 if found.checkpoint is not None else 1)


def import_deepspeed(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of checkpoints that DeepSpeed saved.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint, which load_checkpoint loads.")],
    tag: _Tag = None,
) -> None:
    """Convert a DeepSpeed checkpoint (ZeRO stages 1, 2 and 3, Adam or AdamW) to a checkpoint of longshore.

    It does not need DeepSpeed, and executes nothing that the files name.
    """
    from longshore.compat.checkpoint.importing import import_deepspeed as write

    with warnings_as_lines():
        try:
            path = write(checkpoint, out, tag)
        except ValueError as error:
            raise SettingsError(str(error)) from error
    print_lines([f"written to {path}"])


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, on a terminal only; yield a function that takes the bytes written and the total bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("verifying", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, description="writing")


def _folder_of(path: Path) -> Path:
    """Return the folder of the checkpoints, even if ``path`` is the folder of a run of ``longshore train``."""
    if not path.is_dir():
        raise SettingsError(f"there is no folder {path}")
    return path / CHECKPOINTS if (path / RUN).is_file() and (path / CHECKPOINTS).is_dir() else path


def _show(console: Console, found: Inspection, lists_tensors: bool, verified: bool) -> None:
    if found.tags:
        rows = []
        for each in found.tags:
            words = [*(["latest"] if each.latest else []), *(["damaged"] if each.problem else [])]
            step = "" if each.step is None else str(each.step)
            rows.append((each.tag, step, format_byte_size(each.num_bytes), ", ".join(words)))
        console.print(_table(rows, "tag", "step", "size", ""))
        for each in found.tags:
            if each.problem is not None:
                console.print(f"{each.tag}: {each.problem}", markup=False)
    checkpoint = found.checkpoint
    if checkpoint is None:
        return
    console.print(_table(list(_about(checkpoint, verified))))
    files = [(name, format_byte_size(num_bytes)) for name, num_bytes in checkpoint.files.items()]
    if len(files) > _SHOWN_FILES:
        files[_SHOWN_FILES:] = [(f"and {len(files) - _SHOWN_FILES} more", "")]
    console.print(_table(files, "file", "size"))
    if lists_tensors:
        rows = []
        for each in checkpoint.tensors:
            shape = "x".join(map(str, each.shape)) or "scalar"
            rows.append((each.name, each.dtype, shape, str(each.chunks), format_byte_size(each.num_bytes)))
        console.print(_table(rows, "tensor", "dtype", "shape", "chunks", "size"))


def _about(checkpoint: CheckpointSummary, verified: bool) -> Iterator[tuple[str, str]]:
    """Yield labels and values that describe a checkpoint."""
    yield "checkpoint", checkpoint.path
    yield "step", str(checkpoint.step)
    yield "saved", f"{_date(checkpoint.created_ns)}, by {plural(checkpoint.world_size or 0, 'rank')}"
    processor = f" on {checkpoint.processor}" if checkpoint.processor else ""
    yield "with", f"longshore {checkpoint.longshore}, torch {checkpoint.torch}{processor}"
    yield "arithmetic", f"version {checkpoint.arithmetic}"
    yield "size", f"{format_byte_size(checkpoint.num_bytes)} in {plural(len(checkpoint.files), 'file')}"
    yield "whole", "sizes and checksums agree" if verified else "sizes agree (--verify: checksums, too)"
    kinds: dict[str, list[int]] = {}  # a tensor's kind is the part of its name before the first dot
    for each in checkpoint.tensors:
        kinds.setdefault(each.name.partition(".")[0], []).append(each.num_bytes)
    counts = [f"{len(sizes)} of the {kind} ({format_byte_size(sum(sizes))})" for kind, sizes in kinds.items()]
    yield "tensors", ", ".join(counts)
    if checkpoint.aliases:
        yield "tied", ", ".join(f"{name} = {first}" for name, first in checkpoint.aliases.items())
    if checkpoint.left_out:
        yield "left out", f"{plural(len(checkpoint.left_out), 'frozen parameter')}"
    state = checkpoint.optimizer
    yield "optimizer", "none" if state is None else f"{state.kind}, {_steps(state.first_step, state.last_step)}"
    if state is not None and state.states_seed is not None:
        counts = ", ".join(f"{format} for {plural(count, 'parameter')}" for format, count in state.states.items())
        yield "states", f"{counts}; seed {state.states_seed}"
    for number, group in enumerate([] if state is None else state.groups):
        options = ", ".join(f"{key} {_short(value)}" for key, value in group.options.items() if value is not None)
        yield f"group {number}", f"{plural(group.num_parameters, 'parameter')}: {options}"
    yield "client_state", ", ".join(checkpoint.client_state) or "empty"


def _steps(first: int | None, last: int | None) -> str:
    if first is None or last is None:
        return "without state"
    return plural(last, "step") if first == last else f"{first} to {last} steps"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "a tensor" if hasattr(value, "is_meta") else str(value)


def _date(created_ns: int) -> str:
    from datetime import datetime, timezone

    if created_ns < 0:
        return "at an unknown time"
    return datetime.fromtimestamp(created_ns // 10**9, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _table(rows: Sequence[Sequence[str]], *headers: str) -> Table:
    """Return a table of cells without markup. Characters that are not printable become question marks."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=bool(headers))
    for header in headers:
        table.add_column(header, justify="right" if header in ("step", "size", "chunks") else "left")
    for row in rows:
        table.add_row(*(Text("".join(letter if letter.isprintable() else "?" for letter in cell)) for cell in row))
    return table
