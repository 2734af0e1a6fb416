"""A simulated accelerator, ``sim``: a device for PyTorch that makes the mistakes of device code visible on a CPU.

- **Memory** that the host cannot touch: reading it without a copy is a segmentation fault. Freed memory is handed out
  again at once, as by CUDA's allocator, and is overwritten with NaN by the stream that it was allocated on.
- **Streams** are threads. What is launched runs later, after a random delay, so that a missing wait gives wrong values.
- **Pinned memory**: a copy from or to it is asynchronous; one with pageable memory is as CUDA's is.
- **Budget**: an allocation beyond it is ``torch.OutOfMemoryError``.
- **Triton's kernels**: a launch returns at once, and Triton's interpreter runs the kernel later, on the thread of the
  stream, one kernel at a time over all streams. Tests that are marked ``triton`` have them.
- **Counts** of launches, copies, bytes each way and waits of the host: :func:`counts`.
- **Two devices**, and collectives (``simccl``) that run on streams of their own.

Every operator runs the CPU's kernel on the thread of its stream. Where torch composes an operator of others for devices
(layer norm), values may differ from the CPU's in the last place.

``python -m simulated_device`` (with ``tests`` in ``PYTHONPATH``) builds it; :func:`register` makes it this process's
accelerator, which cannot be undone. The environment variable ``SIMULATED_DEVICES`` is the number of devices (2).
"""

from __future__ import annotations

from simulated_device.registration import counts, native, register

__all__ = ["counts", "native", "register"]
