"""The device and the types that the model runs in, and the libraries of a process that trains on a CPU.

**Products** of float32 are computed by oneDNN, whose code is written for the vector units of the CPU. MKL, which
torch uses otherwise, uses half of them on CPUs that Intel does not make. torch uses oneDNN only together with the
permission to round to bfloat16 on the way, which takes effect where the CPU has units for it (AMX). So planted
products are compared with float64's, and where they are rounded the setting stays unchanged.

**Memory** that was freed stays with the process. A step frees memory that the next one needs again, and the system
fills new memory with zeros first: a third of a step with 110 million parameters. `return_unused_memory`
returns it before free memory is measured.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace_runtime.errors import SettingError
from headrace_runtime.process.logs import get_logger
from headrace_trainer.settings import ComputeSettings

log = get_logger(__name__)


def device_of(name: str) -> torch.device:
    """Return the device that `compute.device` names. Raises `SettingError`."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingError("trainer.compute.device", name, f"cannot be used: {str(error).splitlines()[0]}") from None
    return device


def resolve_types(compute: ComputeSettings, device: torch.device) -> ComputeSettings:
    """Return the settings with `dtype` `auto` replaced by the type for this device. Raises `SettingError`."""
    if compute.dtype == "auto":
        dtype = "bfloat16" if multiplies_bfloat16(device) else "float32"
        log.info("dtype_chosen", dtype=dtype, device=str(device))
        compute = compute.model_copy(update={"dtype": dtype})
    elif compute.dtype == "bfloat16" and not multiplies_bfloat16(device):
        log.warning("bfloat16_is_slow", device=str(device), remedy='set trainer.compute.dtype to "auto"')
    if compute.weights == "bfloat16" and compute.dtype != "bfloat16":
        remedy = f'products run in {compute.dtype} on {device}; set trainer.compute.dtype to "bfloat16"'
        raise SettingError("trainer.compute.weights", compute.weights, remedy)
    return compute


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 in hardware; others convert it to float32, slowly."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    able = torch.cpu.get_capabilities()
    return any(bool(able.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def weights_dtype(compute: ComputeSettings, *, frozen: bool) -> torch.dtype:
    """Return the type of the weights: trained weights are float32, frozen ones have the type of the products."""
    return torch.bfloat16 if frozen and compute.dtype == "bfloat16" else torch.float32


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""Parameters of glibc's `mallopt` (malloc.h)."""
_NEVER, _AT_ONCE = -1, 64 << 20
_ROUNDING = 1e-6
"""Relative to a sum's terms, in float32; bfloat16 would round a thousand times as much."""


@cache
def prepare() -> None:
    """Configure memory and matrix products of this process. Call it before the weights are loaded."""
    keeps_memory, direct = keep_memory(), multiply_directly()
    log.info("cpu_prepared", freed_memory_is_kept=keeps_memory, products_by_onednn=direct)


def keep_memory() -> bool:
    """Make the allocator use one heap for all threads, for large blocks, too, and keep freed memory.

    Return whether it worked. Only glibc supports these options.
    """
    set_option = _glibc_function("mallopt")
    options = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _AT_ONCE))
    results = [set_option(name, value) == 1 for name, value in options] if set_option else [False]
    return all(results)


def return_unused_memory() -> None:
    """Return unused memory to the system. Call it before free memory is measured."""
    if trim := _glibc_function("malloc_trim"):
        trim(0)


def _glibc_function(name: str) -> Any:
    """Return a function of glibc, or None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def multiply_directly() -> bool:
    """Configure torch to compute float32 matrix products by oneDNN, unless oneDNN would round them.

    Return whether oneDNN computes them.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    if computes_exactly():
        return True
    settings.fp32_precision = before
    return False


def computes_exactly() -> bool:
    """Return whether float32 matrix products have the full precision of float32, by a comparison with float64."""
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
