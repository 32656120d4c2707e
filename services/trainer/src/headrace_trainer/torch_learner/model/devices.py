"""The device and the types that the model runs in."""

from __future__ import annotations

import torch

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
    """Return the settings with the type that `auto` stands for on this device."""
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
