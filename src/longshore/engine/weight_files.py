"""Weights in safetensors files, read range by range; and whole weights of a model, gathered and written."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from longshore.optim.shards import is_sharded
from longshore.sharding import gather

_INDEX = "model.safetensors.index.json"


class WeightFiles:
    """Tensors by name, in one file or in all files of a folder. Files are mapped: what is not read takes no memory.

    Args:
        path: a ``.safetensors`` file, or a folder with some (as ``save_pretrained`` makes them).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that cannot be read, by name, or a tensor that is in two files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for file in _files(self.path):
                self._open(file)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118 - no mapping
            if name in self._file_of:
                raise ValueError(f"tensor {name} is in two files of {self.path}; remove the stale ones")
            self._file_of[name] = file

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file_of.clear()
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype as the format names it: F32, BF16, I8."""
        return self._file_of[name].get_slice(name).get_dtype()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows ``[start, stop)`` in the file's dtype; a tensor without dimensions is read as a whole."""
        if not self.shape(name):
            return self._file_of[name].get_tensor(name)
        return self._file_of[name].get_slice(name)[start:stop]

    def chosen(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the name in the files for each of a model's tensors: its own, or that of one tied to it.

        Raises:
            ValueError: tensors that are missing, or have another shape or kind of number; all of them, by name.
        """
        names_of: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names_of.setdefault(id(tensor), []).append(name)
        found, wrong = {}, []
        for name, tensor in tensors.items():
            here = next((each for each in [name, *names_of[id(tensor)]] if each in self._file_of), None)
            if here is None:
                wrong.append(f"{name} is not there")
            elif self.shape(here) != tuple(tensor.shape):
                wrong.append(f"{here} is {list(self.shape(here))} and the model's is {list(tensor.shape)}")
            elif _is_floating_point(self.dtype(here)) != tensor.is_floating_point():
                wrong.append(f"{here} is {self.dtype(here)} and the model's is {tensor.dtype}")
            else:
                found[name] = here
        if wrong:
            raise ValueError(f"{self.path} has not the weights of this model: {_several(wrong)}")
        return found


def _files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no file or folder {path} to read weights from; models on a hub are not fetched: give a folder"
        )
    index = path / _INDEX
    if index.is_file():
        try:
            listed = json.loads(index.read_text())["weight_map"].values()
            found = [path / name for name in sorted(set(listed))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is not a valid index of weights: {error}") from error
        missing = [file.name for file in found if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"{index} names {_several(missing)}, which {path} does not have")
        return found
    found = sorted(path.glob("*.safetensors"))
    if not found:
        others = sorted(each.name for each in path.glob("*.bin"))
        convert = f"; load {others[0]} once and write it with safetensors.torch.save_file" if others else ""
        raise FileNotFoundError(f"{path} has no .safetensors file to read weights from{convert}")
    return found


def _is_floating_point(dtype: str) -> bool:
    return dtype.startswith(("F", "BF"))


def _several(entries: Sequence[str]) -> str:
    shown = ", ".join(entries[:3])
    return shown if len(entries) <= 3 else f"{shown}, and {len(entries) - 3} more"


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert as ``module.to(dtype)`` would."""
    return values if values.dtype == dtype else values.to(dtype)


# -- whole weights of a model -----------------------------------------------------


def whole_weights(model: nn.Module, keep: bool, trainable_only: bool = False) -> dict[str, Tensor] | None:
    """Copy parameters and persistent buffers to a state dict on the CPU, tied ones once for all of their names.

    Where parameters are sharded all ranks have to call, and each module's are gathered in turn.

    Args:
        model: of an engine.
        keep: whether this process gets the copies.
        trainable_only: leave frozen parameters out.

    Returns:
        None without ``keep``.
    """
    state = model.state_dict(keep_vars=True)
    wanted = {id(each) for each in state.values() if isinstance(each, Tensor)}
    copies: dict[int, Tensor | None] = {}
    for module in model.modules():
        own = [each for each in module.parameters(recurse=False) if id(each) in wanted and id(each) not in copies]
        with gather(own) if any(map(is_sharded, own)) else contextlib.nullcontext(own) as whole:
            for parameter, values in zip(own, whole, strict=True):
                left_out = trainable_only and not parameter.requires_grad
                copies[id(parameter)] = values.detach().to("cpu", copy=True) if keep and not left_out else None
    if not keep:
        return None
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        copy = copies[id(value)] if isinstance(value, Tensor) else value
        if copy is not None:
            found[name] = copy
    return found


def save_weights(weights: Mapping[str, Any], folder: str | os.PathLike[str], name: str) -> Path:
    """Write a state dict, as safetensors where the name ends so (tied tensors once), else for ``torch.load``.

    The file is written atomically: it gets its name when it is complete.
    """
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.writing-{secrets.token_hex(4)}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            first: dict[int, str] = {}
            own = {name: each for name, each in weights.items() if first.setdefault(id(each), name) == name}
            save_file({name: each.contiguous() for name, each in own.items()}, half, {"format": "pt"})
        else:
            torch.save(dict(weights), half)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
    return path


def load_weights(model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors as ``model.load_state_dict`` does, also into shards; all ranks have to pass the same.

    Raises:
        RuntimeError: torch's, if they do not fit.
    """
    if not any(map(is_sharded, model.parameters())):
        model.load_state_dict(state, strict=strict)
        return
    # Imported here: only shards need it, and it takes a while.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))
