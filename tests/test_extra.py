"""What an extra requires, without compiling the package again."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from scripts.extra import requirements_of


def test_only_what_the_extra_adds() -> None:
    names = {Requirement(each).name for each in requirements_of("docs")}
    assert names == {"mike", "mkdocs-material", "mkdocstrings"}
    assert all(Requirement(each).marker is None for each in requirements_of("test"))


def test_an_unknown_extra() -> None:
    with pytest.raises(ValueError, match="has no extra 'dosc'"):
        requirements_of("dosc")
