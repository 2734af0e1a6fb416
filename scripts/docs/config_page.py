"""``docs/configuration.md``: every field of ``longshore.Config``, of what it names, and what else may be set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import longshore
from longshore.compat.config.table import TARGETS
from longshore.engine.config import (
    Config,
    CsvConfig,
    FlopsProfilerConfig,
    LossScaling,
    TensorBoardConfig,
    WandbConfig,
)
from longshore.engine.config.optimizers import OPTIMIZER_CONFIGS
from longshore.engine.config.schedulers import SCHEDULER_CONFIGS
from longshore.engine.config.values import kind_in
from scripts.docs.docstrings import attributes_of, one_line
from scripts.docs.keys_page import sentence

INTRODUCTION = """\
# Config, its fields

<!-- Generated: python -m scripts.docs -->

`longshore.initialize(config=...)` takes a `longshore.Config`, or a DeepSpeed file, which is read into one
([every key of it](deepspeed_config.md)). Its fields are the same for both; a field that does not exist, a value of the
wrong kind and two that contradict each other are one error that lists all of them.

<!-- block: setup: labelled -->
```python
from longshore.engine.config import AdamWConfig, WarmupLRConfig

config = longshore.Config(
    micro_batch_size=8,
    gradient_accumulation_steps=2,
    stage=2,
    offload_device="cpu",
    dtype="bf16",
    gradient_clipping=1.0,
    optimizer=AdamWConfig(lr=1e-4, weight_decay=0.01),
    scheduler=WarmupLRConfig(warmup_num_steps=100),
)
engine, optimizer, loader, scheduler = longshore.initialize(model=model, training_data=data, config=config)
```

<!-- block: continues | fails: did you mean "gradient_clipping"? -->
```python
longshore.Config(grad_clipping=1.0)  # ConfigError
```

