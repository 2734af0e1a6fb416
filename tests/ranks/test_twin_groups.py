"""Settings that make collectives of two threads run in one order are refused by name; on the CPU they mean nothing.
Groups of a device are used again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longshore.errors import LongshoreError
from longshore.ranks import twin_groups
from longshore.ranks.twin_groups import refuse_ordered_launches, twins_of
from ranks import Ranks, group_cases


@pytest.mark.parametrize("queues", ["1", "7"])
def test_few_hardware_queues(queues: str) -> None:
    with pytest.raises(LongshoreError, match=rf"CUDA_DEVICE_MAX_CONNECTIONS={queues} lets .* set it to 8 or more"):
        refuse_ordered_launches({"CUDA_DEVICE_MAX_CONNECTIONS": queues})


def test_the_order_of_launches() -> None:
    with pytest.raises(LongshoreError, match=r"NCCL_LAUNCH_ORDER_IMPLICIT=1 lets .* wait for each other for ever"):
        refuse_ordered_launches({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "", "NCCL_LAUNCH_ORDER_IMPLICIT": ""},
    ],
    ids=str,
)
def test_what_is_no_harm(environ: dict[str, str]) -> None:
    refuse_ordered_launches(environ)


def test_groups_of_a_device_are_checked_and_those_of_the_cpu_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    made: list[object] = []
    monkeypatch.setattr(twin_groups, "twin_of", lambda *given, **options: made.append(given))
    with pytest.raises(LongshoreError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        twins_of(None, torch.device("cuda:0"))
    assert made == []
    twins_of(None, torch.device("cpu"))
    assert len(made) == 1


def test_an_idle_group_is_used_again_where_all_ranks_have_it(two_ranks: Ranks) -> None:
    # The second of the first kind is the first rank's alone; of the other kind the ranks take the same one each time.
    assert two_ranks(group_cases.offered, "a", "a", "b", "b", "b") == [[0, None, 2, 3, None]] * 2


def test_groups_of_a_former_default_group_are_not_offered(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        assert ranks(group_cases.after_another_default_group, str(tmp_path)) == [(True, None)] * 2
    finally:
        ranks.stop()


@pytest.mark.medium
def test_where_one_part_of_the_ranks_needs_a_new_group_all_make_new_ones(three_ranks: Ranks) -> None:
    assert three_ranks(group_cases.parts) == [[None, True]] * 3
