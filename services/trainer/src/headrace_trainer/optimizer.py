"""AdamW, or Muon on matrices with AdamW on the rest, behind one warm-up and one saved state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import OptimizerSettings

_UPDATES = "updates"


class Optimizer:
    """Owns the updates of `parameters`. Its state is tensors by name, so that it fits a safetensors file."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        self._parts = _parts(self._parameters, settings)
        self.updates = 0
        """Updates that the present weights have had; the warm-up goes by it."""

    @property
    def learning_rate(self) -> float:
        """Of the next update: linear up to the setting, then constant."""
        return self._settings.learning_rate * min(1.0, (self.updates + 1) / max(1, self._settings.warmup_updates))

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> float | None:
        """Clip the gradients to the global norm and update. Returns the norm before clipping, None when it was not
        finite and nothing was changed."""
        parameters = list(self._parameters.values())
        norm = float(nn.utils.clip_grad_norm_(parameters, self._settings.gradient_norm_max))
        if not torch.isfinite(torch.tensor(norm)):
            self.zero_grad()
            return None
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate
            part.step()
        self.updates += 1
        return norm

    def reset(self) -> None:
        """Forget all momentum."""
        self.updates = 0
        for part in self._parts:
            part.state.clear()

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU: `<parameter>/<what>` and the number of updates."""
        found = {_UPDATES: torch.tensor([self.updates])}
        for part in self._parts:
            for name, parameter in self._parameters.items():
                for what, value in part.state.get(parameter, {}).items():
                    found[f"{name}/{what}"] = value.detach().cpu().clone()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken. Raises `SettingError` when that was another kind of optimizer."""
        self.reset()
        self.updates = int(state[_UPDATES])
        part_of = {id(p): part for part in self._parts for group in part.param_groups for p in group["params"]}
        for key, value in state.items():
            if key == _UPDATES:
                continue
            name, _, what = key.rpartition("/")
            parameter = self._parameters[name]
            part = part_of[id(parameter)]
            if (what == "momentum_buffer") != isinstance(part, torch.optim.Muon):
                raise SettingError(
                    "trainer.optimizer.kind",
                    self._settings.kind,
                    "the saved lineage was trained with the other one; keep it, or choose another trainer.lineage",
                )
            part.state[parameter][what] = value.to("cpu" if what == "step" else parameter.device).clone()


def _parts(parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    matrices = {
        name for name, p in parameters.items() if settings.kind == "muon" and p.ndim == 2 and not _is_table(name)
    }
    others = [p for name, p in parameters.items() if name not in matrices]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(
                [parameters[name] for name in sorted(matrices)],
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                momentum=settings.muon_momentum,
                adjust_lr_fn="match_rms_adamw",  # one learning rate then suits both parts (arXiv:2502.16982)
            )
        )
    if others:
        parts.append(
            torch.optim.AdamW(
                others,
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                weight_decay=settings.weight_decay,
                foreach=False,
            )
        )
    return parts


def _is_table(name: str) -> bool:
    """Embeddings and output heads are lookups, not maps between spaces; Muon is not made for them."""
    return "embed" in name or "lm_head" in name
