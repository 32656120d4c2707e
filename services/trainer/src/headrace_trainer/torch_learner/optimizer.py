"""AdamW, or Muon on matrices with AdamW on the rest, behind one warm-up and one saved state."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import OptimizerSettings
from headrace_trainer.torch_learner import shards
from headrace_trainer.torch_learner.adam import Adam
from headrace_trainer.torch_learner.stored import Selected

_UPDATES = "updates"


class Optimizer:
    """Owns the updates of `parameters`. Its state is tensors by name, so that it fits a safetensors file.

    An update is `zero_grad`, a backward pass, `take`, `apply`; or the last two at once, `step`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, hidden: Collection[str] = ()
    ) -> None:
        """`hidden`: the matrices between hidden layers, which Muon is made for."""
        self._parameters = dict(parameters)
        self._settings = settings
        matrices = sorted(set(hidden) & self._parameters.keys()) if settings.kind == "muon" else []
        self._adam = Adam({name: p for name, p in self._parameters.items() if name not in matrices}, settings)
        self._muon = _muon([self._parameters[name] for name in matrices], settings) if matrices else None
        self._stashed: Tensor | None = None
        self.updates = 0
        """Updates that the present weights have had; the warm-up goes by it."""
        self.changed = False
        """Whether weights or state have begun to change since a caller set it to False."""
        self.gain = 1.0
        """What the gradients that were taken last count: clipping, warm-up, the filling of the momentum, and the size
        that gradients had then. A correction that is multiplied by it does as much, whenever it comes."""

    @property
    def learning_rate(self) -> float:
        """Of the next update: linear up to the setting, then constant."""
        return self._settings.rate * self._warmth

    @property
    def _warmth(self) -> float:
        return min(1.0, (self.updates + 1) / max(1, self._settings.warmup_updates))

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def stash(self) -> dict[str, Tensor]:
        """The gradients so far, out of the way of others. `take` finds out whether they are finite."""
        stashed = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self.zero_grad()
        self._stashed = _total(shards.norms(list(stashed.values()))) if stashed else None
        return stashed

    @torch.no_grad()
    def take(self, weight: float, beside: Tensor | None = None) -> tuple[float | None, list[float]]:
        """Clip the gradients of a batch of `weight` to the global norm and learn their size. Returns the norm before
        clipping, None when it was not finite, or that of what was stashed, and nothing was changed; and the numbers in
        `beside`, which are read from the device together with it."""
        given = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        norms = dict(zip(given, shards.norms(list(given.values())), strict=True))
        known, total = self._read(weight, norms, beside)
        norm, logarithm, stashed, *more = known
        self.gain, self._stashed = 1.0, None
        if not (math.isfinite(norm) and math.isfinite(stashed)):
            self.zero_grad()
            return None, more
        if norm == 0.0:
            return norm, more
        self.changed = True
        clip = min(1.0, self._settings.gradient_norm_max / (norm + 1e-6))
        if clip < 1.0:
            nn.utils.clip_grads_with_norm_(self._parameters.values(), self._settings.gradient_norm_max, total)
        gain = self._warmth * self._adam.gain(weight)
        self._adam.observe(weight)
        if gain != 1.0:
            torch._foreach_mul_(list(given.values()), gain)
        self.gain = clip * gain / self._adam.scale_of(logarithm)
        return norm, more

    def _read(self, weight: float, norms: Mapping[str, Tensor], beside: Tensor | None) -> tuple[list[float], Tensor]:
        """The one time that an update waits for the device: norm, `Adam.foreseen`, norm of what is stashed, `beside`;
        and the first of them as it is on the device."""
        device = next(iter(self._parameters.values())).device if self._parameters else torch.device("cpu")
        nothing = torch.zeros((), device=device)
        total = _total(norms.values()) if norms else nothing
        clip = (self._settings.gradient_norm_max / (total.double() + 1e-6)).clamp(max=1.0)
        wanted = [total, self._adam.foreseen(weight, norms, clip), nothing if self._stashed is None else self._stashed]
        numbers = torch.stack([number.double().to(device) for number in wanted])
        return (numbers if beside is None else torch.cat([numbers, beside.to(device)])).tolist(), total

    @torch.no_grad()
    def apply(self, weight: float, corrections: Mapping[str, Tensor] | None = None) -> None:
        """Move the weights by the gradients taken, those of a batch of `weight`, and by `corrections`, gradients times
        their own `gain`."""
        self.changed = True
        given = corrections or {}
        if self._muon is not None:
            scale = self._adam.scale if given else 1.0
            for name, gradient in given.items():
                parameter = self._parameters[name]
                if name not in self._adam.parameters:
                    gradient = gradient * scale
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            for group in self._muon.param_groups:
                group["lr"] = self.learning_rate * min(1.0, weight)
            self._muon.step()  # type: ignore[no-untyped-call]
        mine = {name: gradient for name, gradient in given.items() if name in self._adam.parameters}
        self._adam.step(self._settings.rate, weight, mine)
        self.updates += 1

    def step(self, weight: float = 1.0) -> float | None:
        """`take` and `apply`. A gradient of zero changes nothing: it spends no momentum."""
        norm, _ = self.take(weight)
        if norm:
            self.apply(weight)
        return norm

    def reset(self) -> None:
        """Forget all momentum."""
        self.updates = 0
        self._adam.reset()
        if self._muon is not None:
            self._muon.state.clear()

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU: `<parameter>/<what>`, the clocks and the number of updates; of shared tensors in the first
        process of a team, which asks for them by name."""
        return {name: shards.kept(tensor) for name, tensor in self.references().items()}

    def references(self) -> dict[str, Tensor]:
        """The same, not copied, in the same order in every process."""
        found = {_UPDATES: torch.tensor([self.updates])}
        found |= sorted(self._adam.state().items())
        if self._muon is not None:
            for name, parameter in self._parameters.items():
                for what, value in self._muon.state.get(parameter, {}).items():
                    found[f"{name}/{what}"] = value
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken, by this release or by one that used torch's AdamW. Raises `SettingError`
        when that was another kind of optimizer."""
        self.reset()
        self.updates = int(state[_UPDATES])
        moments = []
        for key in state:
            name, _, what = key.rpartition("/")
            if what == "momentum_buffer" and self._muon is not None and name not in self._adam.parameters:
                parameter = self._parameters[name]
                self._muon.state[parameter][what] = shards.as_held(parameter, state[key])
            elif what == "momentum_buffer" or (name and name not in self._adam.parameters):
                raise SettingError(
                    "trainer.optimizer.kind",
                    self._settings.kind,
                    f"the saved lineage has another one for {name}; keep that, or choose another trainer.lineage",
                )
            elif key != _UPDATES:
                moments.append(key)
        self._adam.load(Selected(state, moments))


def _total(norms: Iterable[Tensor]) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return found


def _muon(matrices: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Muon:
    return torch.optim.Muon(
        matrices,
        lr=settings.rate,
        weight_decay=settings.weight_decay,
        momentum=settings.muon_momentum,
        adjust_lr_fn="match_rms_adamw",  # one learning rate then suits both parts (arXiv:2502.16982)
    )
