"""AdamW in which contributions add up, so that one of them can be reversed (docs/algorithms.md, "Corrections").

The effect of a gradient on the weights is its size over the usual size of gradients, as in Adam. Four differences
remove the effects by which Adam counts the same gradient differently from batch to batch:

- In Adam, momentum is an average: early gradients count several times, and a batch without any gradient repeats those
  before it. Here it is a debt, `unspent`: every gradient is paid out exactly once, over the batches that follow, and
  a batch without gradients adds none. The debt is in steps of the weights, not in gradients (as in LaProp, Ziyin et al.
  2020, arXiv:2002.04839), so the payment is fixed when the gradient comes. A constant gradient moves the weights as
  Adam's does, from the first batch on.
- In Adam, every batch is one step, however small. Here a batch has a weight, its size as a share of a full batch: its
  gradient is that much smaller, it pays out that much less of the debt, and ages the squares by as much.
- In Adam, the squares of the first batches stand for all earlier ones, weight by weight: a weight that the first batch
  hardly touched makes as large a step as any. Here all weights of a tensor share the estimate for earlier batches.
- Corrections do not enter the squares.

For full batches, and once the start is forgotten, the sums of the steps are AdamW's (arXiv:1711.05101).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, isfinite, sqrt

import torch
from torch import Tensor, nn

from headrace_trainer.settings import OptimizerSettings
from headrace_trainer.torch_learner.stored_tensors import copy_sharded_like, mean

EPSILON = 1e-8
_LIST_WEIGHTS_MAX = 1 << 27
"""Number of weights that one operation may process together: on a GPU each operation costs the host more than a small
tensor costs the device. One more copy of these weights is held meanwhile."""
CLOCK, SQUARES_CLOCK = "clock", "squares_clock"


class Adam:
    """AdamW for `parameters`, modified so that contributions add up, as the module describes. It is deterministic."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self.parameters = dict(parameters)
        self._settings = settings
        self._unspent: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._cached_sizes: tuple[tuple[str, ...], Tensor] | None = None
        self.clock = 0.0
        """Number of full batches so far, by which momentum ages."""
        self.squares_clock = 0.0
        """Number of full batches whose gradients have entered the squares."""

    def gradient_gain(self, weight: float) -> float:
        """Return the factor by which to multiply the gradient of a batch with this weight.

        In the first batches a part of each gradient stays in the growing momentum `unspent`. The factor is above 1
        then, so that these batches move the weights as far as later ones.
        """
        return 1.0 + (self._unspent_momentum(self.clock + weight) - self._unspent_momentum(self.clock)) / weight

    def _unspent_momentum(self, clock: float) -> float:
        """Return the momentum that a constant gradient of 1 has accumulated and not yet applied after `clock` batches.

        It approaches beta1 / (1 - beta1), as in Adam.
        """
        beta1 = self._settings.beta1
        return float(beta1 * (1 - beta1**clock) / (1 - beta1))

    @torch.no_grad()
    def observe(self, weight: float) -> None:
        """Update the running averages of squared gradients by the present gradients, which are those of a batch of size
        `weight`.
        """
        decay = self._settings.beta2**weight
        for names in self._operation_lists(name for name, _ in self._gradients()):
            squares, gradients = [self._tensor_of(self._squares, name) for name in names], self._gradients_of(names)
            torch._foreach_mul_(squares, decay)
            torch._foreach_addcmul_(squares, gradients, gradients, value=(1 - decay) / weight)
        self.squares_clock += weight

    @property
    def scale(self) -> float:
        """Typical size of a gradient element, averaged over all weights; 1 before the first gradient.

        It is stored with each contribution to the weights, so that a later correction has an effect of the same size.
        """
        if not self.squares_clock or not self._squares:
            return 1.0
        means = {name: mean(self._squares[name]) for name in self.parameters if name in self._squares}
        return self.scale_of(float(self._logarithm(means)))

    def scale_of(self, logarithm: float) -> float:
        """Return the typical size of a gradient, the square root of the unbiased second moments.

        Args:
            logarithm: mean logarithm of the second moments, or -inf if all are zero; then the scale is 1.
        """
        return exp(logarithm / 2) / sqrt(1 - self._unobserved_share) if isfinite(logarithm) else 1.0

    @torch.no_grad()
    def predict_logarithm(self, weight: float, norms: Mapping[str, Tensor], clip: Tensor) -> Tensor:
        """Return the mean logarithm of the squares after `observe`, from the gradients' norms before the factor `clip`.

        The call changes nothing and does not wait for the device.
        """
        decay = self._settings.beta2**weight
        means: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if name in self._squares:
                means[name] = mean(self._squares[name]).double() * decay
            if name in norms:
                more = (norms[name].double() * clip) ** 2 / parameter.numel() * ((1 - decay) / weight)
                means[name] = means[name] + more if name in means else more
        return self._logarithm(means)

    def _logarithm(self, means: Mapping[str, Tensor]) -> Tensor:
        """Return the mean, over all weights, of the logarithm of their tensor's mean square. Zero tensors are left
        out."""
        if not means:
            return torch.full((), -torch.inf, dtype=torch.float64)
        each = torch.stack(list(means.values())).double()
        sizes = self._sizes(tuple(means), each.device) * (each > 0)
        sums = (each.log() * sizes).where(each > 0, 0.0).sum()
        return torch.where(sizes.sum() > 0, sums / sizes.sum(), -torch.inf)

    def _sizes(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Return the number of weights of each tensor. It is cached, because copying it to a device takes time."""
        if self._cached_sizes is None or self._cached_sizes[0] != names:
            sizes = torch.tensor([self.parameters[name].numel() for name in names], dtype=torch.float64)
            self._cached_sizes = names, sizes.to(device)
        return self._cached_sizes[1]

    @property
    def _unobserved_share(self) -> float:
        """Share of the running average of squared gradients that is still its initial zero, for the bias correction of
        Adam: β₂ to the power of `squares_clock`.
        """
        return float(self._settings.beta2**self.squares_clock)

    @torch.no_grad()
    def step(self, learning_rate: float, weight: float, corrections: Mapping[str, Tensor]) -> None:
        """Add the gradients and the corrections to `unspent`, and move the weights by a batch's share of it.

        `unspent` takes the place of Adam's momentum: the sum of the normalized gradients by which the weights have
        not moved yet.

        Args:
            learning_rate: learning rate of a full batch.
            weight: size of the batch as a share of a full one.
            corrections: gradients in units of `scale`. They are divided by the present squares and do not change these.
        """
        settings, scale = self._settings, self.scale if corrections else 1.0
        self.clock += weight
        share = weight / (weight + self._unspent_momentum(self.clock))
        observed = [name for name, _ in self._gradients()] if self.squares_clock else []  # before that they are zero
        for names in self._operation_lists(observed):
            debts = [self._tensor_of(self._unspent, name) for name in names]
            torch._foreach_addcdiv_(debts, self._gradients_of(names), self._denominators(names))
        for name, gradient in corrections.items():
            unspent = self._tensor_of(self._unspent, name)
            if self.squares_clock:
                # No weight moves further than by an observed gradient of this size in Adam.
                least = gradient.abs() * scale * sqrt(1 - settings.beta2)
                unspent.addcdiv_(gradient, torch.maximum(self._denominator(name), least), value=scale)
            else:
                unspent.add_(gradient)
        for names in self._operation_lists(self._unspent):
            parameters: list[Tensor] = [self.parameters[name] for name in names]
            debts = [self._unspent[name] for name in names]
            if settings.weight_decay:
                torch._foreach_mul_(parameters, 1 - learning_rate * settings.weight_decay * weight)
            torch._foreach_add_(parameters, debts, alpha=-learning_rate * share)
            torch._foreach_mul_(debts, 1 - share)

    def _denominator(self, name: str) -> Tensor:
        (denominator,) = self._denominators((name,))
        return denominator

    def _denominators(self, names: Sequence[str]) -> list[Tensor]:
        """Return the denominators by which gradients are divided: square roots of the running averages of squares.

        In the place of the unknown squares before the first batch, the average contains the mean over the tensor,
        because a few batches do not show the size of each single weight's gradient.
        """
        squares = [self._tensor_of(self._squares, name) for name in names]
        denominators = [each + self._unobserved_share / (1 - self._unobserved_share) * mean(each) for each in squares]
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, EPSILON)
        return denominators

    def _operation_lists(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yield lists of parameter names, each of which is updated by one fused (`torch._foreach`) operation.

        On a CPU each list has one parameter, which then stays in the cache.
        """
        batch: list[str] = []
        total = 0
        for name in names:
            parameter = self.parameters[name]
            if batch and (parameter.device.type == "cpu" or total + parameter.numel() > _LIST_WEIGHTS_MAX):
                yield batch
                batch, total = [], 0
            batch.append(name)
            total += parameter.numel()
        if batch:
            yield batch

    def _gradients_of(self, names: Iterable[str]) -> list[Tensor]:
        return [gradient for name in names if (gradient := self.parameters[name].grad) is not None]

    def reset(self) -> None:
        self._unspent.clear()
        self._squares.clear()
        self.clock = self.squares_clock = 0.0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state without copying them, by `<parameter>/<kind>`, with the two clocks."""
        tensors = {f"{name}/unspent": tensor for name, tensor in self._unspent.items()}
        tensors |= {f"{name}/squares": tensor for name, tensor in self._squares.items()}
        clocks = {CLOCK: self.clock, SQUARES_CLOCK: self.squares_clock}
        return tensors | {name: torch.tensor([value], dtype=torch.float64) for name, value in clocks.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`, or the state of torch's AdamW, as earlier releases saved it."""
        self.reset()
        averages: dict[str, Tensor] = {}
        for key, value in state.items():
            name, _, kind = key.rpartition("/")
            if key in (CLOCK, SQUARES_CLOCK):
                continue
            if kind == "step":
                self.clock = self.squares_clock = float(value)
                continue
            target = {"unspent": self._unspent, "exp_avg": averages}.get(kind, self._squares)
            target[name] = copy_sharded_like(self.parameters[name], value)
        if CLOCK in state:
            self.clock, self.squares_clock = float(state[CLOCK]), float(state[SQUARES_CLOCK])
        debt = self._unspent_momentum(self.clock)
        for name, average in averages.items():  # the remaining effect of the average on the weights
            self._unspent[name] = average.mul_(debt).div_(self._denominator(name))

    def _tensor_of(self, tensors: dict[str, Tensor], name: str) -> Tensor:
        if name not in tensors:
            tensors[name] = torch.zeros_like(self.parameters[name], memory_format=torch.preserve_format)
        return tensors[name]

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
