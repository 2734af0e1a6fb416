"""DeepSpeed files with ``offload_param``: on the CPU, and on devices, to which parameters are copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from compat.resting_cases import PARAMETERS, evaluated, trained

FILES = {
    "parameters": {"stage": 3, "offload_param": PARAMETERS},
    "both": {"stage": 3, "offload_param": PARAMETERS, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "old name": {"stage": 3, "cpu_offload_param": True, "cpu_offload": True},
}
STATES = {"device": "cpu"}


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore:.*old name")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("file", FILES)
def test_an_engine_without_an_optimizer(file: str, dtype: str, frozen: bool) -> None:
    evaluated(dtype, frozen, {"zero_optimization": FILES[file]})


@pytest.mark.needs_torch("stage 3")
@pytest.mark.parametrize("frozen", [False, True])
def test_an_engine_without_an_optimizer_on_two_ranks(frozen: bool, two_ranks: Ranks) -> None:
    two_ranks(evaluated, "bfloat16", frozen, {"zero_optimization": FILES["parameters"]})


def test_below_stage_3_its_parameters_stay_on_the_device() -> None:
    """A framework may write offload_param into the files of all stages."""
    with pytest.warns(UserWarning, match="offload_param is for stage 3, and this engine .* has stage 0"):
        evaluated("float32", False, {"zero_optimization": {"stage": 0, "offload_param": PARAMETERS}})


def check_same_weights(found: Any, expected: Any) -> None:
    (told, weights, said), (silent, others, _) = found, expected
    (note,) = [each for each in told if "offload_param" in each]
    assert "the optimizer's state is on the host, too, and is stepped there" in note
    assert not any("offload_param" in each for each in silent)
    assert all(map(torch.equal, weights, others)) and said


@pytest.mark.parametrize("none", [{}, {"offload_optimizer": {"device": "none"}}])
def test_parameters_on_the_host_are_stepped_there(none: dict[str, Any]) -> None:
    found = trained({"offload_param": PARAMETERS, **none})
    check_same_weights(found, trained({"offload_param": PARAMETERS, "offload_optimizer": STATES}))


@pytest.mark.needs_torch("stage 3")
def test_parameters_on_the_host_are_stepped_there_on_two_ranks(two_ranks: Ranks) -> None:
    found, others = two_ranks(trained, {"offload_param": PARAMETERS})
    both = two_ranks(trained, {"offload_param": PARAMETERS, "offload_optimizer": STATES})
    check_same_weights(found, both[0])
    assert not any("offload_param" in each for each in others[0])  # one rank says it


# -- on devices --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*old name")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_on_a_device_it_is_streamed(file: str, frozen: bool) -> None:
    evaluated("bfloat16", frozen, {"zero_optimization": FILES[file]})


@pytest.mark.gpu
def test_on_two_devices_it_is_streamed(two_devices: Ranks) -> None:
    two_devices(evaluated, "float32", True, {"zero_optimization": FILES["parameters"]})


@pytest.mark.gpu
def test_on_devices_parameters_are_stepped_on_the_host(two_devices: Ranks) -> None:
    """The weights are those of parameters on the device, whose states are on the host."""
    check_same_weights(trained({"offload_param": PARAMETERS}), trained({"offload_optimizer": STATES}))
    found, _ = two_devices(trained, {"offload_param": PARAMETERS})
    check_same_weights(found, two_devices(trained, {"offload_optimizer": STATES})[0])
