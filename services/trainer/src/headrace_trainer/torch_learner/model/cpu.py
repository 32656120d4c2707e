"""What training on a CPU asks of its libraries, once a process.

**Products** of float32 are made by oneDNN, whose code is written for the vectors that the CPU has. MKL, which torch
asks otherwise, uses half of them on CPUs that Intel does not make. torch asks oneDNN only together with the permission
to round to bfloat16 on the way, which it makes use of where the CPU has units for it (AMX). So planted products are
compared with float64's, and where they are rounded all stays as it was.

**Memory** that was freed stays with the process. A step frees what the next one needs again, and what the system gives
it fills with zeros first: a third of a step with 110 million parameters. Whoever asks how much is free has it given
back.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace_runtime.logs import get_logger

log = get_logger(__name__)

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""Of glibc's `mallopt` (malloc.h)."""
_NEVER, _AT_ONCE = -1, 64 << 20
_ROUNDING = 1e-6
"""Of a sum's terms, in float32; bfloat16 would make a thousand times as much of it."""


@cache
def prepare() -> None:
    """To be called before the weights are loaded."""
    kept, direct = keep_memory(), multiply_directly()
    log.info("cpu_prepared", freed_memory_is_kept=kept, products_by_onednn=direct)


def keep_memory() -> bool:
    """One heap for all threads, which takes large blocks too and gives nothing back. Answers whether it is so; only
    glibc can be asked."""
    choose = _of_glibc("mallopt")
    asked = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _AT_ONCE))
    taken = [choose(name, value) == 1 for name, value in asked] if choose else [False]
    return all(taken)


def give_back() -> None:
    """What is kept and not used at the moment, to the system. To be called before it is asked what is free."""
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Any:
    """One of its functions; None where there is another library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def multiply_directly() -> bool:
    """Answers whether oneDNN makes products of float32, and in float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    if exact():
        return True
    settings.fp32_precision = before
    return False


def exact() -> bool:
    """Whether products of float32 are as near to those of float64 as float32 can tell."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.rand(2, 256, 256, generator=draw) + 0.5 for _ in range(2))
    left, right = left[:, :200], right[:, :, :136]  # parts of what is stored, no round numbers
    near = [
        _near(torch.bmm(left, right), left, right),
        _near(torch.bmm(right.transpose(1, 2), left.transpose(1, 2)), right.transpose(1, 2), left.transpose(1, 2)),
        _near(left[0] @ right[0], left[0], right[0]),
        _near(torch.addmm(torch.zeros(136), left[0], right[0]), left[0], right[0]),
    ]
    return all(near)


def _near(found: Tensor, left: Tensor, right: Tensor) -> bool:
    expected = left.double() @ right.double()
    return bool(((found - expected).abs() <= _ROUNDING * expected).all())