"""

BLOCKS = {
    "optimizer": "one of those below, or a dictionary with its `type`",
    "scheduler": "likewise",
    "loss_scaling": "`LossScaling`",
    "tensorboard": "`TensorBoardConfig`",
    "wandb": "`WandbConfig`",
    "csv_monitor": "`CsvConfig`",
    "flops_profiler": "`FlopsProfilerConfig`",
}

SEVERAL_KEYS = {
    "cpu_share": ("zero_optimization.offload_optimizer.cpuadam_cores_perc",),
    "dtype": ("bf16.enabled", "fp16.enabled"),
    "autocast": ("torch_autocast.enabled", "torch_autocast.dtype"),
    "loss_scaling": ("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"),
    "cast_inputs": ("fp16.auto_cast",),
    "gradient_clipping": ("gradient_clipping",),
    "optimizer": ("optimizer.type",),
    "scheduler": ("scheduler.type",),
    "tensorboard": ("tensorboard.enabled",),
    "wandb": ("wandb.enabled",),
    "csv_monitor": ("csv_monitor.enabled",),
    "flops_profiler": ("flops_profiler.enabled",),
}
"""Fields that are read from several keys of a DeepSpeed file, or not taken as they are; these first of all."""

VARIABLES = {
    "LONGSHORE_ANNOTATE": (
        "1: ranges of `torch.profiler` and NVTX on every thread and stream, as `longshore.annotate` makes"
        " them, for the whole run.",
        "tests/tracing/test_annotate.py",
    ),
    "LONGSHORE_BIND": (
        "0: no rank is bound to CPUs. 1: also where a rank's part of the machine is small.",
        "tests/engine/test_binding.py",
    ),
    "LONGSHORE_BINDING": (
        "Set by `longshore launch` for each rank: what it was bound to, and why.",
        "tests/cli/test_launch.py",
    ),
    "LONGSHORE_LAUNCH": (
        "Set by `longshore launch` for the program that binds a rank: the machine's ranks.",
        "tests/cli/test_launch.py",
    ),
    "LONGSHORE_DEBUG": (
        "1: more checks at every step, which take time: with `detect_writes` false, parameters that were written where "
        "torch cannot see it, and, "
        "on several ranks, numbers of backwards and weights that differ. Ranks then say after 1 second, not 30, for "
        "whom they wait.",
        "tests/optim/test_hostile_use.py",
    ),
    "LONGSHORE_UNKNOWN_KEYS": (
        "`warn`: unknown keys at the top level of a DeepSpeed file are ignored with a warning, as DeepSpeed "
        "ignores them without one; in sections they stay errors, as there. Default: `error`.",
        "tests/compat/config/test_conversions.py",
    ),
}
"""Environment variables; ``test_pages.py`` compares them with those that the source reads."""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## `longshore.Config`\n", *_rows(Config, attributes_of(Config), keys_of_fields())]
    parts += ["\n## `LossScaling`\n", *_rows(LossScaling, attributes_of(LossScaling), {})]
    for title, models in (("Optimizers", OPTIMIZER_CONFIGS), ("Schedules", SCHEDULER_CONFIGS)):
        parts.append(f"\n## {title}\n")
        for name, model in models.items():
            parts += [f"### `{name}`\n", f"{sentence(one_line(model.__doc__))}\n", *_rows(model, {}, {}), ""]
    parts.append("## Monitors\n")
    for monitor in (TensorBoardConfig, WandbConfig, CsvConfig, FlopsProfilerConfig):
        parts += [
            f"### `{monitor.__name__}`\n",
            f"{sentence(one_line((monitor.__doc__ or '').partition('Attributes:')[0]))}\n",
            *_rows(monitor, attributes_of(monitor), {}),
            "",
        ]
    parts += ["## `longshore.Offload`\n", _OFFLOAD, *_offload_rows(), "\n## The environment\n"]
    parts += ["| variable | what it does | test |", "|---|---|---|"]
    parts += [f"| `{name}` | {what} | `{test}` |" for name, (what, test) in VARIABLES.items()]
    return "\n".join([*parts, ""])


_OFFLOAD = """\
For the optimizers without an engine, `longshore.AdamW(..., offload=longshore.Offload(...))`, and for
`longshore.initialize(offload=...)`. Only `states` and `states_seed` change bits of the weights ([states in
fewer bytes](states.md)). Given to `initialize()`, it replaces what the configuration says of the same; states and
seeds that differ are an error.
"""


def keys_of_fields() -> dict[str, tuple[str, ...]]:
    """Keys of a DeepSpeed file by the field of ``Config`` that is read from them."""
    found = {name: (path,) for name, path in TARGETS.items() if name in Config.model_fields}
    return found | SEVERAL_KEYS


def _rows(model: Any, what: dict[str, str], keys: dict[str, tuple[str, ...]]) -> Iterable[str]:
    columns = [
        "field",
        "values",
        "default",
        *(["what it does"] if what else []),
        *(["DeepSpeed's key"] if keys else []),
    ]
    yield _row(columns)
    yield _row(["---"] * len(columns))
    for name, field in model.model_fields.items():
        if name == "type":
            continue
        cells = [f"`{name}`", _values(name, field), _default(field)]
        cells += [sentence(what[name])] if what else []
        cells += [", ".join(f"`{key}`" for key in keys[name])] if keys else []
        yield _row(cells)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _values(name: str, field: Any) -> str:
    if name in BLOCKS:
        return BLOCKS[name]
    return kind_in(field.metadata).says().replace("|", "\\|")


def _default(field: Any) -> str:
    return "has to be given" if field.is_required() else f"`{field.default!r}`"


def _offload_rows() -> Iterable[str]:
    what = attributes_of(longshore.Offload)
    yield _row(["argument", "default", "what it does"])
    yield _row(["---"] * 3)
    for field in dataclasses.fields(longshore.Offload):
        yield _row([f"`{field.name}`", f"`{field.default!r}`", sentence(what[field.name])])
