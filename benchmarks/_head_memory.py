"""Peak memory of the output head in a training step, in a process of its own. Prints one line of JSON.

It runs forward and backward of logprobs and entropies, from hidden states and a float32 weight with a gradient. The
figure is the memory on top of weight and hidden states: the gradients of both, and intermediate values. With `again`,
logits are computed a second time for the gradient.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor, nn

from benchmarks._run_processes import peak_bytes
from headrace_trainer.torch_learner.model import head
from headrace_trainer.torch_learner.model.head import Head


def once(module: nn.Linear, hidden: Tensor, method: str) -> None:
    tokens = len(hidden)
    targets, temperature = torch.arange(tokens) % module.out_features, torch.full((tokens,), 0.7)
    if method == "chunked":
        Head(module).backward(hidden, targets, temperature, lambda logprobs, _: torch.full_like(logprobs, 1 / tokens))
        return
    if method == "again":
        result = Head(module).logprobs(hidden, targets, temperature)[0]
    else:
        result = head.logprobs(module(hidden), targets, temperature)[0]
    torch.autograd.backward(result.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--how", choices=("chunked", "again", "whole"), default="chunked")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    once(nn.Linear(8, 64, bias=False), torch.randn(32, 8, requires_grad=True), options.how)  # warm up: loads libraries
    module = nn.Linear(options.hidden, options.vocabulary, bias=False)
    hidden = torch.randn(options.tokens, options.hidden, requires_grad=True)
    before, began = peak_bytes(), time.process_time()
    once(module, hidden, options.how)
    costs = {"peak_gb": round((peak_bytes() - before) / 1e9, 3), "cpu_s": round(time.process_time() - began, 1)}
    print(json.dumps(vars(options) | costs))


if __name__ == "__main__":
    main()
