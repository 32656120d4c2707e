"""AdamW in which contributions add up, so that one of them can be taken back (docs/algorithms.md, "Corrections").

What a gradient does to the weights is its size over the usual size of gradients, as in Adam. Four things differ, which
make Adam count the same gradient differently from batch to batch:

- Momentum is an average there: early gradients count several times, and a batch without any gradient repeats those
  before it. Here it is a debt, `unspent`: every gradient is paid out exactly once, over the batches that follow, and
  what never arrives pays nothing. The debt is in steps of the weights, not in gradients (as in LaProp, Ziyin et al.
  2020, arXiv:2002.04839), so what is paid is settled when the gradient comes. A constant gradient moves the weights as
  Adam's does, from the first batch on.
- Every batch is one step there, however small. Here a batch has a weight, its size as a share of a whole one: its
  gradient is that much smaller, it pays out that much less of the debt, and ages the squares by as much.
- The squares of the first batches stand for all that was before them, there, weight by weight: a weight that the first
  batch hardly touched makes as large a step as any. Here a tensor's weights share what was before them.
- Corrections do not enter the squares.

For whole batches, and once the start is forgotten, the sums of the steps are AdamW's (arXiv:1711.05101).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, isfinite, sqrt

import torch
from torch import Tensor, nn

from headrace_trainer.settings import OptimizerSettings
from headrace_trainer.torch_learner.shards import as_held, mean

EPSILON = 1e-8
_LIST_WEIGHTS_MAX = 1 << 27
"""Of tensors that one operation is about, together: on a GPU each operation costs the host more than a small tensor
costs the device. Where a list is computed, one more copy of it is held."""
CLOCK, SQUARES_CLOCK = "clock", "squares_clock"


class Adam:
    """Owns the updates of `parameters`. Nothing in here is drawn at random."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self.parameters = dict(parameters)
        self._settings = settings
        self._unspent: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._counted: tuple[tuple[str, ...], Tensor] | None = None
        self.clock = 0.0
        """Whole batches so far, which is what momentum ages by."""
        self.squares_clock = 0.0
        """The same, of those that told something about the size of gradients."""

    def gain(self, weight: float) -> float:
        """What a gradient of this weight is multiplied by, so that the debt grows to its usual size without slowing the
        start."""
        return 1.0 + (self._debt(self.clock + weight) - self._debt(self.clock)) / weight

    def _debt(self, clock: float) -> float:
        """What is unspent of a constant gradient of 1 by then; in the end beta1 / (1 - beta1), as in Adam."""
        beta1 = self._settings.beta1
        return float(beta1 * (1 - beta1**clock) / (1 - beta1))

    @torch.no_grad()
    def observe(self, weight: float) -> None:
        """Note the size of the gradients, those of a batch of `weight`."""
        kept = self._settings.beta2**weight
        for names in self._lists(name for name, _ in self._gradients()):
            squares, gradients = [self._of(self._squares, name) for name in names], self._given(names)
            torch._foreach_mul_(squares, kept)
            torch._foreach_addcmul_(squares, gradients, gradients, value=(1 - kept) / weight)
        self.squares_clock += weight

    @property
    def scale(self) -> float:
        """The typical size of a gradient by now, one number for all weights; 1 when none has been seen. What a
        contribution does is its size in this unit, so the unit is kept with it for a later correction."""
        if not self.squares_clock or not self._squares:
            return 1.0
        known = {name: mean(self._squares[name]) for name in self.parameters if name in self._squares}
        return self.scale_of(float(self._logarithm(known)))

    def scale_of(self, logarithm: float) -> float:
        """The same from the mean logarithm of the squares; -inf: all are zero."""
        return exp(logarithm / 2) / sqrt(1 - self._unknown) if isfinite(logarithm) else 1.0

    @torch.no_grad()
    def foreseen(self, weight: float, norms: Mapping[str, Tensor], clip: Tensor) -> Tensor:
        """The mean logarithm of the squares as `observe` will leave them, from the gradients' norms before they are
        multiplied by `clip`. Changes nothing and reads nothing."""
        kept = self._settings.beta2**weight
        known: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if name in self._squares:
                known[name] = mean(self._squares[name]).double() * kept
            if name in norms:
                more = (norms[name].double() * clip) ** 2 / parameter.numel() * ((1 - kept) / weight)
                known[name] = known[name] + more if name in known else more
        return self._logarithm(known)

    def _logarithm(self, means: Mapping[str, Tensor]) -> Tensor:
        """The mean over weights of the logarithm of their tensor's mean square; without those that are zero."""
        if not means:
            return torch.full((), -torch.inf, dtype=torch.float64)
        each = torch.stack(list(means.values())).double()
        sizes = self._sizes(tuple(means), each.device) * (each > 0)
        sums = (each.log() * sizes).where(each > 0, 0.0).sum()
        return torch.where(sizes.sum() > 0, sums / sizes.sum(), -torch.inf)

    def _sizes(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """How many weights each has. Kept: who brings it to a device waits for it."""
        if self._counted is None or self._counted[0] != names:
            sizes = torch.tensor([self.parameters[name].numel() for name in names], dtype=torch.float64)
            self._counted = names, sizes.to(device)
        return self._counted[1]

    @property
    def _unknown(self) -> float:
        """The share of the squares that lies before the first batch."""
        return float(self._settings.beta2**self.squares_clock)

    @torch.no_grad()
    def step(self, learning_rate: float, weight: float, corrections: Mapping[str, Tensor]) -> None:
        """Add the gradients to the debt, and `corrections` too, and pay out a batch's share of it. `corrections` are
        gradients in units of `scale`; they are measured by those before them and do not change the measure."""
        settings, scale = self._settings, self.scale if corrections else 1.0
        self.clock += weight
        share = weight / (weight + self._debt(self.clock))
        known = [name for name, _ in self._gradients()] if self.squares_clock else []  # before that they are zero
        for names in self._lists(known):
            debts = [self._of(self._unspent, name) for name in names]
            torch._foreach_addcdiv_(debts, self._given(names), self._sizes_by(names))
        for name, gradient in corrections.items():
            unspent = self._of(self._unspent, name)
            if self.squares_clock:
                # No weight moves further than by a gradient of this size that Adam had counted.
                least = gradient.abs() * scale * sqrt(1 - settings.beta2)
                unspent.addcdiv_(gradient, torch.maximum(self._size(name), least), value=scale)
            else:
                unspent.add_(gradient)
        for names in self._lists(self._unspent):
            parameters: list[Tensor] = [self.parameters[name] for name in names]
            debts = [self._unspent[name] for name in names]
            if settings.weight_decay:
                torch._foreach_mul_(parameters, 1 - learning_rate * settings.weight_decay * weight)
            torch._foreach_add_(parameters, debts, alpha=-learning_rate * share)
            torch._foreach_mul_(debts, 1 - share)

    def _size(self, name: str) -> Tensor:
        (found,) = self._sizes_by((name,))
        return found

    def _sizes_by(self, names: Sequence[str]) -> list[Tensor]:
        """What gradients are divided by. Before the first batch nothing was known: that part of the squares is taken to
        be the same for all weights of a tensor, and not what the few batches since happened to show for each."""
        squares = [self._of(self._squares, name) for name in names]
        found = [each + self._unknown / (1 - self._unknown) * mean(each) for each in squares]
        torch._foreach_sqrt_(found)
        torch._foreach_add_(found, EPSILON)
        return found

    def _lists(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Those that one operation is about. On a CPU each by itself: it stays in the cache then."""
        found: list[str] = []
        total = 0
        for name in names:
            parameter = self.parameters[name]
            if found and (parameter.device.type == "cpu" or total + parameter.numel() > _LIST_WEIGHTS_MAX):
                yield found
                found, total = [], 0
            found.append(name)
            total += parameter.numel()
        if found:
            yield found

    def _given(self, names: Iterable[str]) -> list[Tensor]:
        return [gradient for name in names if (gradient := self.parameters[name].grad) is not None]

    def reset(self) -> None:
        self._unspent.clear()
        self._squares.clear()
        self.clock = self.squares_clock = 0.0

    def state(self) -> dict[str, Tensor]:
        """References, by `<parameter>/<what>`, and the clocks."""
        tensors = {f"{name}/unspent": tensor for name, tensor in self._unspent.items()}
        tensors |= {f"{name}/squares": tensor for name, tensor in self._squares.items()}
        clocks = {CLOCK: self.clock, SQUARES_CLOCK: self.squares_clock}
        return tensors | {name: torch.tensor([value], dtype=torch.float64) for name, value in clocks.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take back `state`, or that of torch's AdamW, as earlier releases saved it."""
        self.reset()
        averages: dict[str, Tensor] = {}
        for key, value in state.items():
            name, _, what = key.rpartition("/")
            if key in (CLOCK, SQUARES_CLOCK):
                continue
            if what == "step":
                self.clock = self.squares_clock = float(value)
                continue
            kept = {"unspent": self._unspent, "exp_avg": averages}.get(what, self._squares)
            kept[name] = as_held(self.parameters[name], value)
        if CLOCK in state:
            self.clock, self.squares_clock = float(state[CLOCK]), float(state[SQUARES_CLOCK])
        debt = self._debt(self.clock)
        for name, average in averages.items():  # what it would still have done to the weights
            self._unspent[name] = average.mul_(debt).div_(self._size(name))

    def _of(self, kept: dict[str, Tensor], name: str) -> Tensor:
        if name not in kept:
            kept[name] = torch.zeros_like(self.parameters[name], memory_format=torch.preserve_format)
        return kept[name]

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
