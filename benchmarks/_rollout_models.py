"""Models with a known truth: real weights that answer yes with a chosen probability to any prompt."""

from __future__ import annotations

import math
from pathlib import Path

from tests.support import tiny_model

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
