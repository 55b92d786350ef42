"""Settings of a worker process, made once before any tensor exists."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest mmap threshold that glibc accepts."""
TRIM_THRESHOLD_BYTES = 2**31 - 1
CUDA_SETTINGS = {
    # Streams feed this many hardware queues (default 8, at most 32). A queue is first in, first out: a transfer that
    # waits for its peer holds up the streams behind it, so that communication and compute overlap less. Programs cannot
    # deadlock even with one queue (``schedule.lowering.safe_order``); this is for speed.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A kernel is loaded when it is first launched. Loading all of torch's at start takes seconds and about 1 GB.
    "CUDA_MODULE_LOADING": "LAZY",
    # torch's watchdog of NCCL would end the process before the host's own timeout says what it has waited for.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Otherwise a thread of torch's asks rank 0 every second if it is to dump a trace, and where rank 0 is gone writes
    # a stack of C++ each time.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Environment of processes that use GPUs; CUDA reads it when the process first uses a GPU."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


ALLOCATOR, OLDER_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""What torch's allocator reads when it is first used, and the name that it had before."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Without it, and on several streams with another value, cuBLAS may sum in another order each time."""


def set_up_cuda() -> None:
    """Set ``CUDA_SETTINGS`` before this process first uses a GPU; what the user has set stays as it is."""
    for variable, value in CUDA_SETTINGS.items():
        os.environ.setdefault(variable, value)
    if ALLOCATOR not in os.environ and OLDER_ALLOCATOR not in os.environ:
        # Stages have tensors of many sizes; segments that grow keep what is freed of one size usable for another.
        os.environ[ALLOCATOR] = "expandable_segments:True"


def compute_deterministically() -> None:
    """Use torch's deterministic kernels from now on, and cuBLAS's: torch raises at a product without the latter."""
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)


def set_up_process(device: torch.device) -> None:
    """Use one compute thread and ordinary priority, and keep freed activations' memory for the next micro-batch."""
    torch.set_num_threads(1)
    # Ray starts workers at niceness 15, where any other process would slow down a stage and so the whole pipeline.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if device.type == "cpu":
        _keep_freed_memory()


def choose_precision(device: torch.device, tf32: bool) -> None:
    """Compute float32 products and convolutions of a GPU in TF32, or exactly; a CPU always computes exactly."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32


def give_back_memory(device: torch.device) -> None:
    """Return freed memory to the system and to the device, which other sizes may then be made of."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def first_backward() -> None:
    """Compute a gradient: the first time in a process, that imports SymPy, which takes 0.25 to 0.4 s.

    In a pipeline's first step, one stage after the other would wait for it.
    """
    x = torch.ones(1, requires_grad=True)
    torch.autograd.backward([x * 1], [torch.ones(1)])


def heap_bytes() -> int:
    """Return the bytes that malloc has allocated and not freed, over all arenas.

    Raises:
        OSError: the C library is not glibc.
        AttributeError: glibc is older than 2.33.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _keep_freed_memory() -> None:
    """Have glibc's malloc reuse the pages of freed activations; other C libraries are left as they are.

    By default malloc returns the pages to the system and faults them in again, which costs a few % of a step.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
