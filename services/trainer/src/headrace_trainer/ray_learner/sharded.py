"""A sharded model: each rank holds a part of every weight, gradient and optimizer tensor (FSDP2).

A layer's weights are gathered when they are needed in each pass, and resharded afterwards. Weights outside the layers
(embeddings, the last norm, the output head) are gathered once a pass. Forward passes without a backward pass leave
these gathered, so they are resharded here before weights change.
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
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.model.configuration import first_line
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy

_ADAPTER_NAME = ".default"
"""Part of the names of the model's tensors that is missing in an adapter's file."""


def check(settings: TrainerSettings) -> None:
    """Raise `SettingError` for settings that cannot be combined with sharding."""
    compute = settings.compute
    if compute.weights == "bfloat16" and not settings.lora.rank:
        raise SettingError("trainer.compute.weights", compute.weights, 'trainer.ray.shard = "full" needs "float32"')
    if compute.compile:
        raise SettingError("trainer.compute.compile", True, 'trainer.ray.shard = "full" needs false')


class ShardedPolicy(Policy):
    """`Policy` that is sharded over all ranks of a team. All ranks must call each method in the same order."""

    @classmethod
    def _load_device(cls, device: torch.device) -> torch.device:
        """Return the CPU, because no single device may be large enough for the model."""
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
        logprobs = super().reference_logprobs(pack)
        _reshard(self.model if self._reference is None else self._reference)
        return logprobs

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        _reshard(self.model)
        super().load(tensors)

    def update_weights(self) -> None:
        _reshard(self.model)

    @torch.no_grad()
    def load_files(self, folder: Path) -> None:
        """Load a version's files in this rank. Ranks of one machine share them."""
        if self.lora:
            adapter = load_file(folder / "adapter_model.safetensors")
            self.load({name: adapter[name.replace(_ADAPTER_NAME, "")] for name in self.parameters})
        else:
            super().load_files(folder)

    @torch.no_grad()
    def fingerprint(self, published: Mapping[str, Tensor] | None = None) -> Fingerprint:
        """Return the fingerprint of the weights, or of `published`, which has this rank's part of each weight."""
        _reshard(self.model)
        saved = {name: weight.to_local().clone() for name, weight in self._dtensors()} if published else {}
        for name, weight in self._dtensors() if published else ():
            weight.to_local().copy_((published or {})[name])
        result = super().fingerprint()
        _reshard(self.model)
        for name, weight in self._dtensors() if saved else ():
            weight.to_local().copy_(saved[name])
        return result

    def _dtensors(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parameters.items())


def _shard(model: Any, device: torch.device) -> None:
    """Shard the model's weights over all ranks with FSDP2, one unit per layer.

    Gradients of the ranks are summed and not averaged, because the loss of each rank is a part of one sum over the
    batch.
    """
    # No code writes into the placeholder of the head's output (`torch_learner.model.head.intercept`).
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
    """Yield a model's layers: the members of its outermost module lists, without those of lists nested in them."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _reshard(model: nn.Module) -> None:
    """Free the weights gathered for the last pass, so that each rank holds only its own shard."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
