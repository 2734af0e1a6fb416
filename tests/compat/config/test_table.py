"""The table, its buffer, and the tests that it names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from longshore.compat.config.keys import Key, Treatment
from longshore.compat.config.kinds import Block
from longshore.compat.config.reading import names_in
from longshore.compat.config.table import KEYS, TABLE, TARGETS
from longshore.engine.config import Config, LossScaling
from longshore.engine.config.optimizers import OPTIMIZER_CONFIGS
from longshore.engine.config.schedulers import SCHEDULER_CONFIGS
from scripts.docs.key_tests import TESTS
from scripts.docs.keys_page import PARAMETERS

ROOT = Path(__file__).parents[3]


def identity(key: Key) -> str:
    return key.path


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def test_what_is_honoured_has_a_test_that_shows_it() -> None:
    assert {*TESTS} == {key.path for key in TABLE if key.treatment is Treatment.HONOURED}
    missing = [test for test in sorted({*TESTS.values()}) if not exists(test)]
    assert missing == []


def test_rows_are_unique_and_whole() -> None:
    assert len(KEYS) == len(TABLE)
    for key in TABLE:
        described = key.what or key.field or (key.section in PARAMETERS and key.treatment is Treatment.HONOURED)
        assert described, key.path
        if key.treatment is Treatment.REFUSED and not isinstance(key.kind, Block):
            # What switches it off is a value that it may have.
            assert all(key.is_harmless(key.kind.check(value)) for value in key.harmless), key.path
        if key.renamed:
            section, _, name = key.renamed.rpartition(".")
            assert KEYS[section, name].treatment is Treatment.HONOURED
            if key.when_true:
                key.kind.check(True)
                assert KEYS[section, name].kind.check(key.when_true) == key.when_true


def test_every_field_of_config_can_be_reached_from_a_file() -> None:
    by_translation = {
        *("dtype", "autocast", "loss_scaling", "cast_inputs"),
        *("gradient_clipping", "optimizer", "scheduler", "cpu_share"),
        *("tensorboard", "wandb", "csv_monitor", "flops_profiler"),
    }
    of_scaling = {f"loss_scaling.{name}" for name in LossScaling.model_fields if name != "scale"}
    assert {*TARGETS} == {*Config.model_fields} - by_translation | of_scaling
    assert by_translation < {*Config.model_fields}
    assert {*TARGETS.values()} == {key.path for key in TABLE if key.field}


@pytest.mark.parametrize("section, models", [("optimizer", OPTIMIZER_CONFIGS), ("scheduler", SCHEDULER_CONFIGS)])
def test_parameters_in_the_table_are_those_of_the_models(section: str, models: dict[str, type]) -> None:
    for kind, model in models.items():
        taken = {
            name
            for name in names_in(f"{section}.params", kind)
            if KEYS[f"{section}.params", name].treatment is Treatment.HONOURED
        }
        assert taken - {"adam_w_mode", "torch_adam", "ns_method", "fp32_optimizer_states"} == {*model.model_fields} - {
            "type"
        }, kind
