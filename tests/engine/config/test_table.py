"""The table, its page, and the tests that it names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from longshore.engine.config import Config
from longshore.engine.config.keys import Key, Treatment
from longshore.engine.config.optimizers import OPTIMIZERS
from longshore.engine.config.page import page
from longshore.engine.config.schedulers import SCHEDULERS
from longshore.engine.config.table import KEYS, TABLE, TARGETS, names_in
from longshore.engine.config.values import Block

ROOT = Path(__file__).parents[3]

PENDING: tuple[str, ...] = (
    "tests/engine/test_clipping.py::test_coefficient",
    "tests/engine/test_initialize.py::test_drop_last",
    "tests/engine/test_initialize.py::test_host_settings",
    "tests/engine/test_logging.py::test_dump_state",
    "tests/engine/test_logging.py::test_steps_per_print",
    "tests/engine/test_logging.py::test_wall_clock_breakdown",
    "tests/engine/test_optimizers_by_name.py::test_params",
    "tests/engine/test_optimizers_by_name.py::test_types",
    "tests/engine/test_precision.py::test_accumulation_dtype",
    "tests/engine/test_precision.py::test_autocast",
    "tests/engine/test_precision.py::test_bf16",
    "tests/engine/test_precision.py::test_bf16_overflow_check",
    "tests/engine/test_precision.py::test_cast_inputs",
    "tests/engine/test_precision.py::test_communication_dtype",
    "tests/engine/test_precision.py::test_dynamic_loss_scale",
    "tests/engine/test_precision.py::test_fp16",
    "tests/engine/test_precision.py::test_gradient_predivide_factor",
    "tests/engine/test_precision.py::test_prescale_gradients",
    "tests/engine/test_precision.py::test_static_loss_scale",
    "tests/engine/test_schedules.py::test_cosine",
    "tests/engine/test_schedules.py::test_one_cycle",
    "tests/engine/test_schedules.py::test_range_test",
    "tests/engine/test_schedules.py::test_types",
    "tests/engine/test_schedules.py::test_warmup",
    "tests/engine/test_table.py::test_bucket_sizes",
    "tests/engine/test_table.py::test_offload",
    "tests/engine/test_table.py::test_overlap_comm",
    "tests/engine/test_table.py::test_stages",
    "tests/engine/test_windows.py::test_batch_numbers",
    "tests/engine/test_windows.py::test_gradient_accumulation_steps",
    "tests/test_checkpointing.py::test_cpu_checkpointing",
)
"""Tests that the table names and that are still to be written."""


def identity(key: Key) -> str:
    return key.path


def test_the_page_is_generated() -> None:
    assert (ROOT / "docs" / "deepspeed_config.md").read_text() == page(), (
        "run: python -m longshore.engine.config.page > docs/deepspeed_config.md"
    )


def named_tests() -> list[str]:
    return sorted({key.test for key in TABLE if key.treatment is Treatment.HONOURED})


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def test_what_is_honoured_has_a_test_that_shows_it() -> None:
    missing = [test for test in named_tests() if not exists(test)]
    print("\n".join(("still to be written:", *PENDING)))
    assert missing == sorted(PENDING)


def test_rows_are_unique_and_whole() -> None:
    assert len(KEYS) == len(TABLE)
    for key in TABLE:
        assert key.what, key.path
        assert bool(key.test) == (key.treatment is Treatment.HONOURED), key.path
        if key.treatment is Treatment.REFUSED and not isinstance(key.kind, Block):
            # What switches it off is a value that it may have.
            assert all(key.is_harmless(key.kind.check(value)) for value in key.harmless), key.path
        if key.renamed:
            section, _, name = key.renamed.rpartition(".")
            assert KEYS[section, name].treatment is Treatment.HONOURED
            for old, new in key.values:
                key.kind.check(old)
                assert new is None or KEYS[section, name].kind.check(new) == new


def test_every_field_of_config_can_be_reached_from_a_file() -> None:
    by_translation = {"dtype", "autocast", "loss_scaling", "cast_inputs", "gradient_clipping", "optimizer", "scheduler"}
    assert {*TARGETS} | by_translation == {*Config.model_fields}
    assert not {*TARGETS} & by_translation


@pytest.mark.parametrize("section, models", [("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)])
def test_parameters_in_the_table_are_those_of_the_models(section: str, models: dict[str, type]) -> None:
    for kind, model in models.items():
        taken = {
            name
            for name in names_in(f"{section}.params", kind)
            if KEYS[f"{section}.params", name].treatment is Treatment.HONOURED
        }
        assert taken - {"adam_w_mode", "torch_adam"} == {*model.model_fields} - {"type"}, kind
