"""The output head in chunks: logprob and entropy of each loss token, without a tensor of loss tokens x vocabulary.

The logits of all loss tokens would be by far the largest tensor of a step: at 32,768 tokens and 152,000 words 20 GB,
and as much again for each tensor derived from them. They are needed token by token only. So they are computed in chunks
of as many tokens as give `CHUNK_BYTES` of logits. A training pass (`Head.backward`) computes the gradient of a chunk
while its logits are in memory (as in Liger Kernel, arXiv:2410.10989). A caller that needs logprobs first, and a
gradient later, has the logits computed twice: three numbers per token are stored in between.

The hidden states are intercepted where the model's own code calls its head. The operation that follows the head (a
scale, a soft cap) is derived from its effect on planted logits, and not from a name in the configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headrace_runtime.process import liveness
from headrace_trainer.torch_learner.model import masters
from headrace_trainer.torch_learner.model.distillation import DistillationTarget
from headrace_trainer.torch_learner.model.head_tail import NO_TAIL, Tail, find_tail, planted_logits
from headrace_trainer.torch_learner.model.masters import add_product
from headrace_trainer.torch_learner.model.pack_sets import PackSets

CHUNK_BYTES = 64 << 20
"""Size of one chunk's logits in float32. About three times as much is in memory at once."""
_SAME = 1e-2


Slope = Callable[[Tensor, slice], Tensor]
"""Returns the derivative of the loss by these logprobs. Arguments: the logprobs, and their slice of all loss tokens."""


