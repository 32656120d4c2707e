"""Cost of a step on one sequence by its length, measured in a separate process, which prints one line of JSON.

Attention multiplies each pair of tokens that attend to each other. Twice as many tokens therefore cost at most four
times as much with full attention, and twice as much with a window. Memory at most doubles in both cases.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from transformers import masking_utils

from benchmarks._run_processes import peak_bytes
from headrace_trainer.torch_learner.model import attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def once(length: int) -> float:
        mask = masking_utils.causal_mask_function
        mask_options = {"mask_function": mask}
        if options.window:
            mask = masking_utils.sliding_window_causal_mask_function(options.window)
            mask_options = {"mask_function": mask, "local_size": options.window}
        q, k, v = (torch.randn(1, heads, length, 32, requires_grad=True) for heads in (4, 2, 2))
        began = time.process_time()
        seen = attention.SequenceMask((0, length), q_length=length, **mask_options)
        attention.attend(None, q, k, v, seen)[0].sum().backward()  # type: ignore[no-untyped-call]
        return time.process_time() - began

    once(300)  # warm up on a short sequence: loads libraries
    before = peak_bytes()
    cpu_s = min(once(options.length) for _ in range(2))
    print(json.dumps({**vars(options), "cpu_s": round(cpu_s, 3), "peak_gb": round((peak_bytes() - before) / 1e9, 3)}))


if __name__ == "__main__":
    main()
