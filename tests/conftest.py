from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import mkl_threads  # noqa: F401  before torch
import pytest
import torch
from covering import add_options, divide, draw, make_rows
from hypothesis import HealthCheck, settings
from on_device import compiles_triton, device_type
from ranks import Ranks
from torch_needs import ignored_warnings, skip_what_is_refused


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=1000, help="random schedules of the chaos suite")
    parser.addoption("--first-seed", type=int, default=1_000_000, help="of the chaos suite")
    parser.addoption("--simulated-device", action="store_true", help="the simulated accelerator is this process's")
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for text in ignored_warnings():
        config.addinivalue_line("filterwarnings", f"ignore:{text}")
    if config.getoption("--simulated-device"):
        import simulated_device

        simulated_device.register()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of the simulated accelerator need processes whose accelerator it is."""
    simulated = "simulated_device" in collection_path.parts
    return True if simulated and not config.getoption("--simulated-device") else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    make_rows(metafunc)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    divide(items)
    skip_what_is_refused(items)
    draw(config, items)
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


# The models are tiny: torch's own threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell's background jobs ignore Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def triton_on_the_device() -> Iterator[bool]:
    """Whether Triton's kernels run on the accelerator; on the simulated one they do, by Triton's interpreter."""
    if device_type() != "sim":
        yield compiles_triton()
        return
    pytest.importorskip("triton")
    from simulated_device.triton_kernels import interpreted_kernels

    with interpreted_kernels():
        yield True


@pytest.fixture(autouse=True)
def _needs_triton(request: pytest.FixtureRequest) -> None:
    marked = request.node.get_closest_marker("triton") is not None
    if marked and not request.getfixturevalue("triton_on_the_device"):
        pytest.skip("Triton compiles no kernels for this accelerator")


@pytest.fixture(autouse=True)
def _takes_ctrl_c() -> Iterator[None]:
    """A test that leaves another handler of Ctrl-C behind fails, and not one that comes later."""
    yield
    after = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert after is signal.default_int_handler, after


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage() -> None:
    """Optimizers of one module, with their threads, are gone before the next begins."""
    gc.collect()
    # What stays, mostly torch's own, need not be looked through at every collection: half a second each time.
    gc.freeze()


_RANKS: dict[int | str, Ranks] = {}


@pytest.fixture
def two_ranks() -> Ranks:
    """Two processes with a gloo group; they stay for the whole run."""
    return _RANKS.setdefault(2, Ranks(2))


@pytest.fixture
def three_ranks() -> Ranks:
    return _RANKS.setdefault(3, Ranks(3))


@pytest.fixture
def four_ranks() -> Ranks:
    return _RANKS.setdefault(4, Ranks(4))


@pytest.fixture
def two_devices() -> Ranks:
    """Two processes, each with an accelerator; they stay for the whole run."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    return _RANKS.setdefault("two devices", Ranks(2, device=device_type()))


def pytest_unconfigure() -> None:
    for ranks in _RANKS.values():
        ranks.stop()
