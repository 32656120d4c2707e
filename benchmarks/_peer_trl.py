"""TRL's GRPO training steps, one for each line of standard input, with their costs on standard output.

`benchmarks._steps` describes the comparison. The script runs in a separate environment (`make install GROUP=peers`) and
does not import Headrace. The trainer is TRL's own, including its loop, loss, optimizer and logs, but with given instead
of generated completions. A step is measured from its beginning to its end; the batch is fetched before.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPT = 0.25
STEPS = 1_000_000


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes; `getrusage` would start with the peak of the parent process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


class EndOfLines(Exception):
    """Signal that the input has ended."""


class StepOnLine(TrainerCallback):  # type: ignore[misc]
    """Callback that waits for a line before each step, and prints a line after it."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not sys.stdin.readline():
            raise EndOfLines
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        cpu_s = time.process_time() - self._began
        memory = {"peak_gb": peak_bytes() / 1e9, "over_start_gb": (peak_bytes() - self._before) / 1e9}
        print(json.dumps({"cpu_s": cpu_s, **memory}), flush=True)


class FixedCompletionsTrainer(GRPOTrainer):  # type: ignore[misc]
    """Trainer whose completions come from a file, padded as TRL pads its own.

    All prompts end, and all completions begin, at the same index.
    """

    completions: dict[str, Any]

    def _generate_and_score_completions(self, _: Any) -> dict[str, Any]:
        rows, advantages = self.completions["token_ids"], self.completions["advantages"]
        cuts = [max(1, int(len(row) * PROMPT)) for row in rows]
        before, after = max(cuts), max(len(row) - cut for row, cut in zip(rows, cuts, strict=True))
        prompts, completions = torch.zeros(len(rows), before).long(), torch.zeros(len(rows), after).long()
        prompt_mask, completion_mask = torch.zeros_like(prompts), torch.zeros_like(completions)
        for number, (row, cut) in enumerate(zip(rows, cuts, strict=True)):
            prompts[number, before - cut :] = torch.tensor(row[:cut])
            prompt_mask[number, before - cut :] = 1
            completions[number, : len(row) - cut] = torch.tensor(row[cut:])
            completion_mask[number, : len(row) - cut] = 1
        return {
            "prompt_ids": prompts,
            "prompt_mask": prompt_mask,
            "completion_ids": completions,
            "completion_mask": completion_mask,
            "advantages": torch.tensor(advantages),
            "num_items_in_batch": completion_mask.sum(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, required=True, help="sequences of one forward pass")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = json.loads(options.data.read_text())
    count = len(data["token_ids"])
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "x": 2}, unk_token="x")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            per_device_train_batch_size=options.rows, gradient_accumulation_steps=count // options.rows,
            steps_per_generation=count // options.rows, num_generations=count, max_steps=STEPS, num_iterations=1,
            beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo", temperature=1.0, learning_rate=1e-5,
            lr_scheduler_type="constant", adam_beta2=0.99, weight_decay=0.0, max_grad_norm=1.0,
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", disable_tqdm=True,
            disable_dropout=True, log_completions=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = FixedCompletionsTrainer(
            model=model,
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * count}),
            processing_class=tokenizer,
        )
        trainer.completions = data
        before = peak_bytes()
        trainer.add_callback(StepOnLine(before))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(json.dumps({"ready": True, "parameters": parameters}), flush=True)
        try:
            trainer.train()
        except EndOfLines:
            return


if __name__ == "__main__":
    main()
