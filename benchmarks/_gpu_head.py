"""Peak memory of the output head in a training pass on a GPU, on top of weights and hidden states."""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor, nn

from headrace_trainer.torch_learner.model.head import Head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--frozen", action="store_true", help="do not train the head, as with adapters")
    parser.add_argument("--plain", action="store_true", help="compile nothing")
    options = parser.parse_args()
    module = nn.Linear(options.hidden, options.vocabulary, bias=False, device="cuda").requires_grad_(not options.frozen)
    head = Head(module, compiled=not options.plain)
    hidden = torch.randn(options.tokens, options.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.arange(options.tokens, device="cuda") % options.vocabulary
    heat = torch.full((options.tokens,), 0.7, device="cuda")

    def slope(logprobs: Tensor, _: slice) -> Tensor:
        return torch.full_like(logprobs, 1 / options.tokens)

    took = []
    for _ in range(3):
        module.weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            head.backward(hidden, targets, heat, slope)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(json.dumps({**vars(options), "peak_gb": round(peak, 3), "seconds": round(min(took), 4)}))


if __name__ == "__main__":
    main()
