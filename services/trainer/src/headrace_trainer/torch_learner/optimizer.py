"""AdamW, or Muon on matrices with AdamW on the rest, with one warm-up and one saved state."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import OptimizerSettings
from headrace_trainer.torch_learner import stored_tensors
from headrace_trainer.torch_learner.adam import Adam
from headrace_trainer.torch_learner.stored_tensors import SelectedTensors

_MUON_MOMENTUM = 0.95
_UPDATES = "updates"


class Optimizer:
    """Optimizer of `parameters`, whose state is tensors by name, so that it fits a safetensors file.

    An update is `zero_grad`, a backward pass, `clip_gradients`, `apply`; or the last two at once, `step`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, hidden: Collection[str] = ()
    ) -> None:
        """Create the optimizer.

        Args:
            hidden: names of the matrices between hidden layers, for which Muon is made.
        """
        self._parameters = dict(parameters)
        self._settings = settings
        matrices = sorted(set(hidden) & self._parameters.keys()) if settings.kind == "muon" else []
        self._adam = Adam({name: p for name, p in self._parameters.items() if name not in matrices}, settings)
        self._muon = _muon([self._parameters[name] for name in matrices], settings) if matrices else None
        self._stashed: Tensor | None = None
        self.updates = 0
        """Number of updates of the present weights; the warm-up depends on it."""
        self.changed = False
        """Whether weights or state have begun to change since a caller set it to False."""
        self.gain = 1.0
        """Factor of the gradients taken last: clipping, warm-up, the filling of the momentum, and the size of gradients
        at that time. A correction that is multiplied by it has the same effect, whenever it comes."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update: linear up to the setting, then constant."""
        return self._settings.rate * self._warmup_factor

    @property
    def _warmup_factor(self) -> float:
        return min(1.0, (self.updates + 1) / max(1, self._settings.warmup_updates))

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def pop_gradients(self) -> dict[str, Tensor]:
        """Remove the present gradients from the parameters and return them.

        The next `clip_gradients` checks that they are finite.
        """
        stashed = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self.zero_grad()
        self._stashed = _total(stored_tensors.norms(list(stashed.values()))) if stashed else None
        return stashed

    @torch.no_grad()
    def clip_gradients(self, weight: float, extra: Tensor | None = None) -> tuple[float | None, list[float]]:
        """Clip the present gradients of a batch to the maximum global norm, and update the estimate of gradient sizes.

        Args:
            weight: size of the batch as a share of a full one.
            extra: further numbers to read from the device together with the norm.

        Returns:
            The norm before clipping, or None without any change if this norm or that of the gradients from
                `pop_gradients` is not finite; and the numbers of `extra`.
        """
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        norms = dict(zip(gradients, stored_tensors.norms(list(gradients.values())), strict=True))
        numbers, total = self._read(weight, norms, extra)
        norm, logarithm, stashed, *more = numbers
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
        gain = self._warmup_factor * self._adam.gradient_gain(weight)
        self._adam.observe(weight)
        if gain != 1.0:
            torch._foreach_mul_(list(gradients.values()), gain)
        self.gain = clip * gain / self._adam.scale_of(logarithm)
        return norm, more

    def _read(self, weight: float, norms: Mapping[str, Tensor], extra: Tensor | None) -> tuple[list[float], Tensor]:
        """Copy numbers from the device, which is the only time that an update waits for the device.

        Returns:
            The norm, the predicted logarithm (`Adam`), the norm of the stashed gradients and `extra` as numbers; and
                the norm as a device tensor.
        """
        device = next(iter(self._parameters.values())).device if self._parameters else torch.device("cpu")
        zero = torch.zeros((), device=device)
        total = _total(norms.values()) if norms else zero
        clip = (self._settings.gradient_norm_max / (total.double() + 1e-6)).clamp(max=1.0)
        stashed = zero if self._stashed is None else self._stashed
        scalars = [total, self._adam.predict_logarithm(weight, norms, clip), stashed]
        numbers = torch.stack([number.double().to(device) for number in scalars])
        return (numbers if extra is None else torch.cat([numbers, extra.to(device)])).tolist(), total

    @torch.no_grad()
    def apply(self, weight: float, corrections: Mapping[str, Tensor] | None = None) -> None:
        """Move the weights by the gradients that `clip_gradients` has clipped.

        Args:
            weight: size of their batch as a share of a full one.
            corrections: further gradients, each multiplied with its own `gain`.
        """
        self.changed = True
        gradients = corrections or {}
        if self._muon is not None:
            scale = self._adam.scale if gradients else 1.0
            for name, gradient in gradients.items():
                parameter = self._parameters[name]
                if name not in self._adam.parameters:
                    gradient = gradient * scale
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            for group in self._muon.param_groups:
                group["lr"] = self.learning_rate * min(1.0, weight)
            self._muon.step()  # type: ignore[no-untyped-call]
        adam_gradients = {name: gradient for name, gradient in gradients.items() if name in self._adam.parameters}
        self._adam.step(self._settings.rate, weight, adam_gradients)
        self.updates += 1

    def step(self, weight: float = 1.0) -> float | None:
        """Call `clip_gradients` and `apply`, and return the norm. A gradient of 0 has no effect, not even by
        momentum."""
        norm, _ = self.clip_gradients(weight)
        if norm:
            self.apply(weight)
        return norm

    def reset(self) -> None:
        """Reset all momentum and the warm-up."""
        self.updates = 0
        self._adam.reset()
        if self._muon is not None:
            self._muon.state.clear()

    def state(self) -> dict[str, Tensor]:
        """Return copies of the state on the CPU: `<parameter>/<kind>`, the clocks and the number of updates.

        Of sharded tensors only the first process of a team gets the values. All of its processes must call this method.
        """
        return {name: stored_tensors.cpu_copy(tensor) for name, tensor in self.state_tensors().items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizer's state by name, not copied, in the same order in every process."""
        tensors = {_UPDATES: torch.tensor([self.updates])}
        tensors |= sorted(self._adam.state().items())
        if self._muon is not None:
            for name, parameter in self._parameters.items():
                for kind, value in self._muon.state.get(parameter, {}).items():
                    tensors[f"{name}/{kind}"] = value
        return tensors

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, saved by this release or by one that used torch's AdamW.

        Raises:
            SettingError: The state belongs to another kind of optimizer.
        """
        self.reset()
        self.updates = int(state[_UPDATES])
        moments = []
        for key in state:
            name, _, kind = key.rpartition("/")
            if kind == "momentum_buffer" and self._muon is not None and name not in self._adam.parameters:
                parameter = self._parameters[name]
                self._muon.state[parameter][kind] = stored_tensors.copy_sharded_like(parameter, state[key])
            elif kind == "momentum_buffer" or (name and name not in self._adam.parameters):
                raise SettingError(
                    "trainer.optimizer.kind",
                    self._settings.kind,
                    f"the saved lineage has another one for {name}; keep that, or choose another trainer.lineage",
                )
            elif key != _UPDATES:
                moments.append(key)
        self._adam.load(SelectedTensors(state, moments))


def _total(norms: Iterable[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def _muon(matrices: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Muon:
    return torch.optim.Muon(
        matrices,
        lr=settings.rate,
        weight_decay=settings.weight_decay,
        momentum=_MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",  # one learning rate then suits both parts (arXiv:2502.16982)
    )
