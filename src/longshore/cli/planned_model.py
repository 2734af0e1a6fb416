"""What ``longshore plan`` is given as a model: a configuration of transformers, weights, or a function."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from longshore.cli.failure import CommandError, one_line
from longshore.cli.model import load_transformers
from longshore.plan.model import PlannedModel
from longshore.plan.reading import is_weights, module_of_function, plan_of_files, plan_of_module

_TAKES = (
    "give a folder with config.json (of transformers) or with safetensors files, such a file, or module:function, "
    "where the function returns a torch module"
)


def read_model(given: str) -> PlannedModel:
    """Nothing is downloaded, and no weights are made.

    Raises:
        CommandError: there is nothing of the kind.
    """
    path = Path(given)
    try:
        if path.is_dir():
            if (path / "config.json").is_file():
                return _of_transformers(path / "config.json", path.resolve().name)
            if is_weights(path):
                return plan_of_files(path)
            raise CommandError(f"{given} has neither config.json nor safetensors files: {_TAKES}")
        if path.is_file():
            if is_weights(path):
                return plan_of_files(path)
            if path.suffix == ".json":
                name = path.resolve().parent.name if path.name == "config.json" else path.stem
                return _of_transformers(path, name)
            raise CommandError(f"{given} is neither JSON nor safetensors: {_TAKES}")
        if ":" in given and not given.endswith(".json"):
            if "" not in sys.path:
                sys.path.insert(0, "")  # the current folder, as for python -m
            with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of the plan
                module = module_of_function(given)
            return plan_of_module(module, given.partition(":")[2])
    except ValueError as error:
        raise CommandError(str(error)) from error
    raise CommandError(f"{given} does not exist, and nothing is downloaded: {_TAKES}")


def _of_transformers(file: Path, name: str) -> PlannedModel:
    import torch

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{file} is no JSON: {one_line(error)}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise CommandError(f"{file} has no model_type, so it is no configuration of transformers: {_TAKES}")
    transformers = load_transformers()
    kind = content["model_type"]
    if str(kind) not in transformers.CONFIG_MAPPING:
        from longshore.engine.wording import did_you_mean

        near = did_you_mean(str(kind), transformers.CONFIG_MAPPING.keys()) if len(str(kind)) < 40 else ""
        near = near if near.startswith("did") else "is it written as in the file that you took it from?"
        version = transformers.__version__
        raise CommandError(f"{file}: this transformers ({version}) knows no model_type {kind!r}; {near}")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(file, local_files_only=True)
        with torch.device("meta"):
            model = _class_of(transformers, content, config)
    except Exception as error:  # it raises whatever its parsers raise
        raise CommandError(f"transformers makes no model of {file}: {one_line(error)}") from error
    plan = plan_of_module(model, name, _head_of(model))
    if content.get("quantization_config") is None:
        return plan
    note = "quantization_config is left aside: the whole of it is trained, in the dtype of the plan"
    return replace(plan, notes=(*plan.notes, note))


def _class_of(transformers: Any, content: dict[str, Any], config: Any) -> Any:
    for name in content.get("architectures") or ():
        kind = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind._from_config(config)  # by which the classes below make them, in the configuration's dtype
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:  # it is none
        return transformers.AutoModel.from_config(config)


def _head_of(model: Any) -> Any:
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return getattr(output, "weight", None)
