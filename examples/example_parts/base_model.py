"""Build base models: a Qwen3 of 0.4 million parameters, its byte-level BPE tokenizer, and a warm-up of about a minute.

The folder of a model is named by a digest of all inputs and reused by the next run.

Spaces, and digits or whole numbers, are separate tokens, and the words of an example are single tokens. A word is
therefore the same token in any position, which matters because such a model must mainly learn to copy.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

HERE = Path(__file__).parent
TEMPLATE = HERE / "chat_template.jinja"
CONTEXT = 2048
INGREDIENTS = ("torch", "transformers", "tokenizers")
MODULES = ("base_model.py", "react.py", TEMPLATE.name)
_TOKENIZER_CONVERSATIONS = 2000
"""Number of conversations on which the tokenizer is trained."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
ROLES = ("system", "user", "assistant")
END = "<|im_end|>"
PADDING = "<|endoftext|>"
# ruff: noqa: N803, N806 (tensors and token lists carry their shape as suffixes: _N conversations, _B batch, _T tokens)


Tokens = list[int]


@dataclass(frozen=True)
class Recipe:
    """Settings that determine the weights, in addition to the listed files."""

    schedule: Schedule
    seed: int = 0
    hidden: int = 96
    layers: int = 3
    feed_forward: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    """Smallest value that vLLM's CPU build supports."""
    rope_theta: float = 1000.0
    """Base for conversations of 200 tokens, not 200,000: with short wavelengths a small model learns to attend one
    token back."""
    embedding_std: float = 0.1


@dataclass(frozen=True)
class Lesson:
    """Warm-up of an example's base model."""

    name: str
    folder: Path
    modules: Sequence[str]
    """Files of `folder` that affect the result."""
    definitions: Sequence[Any]
    """Definitions of the tools, in OpenAI's format."""
    schedule: Schedule
    """Default schedule."""
    conversations: Callable[[Any, int], list[list[dict[str, Any]]]]
    """Function that returns all conversations of a schedule and a seed, in order."""
    tokenizer: Callable[[Iterable[str]], Any]
    """Function that trains a tokenizer on texts of users and tools."""

    def recipe(self, seed: int = 0, schedule: Schedule | None = None) -> Recipe:
        return Recipe(schedule or self.schedule, seed)

    def digest(self, recipe: Recipe) -> str:
        """Return a digest of all settings, all listed files and the versions of all packages that affect the result."""
        digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
        files = (*(HERE / name for name in MODULES), *(self.folder / f"{name}.py" for name in self.modules))
        for content in (*(file.read_bytes() for file in files), *(version(name).encode() for name in INGREDIENTS)):
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()[:16]

    def build(self, cache: Path, recipe: Recipe) -> Path:
        """Return the folder of the base model in `cache`, and build it first if it is missing. Concurrent builds are
        safe."""
        folder = cache / self.digest(recipe)
        if folder.exists():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as scratch:
            self._write(Path(scratch) / "model", recipe)
            try:
                (Path(scratch) / "model").rename(folder)
            except OSError:  # another builder was faster
                if not folder.is_dir():
                    raise
        return folder

    def command(self) -> None:
        """Run `python -m NAME.build_base`, which prints the folder of the model of a seed."""
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / self.name
        parser = argparse.ArgumentParser(description="Build the base model of the example, or reuse a built one.")
        parser.add_argument("--cache", type=Path, default=default, help="folder of built models (%(default)s)")
        parser.add_argument("--seed", type=int, default=0)
        options = parser.parse_args()
        # Threads that spin while they wait for each other make this ten times slower where other processes work too.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        print(self.build(options.cache, self.recipe(options.seed)))

    def _write(self, folder: Path, recipe: Recipe) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        conversations = self.conversations(recipe.schedule, recipe.seed)
        tokenizer = self._tokenizer(conversations)
        rendered = tokenizer.apply_chat_template(conversations, tools=self.definitions, tokenize=False)
        texts = tokenizer(rendered)["input_ids"]
        model = new_model(recipe, tokenizer)
        opening = tokenizer.encode("<|im_start|>assistant\n")
        with _progress(recipe.schedule.steps) as step_done:
            train(model, texts, opening, tokenizer.eos_token_id, recipe.schedule, step_done)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _tokenizer(self, conversations: list[list[dict[str, Any]]]) -> Any:
        sample = conversations[:_TOKENIZER_CONVERSATIONS]
        texts = (message["content"] for messages in sample for message in messages if message["role"] != "assistant")
        return chat_tokenizer(self.tokenizer(texts))