@dataclass(frozen=True)
class Head:
    """Output head of a model (the projection to logits), which computes logprobs chunk by chunk if possible."""

    module: Any
    tail: Tail = NO_TAIL
    unchunked_reason: str | None = None
    """The reason why the logits of all loss tokens are computed at once, or None where they are not."""
    compiled: bool = False
    """Whether the operations on a chunk's logits in a training pass may be compiled (`head_compiled`)."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, token_ids: tuple[int, ...]) -> Head:
        """Return the head of `model`, examined by two passes over `token_ids`. Raises errors of the model's code."""
        module = model.get_output_embeddings()
        if module is None:
            return cls(None, unchunked_reason="the model names no output head")
        device = next(model.parameters()).device
        inputs = {"input_ids": torch.tensor([token_ids], device=device), "use_cache": False}
        planted: list[Tensor] = []
        original = module.forward

        def plant(hidden: Tensor) -> Tensor:
            planted.append(planted_logits(original(hidden)))
            return planted[-1]

        with intercept(module, plant) as head_inputs:
            logits_1TV = model(**inputs).logits
        if len(head_inputs) != 1 or head_inputs[0].shape[:2] != (1, len(token_ids)):
            return cls(module, unchunked_reason="its code does not call its output head once for each position")
        tail = find_tail(planted[0], logits_1TV)
        if tail is None:
            return cls(module, unchunked_reason="its code changes the head's output by more than a scale or a soft cap")
        try:
            with intercept(module) as repeated:
                model(**inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return cls(
                module, unchunked_reason=f"its code fails without the head's full output: {type(error).__name__}"
            )
        if len(repeated) != 1 or not torch.allclose(
            repeated[0].float(), head_inputs[0].float(), rtol=_SAME, atol=_SAME
        ):
            return cls(module, unchunked_reason="its code calls its output head differently each time")
        return cls(module, tail)

    def logprobs(
        self, hidden_NH: Tensor, targets_N: Tensor, temperature_N: Tensor, sets: PackSets | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `(logprobs_N, entropy_N)`, after temperature and restricted to `sets`. The entropy has no gradient."""
        if self.plain:
            result: tuple[Tensor, Tensor] = _Chunked.apply(  # type: ignore[no-untyped-call]
                hidden_NH,
                self.module.weight,
                self.module.bias,
                targets_N,
                temperature_N,
                self.tail,
                _matrix_dtype(hidden_NH),
                sets,
            )
            return result
        tokens, rows = len(hidden_NH), _rows(hidden_NH, self.module)
        parts = [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]
        tensors = (hidden_NH, targets_N, temperature_N)
        chunks = [(*(tensor[part] for tensor in tensors), sets, part) for part in parts]
        answers = [
            checkpoint(self._compute_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
        ]
        logprobs, entropies = zip(*answers, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    @torch.no_grad()
    def backward(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        slope: Slope,
        target: DistillationTarget | None = None,
        sets: PackSets | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute logprobs and gradients together, each matrix product once. The head must be `plain`.

        The gradients of the head's parameters are added to their `grad`. `slope` returns the derivative of the loss by
        the logprobs, `target` adds the gradient of a distillation target, and `sets` restricts the softmax.

        Returns:
            `(logprobs_N, entropy_N)` and the gradient of the hidden states, or None if they need none.
        """
        weight_VH, bias_V = self.module.weight, self.module.bias
        fusible = self.tail == Tail() and target is None and _wide_dtype(hidden_NH) is torch.float32
        if self.compiled and fusible:
            from headrace_trainer.torch_learner.model import head_compiled  # imports torch's compiler

            inputs = (hidden_NH, targets_N, temperature_N, slope, _matrix_dtype(hidden_NH), sets)
            return head_compiled.backward(weight_VH, bias_V, *inputs)
        logprobs_N, entropy_N = (hidden_NH.new_empty(len(hidden_NH), dtype=_wide_dtype(hidden_NH)) for _ in range(2))
        weight, bias = _gradient_of(weight_VH), _gradient_of(bias_V)
        sums = _Gradients(torch.empty_like(hidden_NH) if hidden_NH.requires_grad else None, weight, bias)
        dtype = _matrix_dtype(hidden_NH)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            matrix = _Matrix.of(weight_VH, bias_V, self.tail, dtype)
            # Both buffers are used for all chunks, because the system would fill new memory with zeros each time.
            rows = min(len(hidden_NH), _rows_of(len(weight_VH)))
            logits_nV, log_nV = hidden_NH.new_empty(2, rows, len(weight_VH), dtype=_wide_dtype(hidden_NH))
            for part in _chunks(hidden_NH, weight_VH):
                logits, log = (buffer[: part.stop - part.start] for buffer in (logits_nV, log_nV))
                matrix.answer_into(logits, hidden_NH[part])
                answer = logits.clone() if self.tail.cap is not None else None
                if sets is not None:
                    sets.restrict(logits, part)
                logits.div_(temperature_N[part, None])
                torch.log_softmax(logits, -1, out=log)
                logprobs_N[part] = log.gather(-1, targets_N[part, None]).squeeze(-1)
                shares = torch.exp(log, out=logits)
                more = target.gradient(part, log, shares, temperature_N[part]) if target is not None else None
                entropy_N[part] = log.mul_(shares).sum(-1).neg_()
                share = slope(logprobs_N[part], part) / temperature_N[part]
                sums.add(matrix, part, hidden_NH[part], targets_N[part], shares, share, answer, more)
        for parameter, gradient in ((weight_VH, weight), (bias_V, bias)):
            if gradient is not None:
                home = masters.gradient_owner(parameter)
                home.grad = gradient.to(home.dtype)
        return logprobs_N, entropy_N, sums.hidden

    def answer(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits of a few hidden states in float32, `logits_NV`, unchunked. The head must be `plain`."""
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return _Matrix.of(self.module.weight, self.module.bias, self.tail, hidden_NH.dtype).answer(hidden_NH)

    @property
    def plain(self) -> bool:
        """Whether the head is only a matrix, without adapter, quantisation or hooks."""
        module = self.module
        if self.unchunked_reason is not None or type(module) is not nn.Linear:
            return False
        return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))

    def _compute_chunk(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, sets: PackSets | None, part: slice
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of the tokens of a chunk, with any kind of head."""
        logits = self.tail(_wide(self.module(hidden)))
        return logprobs(logits if sets is None else sets.restrict(logits, part), targets, temperature)


@contextlib.contextmanager
def intercept(module: Any, answer: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Open a context that records the inputs of `module` and replaces its output.

    Args:
        module: the module.
        answer: function that computes the output from the input; None for the first column of the input.
    """
    inputs: list[Tensor] = []
    before = vars(module).get("forward")

    def catch(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        inputs.append(hidden)
        return hidden[..., :1] if answer is None else answer(hidden)

    module.forward = catch
    try:
        yield inputs
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def logprobs(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sampled token's logprob at its own temperature, and its distribution's entropy without gradient."""
    log_NV = functional.log_softmax(logits_NV / temperature_N[:, None], dim=-1)
    chosen_N = log_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy_N = log_NV.exp().mul_(log_NV).sum(-1).neg_()
    return chosen_N, entropy_N


class _Chunked(torch.autograd.Function):
    """Autograd function of the output head: logprobs and entropies in chunks of tokens, to bound the memory."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        tail: Tail,
        dtype: torch.dtype,
        sets: PackSets | None,
    ) -> tuple[Tensor, Tensor]:
        wide, device = _wide_dtype(hidden_NH), hidden_NH.device
        logprobs_N, entropy_N, norm_N = (torch.empty(len(hidden_NH), dtype=wide, device=device) for _ in range(3))
        with torch.autocast(hidden_NH.device.type, enabled=False):
            matrix = _Matrix.of(weight_VH, bias_V, tail, dtype)
            for part in _chunks(hidden_NH, weight_VH):
                logits = matrix.answer(hidden_NH[part])
                if sets is not None:
                    sets.restrict(logits, part)
                logits.div_(temperature_N[part, None])
                log = functional.log_softmax(logits, dim=-1)
                at = targets_N[part, None]
                logprobs_N[part] = log.gather(-1, at).squeeze(-1)
                norm_N[part] = (logits.gather(-1, at) - log.gather(-1, at)).squeeze(-1)
                torch.exp(log, out=logits)
                entropy_N[part] = logits.mul_(log).sum(-1).neg_()
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, norm_N)
        ctx.tail, ctx.dtype, ctx.sets = tail, dtype, sets
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperature_N, norm_N = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        sums = _Gradients(
            torch.empty_like(hidden_NH) if of_hidden else None,
            _zeros(weight_VH) if of_weight else None,
            _zeros(bias_V) if of_bias else None,
        )
        with torch.autocast(hidden_NH.device.type, enabled=False):
            matrix = _Matrix.of(weight_VH, bias_V, ctx.tail, ctx.dtype)
            for part in _chunks(hidden_NH, weight_VH):
                logits = matrix.answer(hidden_NH[part])
                answer = logits.clone() if ctx.tail.cap is not None else None
                if ctx.sets is not None:
                    ctx.sets.restrict(logits, part)
                shares = logits.div_(temperature_N[part, None]).sub_(norm_N[part, None]).exp_()
                share = of_logprobs_N[part] / temperature_N[part]
                sums.add(matrix, part, hidden_NH[part], targets_N[part], shares, share, answer)
        of = zip((sums.hidden, sums.weight, sums.bias), (hidden_NH, weight_VH, bias_V), strict=True)
        gradients = (None if gradient is None else gradient.to(was.dtype) for gradient, was in of)
        return *gradients, None, None, None, None, None


@dataclass(frozen=True)
class _Gradients:
    """Gradients of hidden states, weight and bias, summed over chunks; None where no gradient is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add(
        self,
        matrix: _Matrix,
        part: slice,
        hidden: Tensor,
        targets: Tensor,
        shares: Tensor,
        share: Tensor,
        answer: Tensor | None,
        more: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Add the gradients of a chunk.

        Args:
            matrix: The head's matrix.
            part: The chunk's slice of all tokens.
            hidden: The chunk's hidden states.
            targets: The chunk's tokens.
            shares: The probability of each word. It is overwritten.
            share: The factor of the gradient of each token's logit.
            answer: The tail's output for the chunk if the tail caps logits; otherwise None.
            more: Indices of the chunk's tokens, and further gradients of their logits that are added.
        """
        column = share[:, None].to(shares.dtype)
        gradient = shares.mul_(-column).scatter_add_(-1, targets[:, None], column)
        if more is not None:
            gradient.index_add_(0, *more)
        gradient = matrix.tail.gradient(gradient, answer)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))
        rounded = gradient.to(matrix.weight.dtype)
        if self.hidden is not None:
            self.hidden[part] = rounded @ matrix.weight
        if self.weight is not None:
            add_product(self.weight, rounded.T, hidden.to(matrix.weight.dtype))


@dataclass(frozen=True)
class _Matrix:
    """Weight and bias of the head in the type of the products, converted once for all chunks."""

    weight: Tensor
    bias: Tensor | None
    tail: Tail

    @classmethod
    def of(cls, weight_VH: Tensor, bias_V: Tensor | None, tail: Tail, dtype: torch.dtype) -> _Matrix:
        return cls(weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype), tail)

    def answer(self, hidden: Tensor) -> Tensor:
        """Return the logits of a chunk of hidden states, in a new tensor."""
        raw = _wide(functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias))
        return self.tail.apply_in_place(raw)

    def answer_into(self, buffer: Tensor, hidden: Tensor) -> None:
        """Write the logits of a chunk of hidden states into `buffer`."""
        if buffer.dtype != self.weight.dtype:
            buffer.copy_(functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias))
        elif self.bias is None:
            torch.mm(hidden.to(self.weight.dtype), self.weight.T, out=buffer)
        else:
            torch.addmm(self.bias, hidden.to(self.weight.dtype), self.weight.T, out=buffer)
        self.tail.apply_in_place(buffer)


def _chunks(hidden_NH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    tokens, rows = len(hidden_NH), _rows_of(len(weight_VH))
    for start in range(0, tokens, rows):
        liveness.progress()
        yield slice(start, min(start + rows, tokens))


def _rows_of(vocabulary: int) -> int:
    """Return the number of tokens per chunk for a vocabulary of this size."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def _rows(hidden_NH: Tensor, module: Any) -> int:
    """Return the number of tokens per chunk for a head that is no plain matrix; a wider output means fewer tokens."""
    with torch.no_grad():
        return _rows_of(module(hidden_NH[:1]).shape[-1])


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=_wide_dtype(parameter))


def _gradient_of(parameter: Tensor | None) -> Tensor | None:
    """Return the tensor to which gradients are added: the parameter's gradient, or a float32 copy of a narrower one."""
    if parameter is None or not parameter.requires_grad:
        return None
    gradient = masters.gradient_owner(parameter).grad
    return _zeros(parameter) if gradient is None else _wide(gradient)


def _matrix_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type in which `functional.linear` would compute here."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor))


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
