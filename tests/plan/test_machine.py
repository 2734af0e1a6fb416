"""Machines that are described, and what they compute with."""

from __future__ import annotations

import pytest
import torch

from longshore.plan.machine import GPUS, Description, MeasuredCompute, PeakCompute, Work, described
from plan.models import GB, machine


def test_what_is_said_counts_and_the_rest_is_assumed_aloud() -> None:
    found = machine(gpus=8, hosts=2, network_bytes_per_s=25e9)
    assert (found.ranks, found.ranks_per_host, found.device_bytes) == (16, 8, 141 * GB)
    assert (found.to_host_bytes_per_s, found.exchange_bytes_per_s) == (50e9, 25e9)
    assert found.name == "16 x H200 SXM on 2 hosts"
    said = " ".join(found.assumptions)
    assert "45% of 989 TFLOP/s (NVIDIA H200 data sheet" in said and "between devices" in said and "network" not in said
    alone = machine(link_bytes_per_s=None)
    assert any(each.startswith("link to the host: 51.2 GB/s") for each in alone.assumptions)


def test_figures_that_are_said_are_those_that_are_printed() -> None:
    said = " ".join(machine(flops=500e12).assumptions)
    assert "45% of 500 TFLOP/s (as given)" in said and "989" not in said


@pytest.mark.parametrize("name", GPUS)
def test_known_gpus(name: str) -> None:
    found = machine(name.upper())
    assert 20 * GB < found.device_bytes < 300 * GB and found.device_memory_bytes_per_s > 5e11
    assert GPUS[name].source


def test_unknown_ones_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--gpu H20O is not in the table; did you mean 'h200'\?"):
        machine("H20O")


def test_custom() -> None:
    with pytest.raises(ValueError, match=r"custom has no data sheet: give --device-memory, --flops, --dev"):
        machine("custom")
    figures = {"device_memory_bytes": 32 * GB, "flops": 1e14, "device_bytes_per_s": 1e12}
    found = machine("custom", **figures)
    assert found.device_bytes == 32 * GB and isinstance(found.compute, PeakCompute)
    assert found.compute.flops == pytest.approx(0.45e14)


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="give --host-memory"):
        described(Description("h200"))
    for figures, said in (
        ({"efficiency": 1.5}, "a share of the peak"),
        ({"gpus": 0}, "gpus must be at least 1, and is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            machine(**figures)


def test_peak() -> None:
    compute = PeakCompute(1e12, 1e11)
    work = Work(multiplied=1e9, width=0, logits=0, attention=0, weight_bytes=2 * 10**9)
    assert compute.seconds(work, 1000, 10) == pytest.approx((2.0, 4.0))  # 2 operations an element and token
    assert compute.seconds(work, 1, 10).forward == pytest.approx(0.02)  # and no faster than weights are read
    attends = work._replace(attention=1e6)
    assert compute.seconds(attends, 1000, 1000).forward == pytest.approx(2.0 + 1000 * 2 * 1e6 * 1000 / 1e12)
    embeds = work._replace(looked_up=10**10)  # their gradient is written
    assert compute.seconds(embeds, 1000, 10) == pytest.approx((2.0, 4.0 + 2e10 / 1e11))


def test_measured_times_lie_on_lines_through_the_points() -> None:
    table = torch.zeros(4, 3, 2, dtype=torch.float64)
    table[0, :, 0] = torch.tensor([1.0, 1.5, 3.5])
    matrix = Work(multiplied=1, width=5, logits=0, attention=0, weight_bytes=0)
    compute = MeasuredCompute((32, 64, 128), table)
    tokens = (32, 48, 64, 96, 128, 160, 16)
    assert [compute.seconds(matrix, each, 8).forward for each in tokens] == [1.0, 1.25, 1.5, 2.5, 3.5, 4.5, 0.75]
    table[0, :, 0] = torch.tensor([1.0, 3.0, 4.0])
    assert compute.seconds(matrix, 1, 8).forward == 0.0


def test_measured_times_add_up() -> None:
    table = torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1, 1) * torch.tensor([1.0, 10.0])
    compute = MeasuredCompute((8, 16), table.expand(4, 2, 2))
    work = Work(multiplied=1, width=2, logits=3, attention=9, weight_bytes=9, looked_up=4)
    assert compute.seconds(work, 12, 8) == (30.0, 300.0)
