"""Somebody with one GPU and a script changes the line that makes the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from simulated_device.registration import EXTENSION

from walks.running import readme_says, run, same, written

IMPORT = ("import torch\n", "import torch\n\nimport longshore\n")
ONE_LINE = ("torch.optim.AdamW(", "longshore.AdamW(")
RELEASED = ("fused=True)", "fused=True, release_gradients=True)")
CLIPPED = ("nn.utils.clip_grad_norm_(model.parameters(), 0.5)", "optimizer.clip_grad_norm_(0.5)")
ON_SIMULATED = "import simulated_device, runpy, sys; simulated_device.register(); sys.argv = sys.argv[1:]; "
ON_SIMULATED += "runpy.run_path(sys.argv[0], run_name='__main__')"


def trained(folder: Path, *command: object) -> dict[str, torch.Tensor]:
    """Run a script that writes to a folder, which may be there already; return its weights."""
    folder.mkdir(exist_ok=True)
    run(*command, "--out", folder)
    return torch.load(folder / "weights.pt")


@pytest.mark.slow
def test_the_one_line_gives_the_weights_of_the_plain_script(tmp_path: Path) -> None:
    readme_says("Replace `torch.optim.AdamW` with `longshore.AdamW`.")
    plain, ours = written("one_gpu.py", tmp_path), written("one_gpu.py", tmp_path, IMPORT, ONE_LINE)
    expected = trained(tmp_path / "plain", plain)
    assert same(trained(tmp_path / "ours", ours), expected)

    trained(tmp_path / "stopped", ours, "--until", 3)
    assert same(trained(tmp_path / "stopped", ours), expected)  # from its own checkpoint, and from a plain one
    assert not same(trained(tmp_path / "began", plain, "--until", 3), expected)
    assert same(trained(tmp_path / "began", ours), expected)


@pytest.mark.slow
def test_on_an_accelerator_gradients_may_leave_it(tmp_path: Path) -> None:
    """Two lines more; the error of the first of them names the second."""
    if not EXTENSION.exists():
        pytest.skip("`make simulated-device` builds the accelerator")
    ours = written("one_gpu.py", tmp_path, IMPORT, ONE_LINE)
    released = written("one_gpu.py", tmp_path, IMPORT, ONE_LINE, RELEASED)
    clipped = written("one_gpu.py", tmp_path, IMPORT, ONE_LINE, RELEASED, CLIPPED)
    expected = trained(tmp_path / "cpu", ours)
    on_device = ("-c", ON_SIMULATED)
    assert same(trained(tmp_path / "ours", *on_device, ours, "--device", "sim"), expected)
    with pytest.raises(AssertionError, match=r"call optimizer\.clip_grad_norm_\(\)"):
        trained(tmp_path / "released", *on_device, released, "--device", "sim")
    on_host = trained(tmp_path / "host", clipped)
    assert same(trained(tmp_path / "clipped", *on_device, clipped, "--device", "sim"), on_host)
    torch.testing.assert_close(on_host, expected)
