"""A private Headrace for demos that make their versions themselves, with all services except trainer and judge.

Also the acceptance lines and reports of such demos, and models of known quality: real weights that answer yes with a
chosen probability to any prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from tests.support import tiny_model
from tests.support.processes import free_port


@dataclass(frozen=True, slots=True)
class LiveStack:
    """A running stack, with the producer and the blob store for new versions."""

    supervisor: Supervisor
    producer: EventProducer
    blobs: BlobStore


@contextlib.asynccontextmanager
async def live_stack(folder: Path, settings: Mapping[str, object]) -> AsyncIterator[LiveStack]:
    """Run a stack with its data in `folder / "data"`, and stop it at the end."""
    supervisor = Supervisor(
        folder / "data",
        settings={**settings, "broker.kafka_port": free_port()},
        without=("trainer", "judge"),
        auto_ports=True,
        environ={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
    )
    blobs = BlobStore.open(Common(data_dir=folder / "data"))
    producer = EventProducer(Overrides(None, {}, {}).bus_settings(supervisor.plan.bus), "headrace/demo", blobs)
    supervisor.start()
    try:
        await asyncio.to_thread(supervisor.wait_up)
        await producer.start()
        yield LiveStack(supervisor, producer, blobs)
    finally:
        await producer.stop()
        await asyncio.to_thread(supervisor.stop)


@dataclass
class Line:
    """Acceptance line with its measured values."""

    name: str
    holds: bool
    details: str


def print_now(text: str) -> None:
    print(text, flush=True)


def report(target: str, lines: Sequence[Line], numbers: Mapping[str, object], wall_s: float) -> int:
    """Print the lines and write `reports/<target>.json`. Return exit status 1 if a line does not hold."""
    print_now("")
    for line in lines:
        print_now(f"{'holds' if line.holds else 'DOES NOT HOLD':14} {line.name}: {line.details}")
    path = Path("reports") / f"{target}.json"
    path.parent.mkdir(exist_ok=True)
    written = {"lines": [vars(line) for line in lines], "numbers": numbers, "wall_s": round(wall_s, 1)}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print_now(f"written: {path}")
    return 0 if all(line.holds for line in lines) else 1


YES, NO = "y", "n"
"""Answers: single letters, which are one token in every tokenizer."""
_LOGIT = 14.0
"""Joint logit of both answers. All other tokens together have a probability of about one in a thousand."""


def build(source: Path, folder: Path, *, right: float, seed: int) -> Path:
    """Write a copy of the model in `source` that answers `YES` with probability `right`, else `NO`.

    The last token of a prompt is always the same. The contributions of the layers are removed, and the embeddings of
    the two answers are aligned with the remaining hidden state. All other weights are changed slightly, so that no two
    versions are equal.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    tiny_model.perturbed(source, folder, seed=seed, scale=0.01)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = {word: tokenizer.encode(word, add_special_tokens=False)[0] for word in (YES, NO)}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
        if name.endswith("model.norm.weight"):
            weights[name] = torch.ones_like(weights[name])
    table = weights["model.embed_tokens.weight"]
    last = torch.zeros(table.shape[1])
    last[0] = 0.05
    table[:, 0] = 0.0  # no other token is aligned with the last token of the prompt
    table[prompt[-1]] = last
    length = math.sqrt(table.shape[1])
    for token, probability in ((answers[YES], right), (answers[NO], 1.0 - right)):
        table[token] = 0.0
        table[token, 0] = (_LOGIT + math.log(probability)) / length
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