def chat_tokenizer(tokenizer: Any, context: int = CONTEXT) -> Any:
    """Return a `tokenizers.Tokenizer` as transformers uses it, with the chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PADDING,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        model_max_length=context,
    )


def new_model(recipe: Recipe, tokenizer: Any, context: int = CONTEXT) -> Any:
    """Return a model with new weights. Generation samples from the full distribution, because truncated samples cannot
    be trained."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=recipe.embedding_std)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **ends)
    return model


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("building the base model"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("warm-up", total=steps)
        yield lambda: progress.advance(task)


def call_opening(tool: str, parameter: str) -> str:
    """Return the beginning of a call's JSON, up to the value of its one argument."""
    return json.dumps({"name": tool, "arguments": {parameter: ""}}).removesuffix('"}}')


def train_tokenizer(
    texts: Iterable[str], words: Sequence[str], recurring: Sequence[str], entries: int, *, numbers: bool = False
) -> Tokenizer:
    """Train a tokenizer with at most `entries` entries on texts of users and tools.

    Args:
        words: words that become tokens if there is room.
        recurring: parts of tool calls that always become tokens.
        numbers: whether whole numbers may be words; otherwise digits are never merged.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    digits = r"\d+" if numbers else r"\d"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"{digits}|\s|[A-Za-z]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added_tokens = [AddedToken(text, normalized=False, special=False) for text in (*MARKUP, *recurring)]
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(added_tokens),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary = " ".join((*words, *ROLES))
    tokenizer.train_from_iterator(itertools.chain(texts, itertools.repeat(vocabulary, 1000)), trainer)
    tokenizer.add_tokens(added_tokens)
    return tokenizer


@dataclass(frozen=True)
class Schedule:
    """Training schedule. Right conversations come first, until the model can copy from its context, then bad habits as
    well."""

    steps: int = 400
    batch: int = 8
    """Conversations of a step."""
    right_share: float = 0.6
    """Share of the conversations before bad habits occur."""
    muon_lr: float = 0.006
    """Learning rate of matrices."""
    adamw_lr: float = 0.003
    """Learning rate of embeddings and norms."""
    decay_share: float = 0.7
    """Share of the steps over which the learning rates decay to zero."""
    other_weight: float = 0.02
    """Loss weight of tokens that the model only reads; its own tokens have weight 1."""

    @property
    def shown(self) -> int:
        """Number of conversations."""
        return self.steps * self.batch

    @property
    def shown_right(self) -> int:
        """Number of conversations at the beginning without a bad habit."""
        return round(self.shown * self.right_share)


def train(
    model: torch.nn.Module,
    texts_N: list[Tokens],
    opening: Tokens,
    end: int,
    schedule: Schedule,
    step_done: Callable[[], None],
) -> None:
    """Train one pass over the rendered conversations `texts_N`, in order.

    The model's own tokens are those between `opening`, which begins its turn, and `end`, inclusive.
    """
    import torch
    from torch.nn.functional import cross_entropy

    matrices, rest = _by_optimizer(model)
    optimizers = [
        torch.optim.Muon(matrices, lr=schedule.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=schedule.adamw_lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, _rate(schedule)) for optimizer in optimizers]
    for first in range(0, len(texts_N), schedule.batch):
        tokens_BT, weights_BT = _padded(texts_N[first : first + schedule.batch], opening, end, schedule.other_weight)
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        targets_BT, weights_BT = tokens_BT[:, 1:], weights_BT[:, 1:]
        losses_N = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets_BT.flatten(), reduction="none")
        loss = (losses_N * weights_BT.flatten()).sum() / weights_BT.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        step_done()


def _by_optimizer(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return matrices between hidden layers, for Muon, and embeddings and norms, for AdamW."""
    named = list(model.named_parameters())
    is_matrix = {name: weight.ndim == 2 and "embed" not in name for name, weight in named}
    return [weight for name, weight in named if is_matrix[name]], [
        weight for name, weight in named if not is_matrix[name]
    ]


def _rate(schedule: Schedule, rise_steps: int = 20) -> Callable[[int], float]:
    def factor(step: int) -> float:
        left = 1 - step / schedule.steps
        return min(1.0, (step + 1) / rise_steps, left / schedule.decay_share + 0.02)

    return factor


def _padded(texts_B: list[Tokens], opening: Tokens, end: int, other: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and loss weights, padded on the right with weight 0."""
    import torch

    longest = max(map(len, texts_B))
    tokens_BT = torch.zeros(len(texts_B), longest, dtype=torch.long)
    weights_BT = torch.zeros(len(texts_B), longest)
    for row, text in enumerate(texts_B):
        tokens_BT[row, : len(text)] = torch.tensor(text)
        weights_BT[row, : len(text)] = other
        for start, stop in _own_spans(text, opening, end):
            weights_BT[row, start:stop] = 1.0
    return tokens_BT, weights_BT


def _own_spans(text: Tokens, opening: Tokens, end: int) -> Iterator[tuple[int, int]]:
    for position in range(len(text) - len(opening) + 1):
        start = position + len(opening)
        if text[position:start] == opening:
            yield start, text.index(end, start) + 1
