"""Peak memory of the output head in a training step, measured in a separate process, which prints one line of JSON.

It runs forward and backward of logprobs and entropies, from hidden states and a float32 weight with a gradient. Half of
the tokens have sets of allowed tokens, and a quarter are one answer with penalties. The figure is the memory on top of
weight and hidden states: the gradients of both, and intermediate values. With `again`, logits are computed a second
time for the gradient.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._run_processes import peak_bytes
from headrace_schemas.events.chat import LogitShift
from headrace_trainer.torch_learner.model import head
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.pack_sets import AnswerShift, PackSets

_LARGE_SETS, _SMALL_SET = 64, 8


def sets_of(targets: Tensor, vocabulary: int) -> PackSets:
    """Return sets of allowed tokens: large for a quarter of the tokens, small for the next quarter, penalties for the
    third.
    """
    quarter = len(targets) // 4
    bits_UW = np.full((_LARGE_SETS, (vocabulary + 7) // 8), 0xFF, np.uint8)
    bits_UW[:, -2:] = 0
    large_N = np.full(len(targets), -1, np.int64)
    large_N[:quarter] = np.arange(quarter) % _LARGE_SETS
    small_M = np.arange(quarter, 2 * quarter)
    ids_MK = (targets[small_M].numpy()[:, None] + np.arange(_SMALL_SET)) % vocabulary
    answer = targets[2 * quarter : 3 * quarter].numpy().astype(np.int32)
    shift = AnswerShift.of(2 * quarter, answer, LogitShift(presence_penalty=0.5, frequency_penalty=0.5))
    changed_N = torch.arange(len(targets)) < 3 * quarter
    ids_K = torch.from_numpy(ids_MK.ravel())
    row_K = np.repeat(small_M, _SMALL_SET)
    return PackSets(changed_N, torch.from_numpy(bits_UW), large_N, ids_K, row_K, small_M, (shift,))


def once(module: nn.Linear, hidden: Tensor, method: str) -> None:
    tokens = len(hidden)
    targets, temperature = torch.arange(tokens) % (module.out_features - 16), torch.full((tokens,), 0.7)
    sets = sets_of(targets, module.out_features)
    if method == "chunked":
        slope = torch.full((tokens,), 1 / tokens)
        Head(module).backward(hidden, targets, temperature, lambda _, part: slope[part], sets=sets)
        return
    if method == "again":
        result = Head(module).logprobs(hidden, targets, temperature, sets)[0]
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
