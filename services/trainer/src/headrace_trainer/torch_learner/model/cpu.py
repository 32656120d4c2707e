"""Configures the libraries of a process for training on a CPU.

**Products** of float32 are computed by oneDNN, whose code is written for the vector units of the CPU. MKL, which torch
uses otherwise, uses half of them on CPUs that Intel does not make. torch uses oneDNN only together with the permission
to round to bfloat16 on the way, which takes effect where the CPU has units for it (AMX). So planted products are
compared with float64's, and where they are rounded the setting stays unchanged.

**Memory** that was freed stays with the process. A step frees memory that the next one needs again, and the system
fills new memory with zeros first: a third of a step with 110 million parameters. `give_back` returns it before free
memory is measured.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""Parameters of glibc's `mallopt` (malloc.h)."""
_NEVER, _AT_ONCE = -1, 64 << 20
_ROUNDING = 1e-6
"""Relative to a sum's terms, in float32; bfloat16 would round a thousand times as much."""


@cache
def prepare() -> None:
    """Configure memory and products. Call it before the weights are loaded."""
    keeps_memory, direct = keep_memory(), multiply_directly()
    log.info("cpu_prepared", freed_memory_is_kept=keeps_memory, products_by_onednn=direct)


def keep_memory() -> bool:
    """Use one heap for all threads, which also holds large blocks and keeps freed memory. Return whether it worked.

    Only glibc supports these options.
    """
    set_option = _glibc_function("mallopt")
    options = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _AT_ONCE))
    results = [set_option(name, value) == 1 for name, value in options] if set_option else [False]
    return all(results)


def give_back() -> None:
    """Return unused memory to the system. Call it before free memory is measured."""
    if trim := _glibc_function("malloc_trim"):
        trim(0)


def _glibc_function(name: str) -> Any:
    """Return a function of glibc, or None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def multiply_directly() -> bool:
    """Let oneDNN compute products of float32, if it does not round them. Return whether it does."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    if exact():
        return True
    settings.fp32_precision = before
    return False


def exact() -> bool:
    """Return whether products of float32 equal those of float64 within the precision of float32."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.rand(2, 256, 256, generator=draw) + 0.5 for _ in range(2))
    left, right = left[:, :200], right[:, :, :136]  # parts of larger tensors, with sizes that are no powers of two
    near = [
        _near(torch.bmm(left, right), left, right),
        _near(torch.bmm(right.transpose(1, 2), left.transpose(1, 2)), right.transpose(1, 2), left.transpose(1, 2)),
        _near(left[0] @ right[0], left[0], right[0]),
        _near(torch.addmm(torch.zeros(136), left[0], right[0]), left[0], right[0]),
    ]
    return all(near)


def _near(product: Tensor, left: Tensor, right: Tensor) -> bool:
    expected = left.double() @ right.double()
    return bool(((product - expected).abs() <= _ROUNDING * expected).all())
