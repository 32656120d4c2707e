"""Cost of a training step in which JSON Schemas restrict half of the tokens, compared with the same step without them.

The vocabulary has made-up byte pair merges. The restricted sequences are answers that a grammar allows, and the trainer
computes the sets of allowed tokens. Both steps alternate. A separate process runs them and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks._steps import PROMPT, SHAPES, batch_of
from headrace_runtime.grammars import vocabulary
from headrace_schemas import Branch, Span, TokenGrammar
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch
from headrace_trainer.experiences.restrictions import SetBuilder
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train

END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"enum": ["invoice", "meeting", "other"]},
        "urgent": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["topic", "urgent", "summary", "tags", "score"],
    "additionalProperties": False,
}


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level tokenizer with `size` tokens, most of them made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<|end|>": END} | {letter: number for number, letter in enumerate(alphabet, 1)}
    letters, merges = [letter for letter in alphabet if letter.isascii() and letter.isalpha()] + ["Ġ"], []
    pieces = [*letters]
    while len(words) < size:
        left, right = draw.choice(pieces), draw.choice(letters)
        if left + right not in words:
            words[left + right] = len(words)
            merges.append((left, right))
            pieces.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def grammar_of(folder: Path, size: int) -> tuple[TokenGrammar, vocabulary.GrammarGuide]:
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    library = vocabulary.library_vocabulary(inner, size, END)
    grammar = TokenGrammar(
        text=f"start: %json {json.dumps(SCHEMA)}\n", library=vocabulary.LIBRARY,
        library_version=vocabulary.library_version(), tokenizer_sha256=library.digest, vocabulary=size, end_id=END,
        stop_ids=(END,),
    )  # fmt: skip
    matcher = vocabulary.match_grammar(library.words, grammar.text)
    return grammar, vocabulary.GrammarGuide(matcher, library.words.vocab_size, END, frozenset({END}))


def sample_answer(initial_guide: vocabulary.GrammarGuide, draw: np.random.Generator) -> list[int]:
    """Return an answer that the grammar allows, with each token drawn uniformly from those that are allowed."""
    guide = initial_guide.fresh()
    tokens: list[int] = []
    while not tokens or tokens[-1] != END:
        octets = guide.allowed().view(np.uint8)
        tokens.append(int(draw.choice(np.flatnonzero(np.unpackbits(octets, bitorder="little")))))
        guide.accept(tokens[-1])
    return tokens


def held_branch(
    length: int, grammar: TokenGrammar, guide: vocabulary.GrammarGuide, draw: np.random.Generator
) -> Branch:
    """Return a sequence of `length` tokens: a prompt, then answers that the grammar restricts."""
    token_ids: list[int] = draw.integers(1, 257, size=max(1, int(length * PROMPT))).tolist()
    spans: list[Span] = []
    while len(token_ids) < length:
        answer = sample_answer(guide, draw)[: length - len(token_ids)]
        logprobs, name = (-1.0,) * len(answer), f"turn-{len(spans)}"
        spans.append(Span(start=len(token_ids), logprobs=logprobs, turn_id=name, version="m@000000000000", grammar=0))
        token_ids += answer
    return Branch(token_ids=tuple(token_ids), spans=tuple(spans), grammars=(grammar,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=16, help="half of them are held (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    shape, draw = SHAPES[options.shape], np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="bench-held-") as root:
        folder = shape.build(Path(root))
        write_tokenizer(folder, shape.vocabulary)
        grammar, guide = grammar_of(folder, shape.vocabulary)
        branches = [held_branch(options.length, grammar, guide, draw) for _ in range(options.sequences // 2)]
        builder = SetBuilder(folder, shape.vocabulary)
        builder.build(branches[0])  # opens the tokenizer
        began = time.process_time()
        sets = [builder.build(branch) for branch in branches[1:]]
        build_s = (time.process_time() - began) / len(sets)
        plain = draw.integers(1, shape.vocabulary, size=(len(branches), options.length)).tolist()
        token_ids = [*map(list, (branch.token_ids for branch in branches)), *plain]
        free = batch_of(token_ids, draw.normal(size=len(token_ids)).tolist(), shape.vocabulary)
        all_sets = [builder.build(branches[0]), *sets, *(None for _ in plain)]
        held_batch = Batch(tuple(replace(row, sets=each) for row, each in zip(free.rows, all_sets, strict=True)))
        policy = Policy.open(folder, ComputeSettings(device="cpu", threads=options.threads), LoraSettings(), seed=0)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5))
    costs: dict[str, list[float]] = {"free": [], "held": []}
    for _ in range(options.rounds + 1):
        for name, batch in (("free", free), ("held", held_batch)):
            began = time.process_time()
            train(policy, optimizer, batch, LossSettings(), 4096, threading.Event())
            costs[name].append(time.process_time() - began)
    best = {name: min(seconds[1:]) for name, seconds in costs.items()}
    restricted = sum(len(each.positions_P) for each in all_sets if each is not None)
    result = {
        "shape": options.shape,
        "restricted_share": round(restricted / free.loss_tokens, 3),
        "distinct_large_sets": len({id(s) for each in all_sets if each for s in each.sets if s.dtype == np.uint8}),
        "free_s": round(best["free"], 3),
        "held_s": round(best["held"], 3),
        "ratio": round(best["held"] / best["free"], 3),
        "build_us_per_token": round(1e6 * build_s / (options.length * (1 - PROMPT)), 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
