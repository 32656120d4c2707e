"""A grammar's bits on logits, against plain arithmetic on every bit."""

from __future__ import annotations

import math
import random

import pytest
import torch

from headrace_inference.torch_engine.sampler import mask_forbidden


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 40, 64, 100])
def test_only_tokens_whose_bit_is_set_stay_possible_and_other_rows_are_as_they_were(vocabulary: int) -> None:
    print(f"seed {vocabulary}")
    draw = random.Random(vocabulary)
    words = (vocabulary + 31) // 32
    masks = [[draw.randrange(2**32) for _ in range(words)] for _ in range(2)]
    signed = [[word - 2**32 if word >= 2**31 else word for word in mask] for mask in masks]
    logits = torch.arange(3.0 * vocabulary).reshape(3, vocabulary)
    before = logits.clone()
    masked = mask_forbidden(logits, torch.tensor([0, 2]), torch.tensor(signed, dtype=torch.int32))
    assert torch.equal(masked[1], before[1])
    for row, mask in zip((0, 2), masks, strict=True):
        for token in range(vocabulary):
            possible = bool(mask[token // 32] >> (token % 32) & 1)
            assert float(masked[row, token]) == (float(before[row, token]) if possible else -math.inf)
