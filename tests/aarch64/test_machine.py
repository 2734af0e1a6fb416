"""What ``make test-aarch64`` says where something is missing."""

from __future__ import annotations

import shutil

import pytest

from scripts.aarch64 import machine
from scripts.aarch64.machine import Aarch64Error, check_tools


def test_missing_programs_are_named_by_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"qemu-aarch64": None, "aarch64-linux-gnu-g++": None, "aarch64-linux-gnu-objdump": None}
    monkeypatch.setattr(shutil, "which", lambda program: here.get(program, f"/usr/bin/{program}"))
    with pytest.raises(Aarch64Error, match=r"apt-get install g\+\+-aarch64-linux-gnu qemu-user$"):
        check_tools()


@pytest.mark.parametrize("architectures", ["", "i386\n"])
def test_apt_has_to_know_arm64(monkeypatch: pytest.MonkeyPatch, architectures: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(machine, "run", lambda command, what: architectures)
    with pytest.raises(Aarch64Error, match="dpkg --add-architecture arm64 && apt-get update"):
        check_tools()


def test_a_program_that_fails_is_said_with_its_output() -> None:
    with pytest.raises(Aarch64Error, match=r"counting failed \(3\): (.|\n)*no numbers"):
        machine.run(["sh", "-c", "echo no numbers; exit 3"], "counting")
