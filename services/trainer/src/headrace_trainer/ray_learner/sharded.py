"""The model in parts: each rank holds a share of every weight, gradient and optimizer tensor (FSDP2).

A layer's weights come together where they are needed, in each pass, and go apart again. What is outside of the layers
(tables, the last norm, the output head) comes together once a pass. Forward passes without a backward pass leave that
where it is, so it is taken apart here before weights change.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from headrace_runtime.errors import SettingError
from headrace_schemas.manifest import Fingerprint
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.model.configuration import first_line
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy

_ADAPTER_NAME = ".default"
"""In the names of the model's tensors, and not in those of an adapter's file."""


def check(settings: TrainerSettings) -> None:
    """Raises `SettingError` for what cannot be computed in parts."""
    compute = settings.compute
    if compute.weights == "bfloat16" and not settings.lora.rank:
        raise SettingError("trainer.compute.weights", compute.weights, 'trainer.ray.shard = "full" needs "float32"')
    if compute.compile:
        raise SettingError("trainer.compute.compile", True, 'trainer.ray.shard = "full" needs false')


class ShardedPolicy(Policy):
    """`Policy` in every rank of a team at once: each method is called by all of them, in the same order."""

    @classmethod
    def _load_device(cls, device: torch.device) -> torch.device:
        """No device need have room for all of it."""
        return torch.device("cpu")

    @classmethod
    def _finish_loading(cls, model: Any, device: torch.device) -> None:
        _shard(model, device)

    def keep_reference(self, folder: Path) -> None:
        super().keep_reference(folder)
        if self._reference is not None:
            _shard(self._reference, self.device)

    @torch.no_grad()
    def reference_logprobs(self, pack: Pack) -> Tensor:
        found = super().reference_logprobs(pack)
        _apart(self.model if self._reference is None else self._reference)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        _apart(self.model)
        super().load(tensors)

    def renew(self) -> None:
        _apart(self.model)

    @torch.no_grad()
    def load_files(self, folder: Path) -> None:
        """Weights are read where they are needed, so ranks of one machine share them."""
        if self.lora:
            there = load_file(folder / "adapter_model.safetensors")
            self.load({name: there[name.replace(_ADAPTER_NAME, "")] for name in self.parameters})
        else:
            super().load_files(folder)

    @torch.no_grad()
    def fingerprint(self, published: Mapping[str, Tensor] | None = None) -> Fingerprint:
        """`published` has this rank's part of each; meanwhile the weights are what it says."""
        _apart(self.model)
        own = {name: held.to_local().clone() for name, held in self._held()} if published else {}
        for name, held in self._held() if published else ():
            held.to_local().copy_((published or {})[name])
        found = super().fingerprint()
        _apart(self.model)
        for name, held in self._held() if own else ():
            held.to_local().copy_(own[name])
        return found

    def _held(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parameters.items())


def _shard(model: Any, device: torch.device) -> None:
    """Gradients are summed, as the loss is one sum, and not averaged."""
    # Nobody writes into what stands in for the head's answer (`torch_learner.model.head.caught`).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    try:
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise SettingError("trainer.ray.shard", "full", f'{first_line(error)}; set "none"') from None
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: a model's blocks, and not the experts within one."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _apart(model: nn.Module) -> None:
    """Each rank holds its own part and no other."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
