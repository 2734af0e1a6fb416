from __future__ import annotations

from pathlib import Path

import pytest

THEIRS = (
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's own use of torch's pytree
    "ignore:.*does not have many workers",
    "ignore:.*smaller than the logging interval",
    "ignore:.*callbacks used to create the checkpoint need to be provided",
    "ignore:.*but have no `val_dataloader`",
    "ignore:.*Checkpoint directory .* exists and is not empty",
)
"""What Lightning warns of whatever the strategy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(warning))
