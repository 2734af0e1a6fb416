"""Threads of ours let others capture graphs: CUDA ends a capture of the process when any thread asks for events."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longshore import accelerator
from longshore.transfer import DeviceStreams
from longshore.transfer.runner import Worker


class Runtime:
    """CUDA's runtime, of which threads say what captures they take part in."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.said.append((threading.current_thread().name, mode._obj.value))
        return 0


def test_the_worker_says_so_once_before_its_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, opened = Runtime(), list[str]()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or runtime)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    streams = SimpleNamespace(device=torch.device("cuda", 0))
    worker = Worker(1 << 20, lambda: DeviceStreams.begin_job(streams), "alone")  # pyright: ignore
    for _ in range(3):
        worker.submit(lambda: None, 0)
    worker.close()
    assert opened == ["libcudart.so.12"]
    assert runtime.said == [("alone", 1)]


def test_without_the_library_threads_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(name: str) -> Any:
        asked.append(name)
        raise OSError(name)

    def work() -> None:
        for kind in ("cuda", "cpu"):
            accelerator.let_others_capture(torch.device(kind))
        done.append(True)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    done: list[bool] = []
    thread = threading.Thread(target=work)  # which has not said it before
    thread.start()
    thread.join()
    assert len(asked) == 1 and done == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the simulated device captures nothing")
def test_a_capture_of_the_whole_process_goes_on_while_a_thread_asks() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    failures: list[BaseException] = []
    asking, stop = threading.Event(), threading.Event()
    value = torch.ones(1 << 20, device=device)
    event = torch.accelerator.current_stream(device).record_event()

    def ask() -> None:
        try:
            accelerator.make_current(device)
            while not stop.is_set():
                event.query()
                asking.set()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=ask)
    thread.start()
    asking.wait()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(200):
                value.add_(1)
    finally:
        stop.set()
        thread.join()
    graph.replay()
    assert not failures and int(value.max()) == 201
