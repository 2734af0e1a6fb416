"""Steps and loads of a process whose memory is limited for a while; a program of its own, since the limit is its."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import longshore

WIDTH, LAYERS = 1024, 6


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().sum().backward()


def refused(call: Callable[[], object], kind: type[Exception], more_mib: int) -> str:
    """Call it with so much more memory than there is now, and return what it says."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (more_mib << 20), resource.RLIM_INFINITY))
    try:
        call()
    except kind as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    raise AssertionError(f"with {more_mib} MiB more nothing was refused")


def stepped(mode: str, more_mib: int) -> None:
    model, expected = made(), made()
    settings = {"states": mode} if mode in ("bf16", "8bit") else {}
    offload = longshore.Offload(threads=2, tile_numel=WIDTH * WIDTH, **settings)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3, offload=offload)
    usual = longshore.AdamW(expected.parameters(), lr=1e-3, offload=offload)
    backward(model), backward(expected)
    before = [each.clone() for each in model.parameters()]
    said = refused(optimizer.step, longshore.HostMemoryError, more_mib)
    assert "more of host memory, which the system does not give" in said and "ulimit -v" in said, said
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)), "a parameter changed"
    usual.step()
    optimizer.step()
    for _ in range(2):
        for each, of in ((model, optimizer), (expected, usual)):
            of.zero_grad()
            backward(each)
            of.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def loaded(folder: str, more_mib: int) -> None:
    model, other = made(), made()
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3, offload=longshore.Offload(threads=2))
    backward(model)
    optimizer.step()
    longshore.save(folder, model, optimizer)
    into = longshore.AdamW(other.parameters(), lr=1e-3, offload=longshore.Offload(threads=2))
    said = refused(lambda: longshore.load(folder, other, into), longshore.CheckpointError, more_mib)
    assert "does not fit into the memory that this process may have" in said and "ulimit -v" in said, said
    longshore.load(folder, other, into)
    for each, of in ((model, optimizer), (other, into)):
        of.zero_grad()
        backward(each)
        of.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


if __name__ == "__main__":
    kind, place, more = sys.argv[1:]
    (stepped if kind == "step" else loaded)(place, int(more))
    print("as with enough memory")
