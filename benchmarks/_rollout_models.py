"""Models whose truth is known: real weights that say yes with a chosen probability, whatever they are asked."""

from __future__ import annotations

import math
from pathlib import Path

from tests.support import tiny_model

YES, NO = "y", "n"
"""Single letters, which every tokenizer has as one token."""
_LOGIT = 14.0
"""Of both answers together; everything else is left about one token in a thousand."""


def build(source: Path, folder: Path, *, right: float, seed: int) -> Path:
    """The model in `source` with an output that says `YES` with probability `right`, else `NO`.

    After a prompt there is always the same token. What the layers add to it is taken away, and the embeddings of the
    two answers are laid along what is left; all other weights are moved a little, so that no two versions are equal.
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
    table[:, 0] = 0.0  # nobody else lies along the last token of the prompt
    table[prompt[-1]] = last
    length = math.sqrt(table.shape[1])
    for token, probability in ((answers[YES], right), (answers[NO], 1.0 - right)):
        table[token] = 0.0
        table[token, 0] = (_LOGIT + math.log(probability)) / length
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
