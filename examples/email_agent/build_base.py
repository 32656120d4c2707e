"""Builds the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of less than a minute.

    python -m email_agent.build_base --cache ~/.cache/headrace/email_agent

prints the model's folder. The result stays there under a digest of all that went into it, for the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from email_agent import tokenizer as bpe
from email_agent import warm_up
from email_agent.tools import DEFINITIONS

HERE = Path(__file__).parent
TEMPLATE = HERE / "chat_template.jinja"
CONTEXT = 2048
INGREDIENTS = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Recipe:
    """What decides the weights, besides the files of this folder."""

    seed: int = 0
    hidden: int = 96
    layers: int = 3
    feed_forward: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    """vLLM's CPU build knows no smaller one."""
    rope_theta: float = 1000.0
    """Conversations have 200 tokens, not 200,000: short wavelengths teach a small model to look one token back."""
    embedding_std: float = 0.1
    schedule: warm_up.Schedule = field(default_factory=warm_up.Schedule)

    @property
    def digest(self) -> str:
        """Changes with every setting, every file here that takes part, and the version of every ingredient."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        parts = (TEMPLATE.name, *(f"{name}.py" for name in MODULES))
        for content in (
            *((HERE / name).read_bytes() for name in parts),
            *(version(name).encode() for name in INGREDIENTS),
        ):
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()[:16]


MODULES = ("words", "mailbox", "tools", "tasks", "react", "demonstrations", "tokenizer", "warm_up", "build_base")


def build(cache: Path, recipe: Recipe | None = None) -> Path:
    """The folder of the base model in `cache`, built first unless it is there. Two builders at once do no harm."""
    recipe = recipe or Recipe()
    folder = cache / recipe.digest
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as scratch:
        _write(Path(scratch) / "model", recipe)
        try:
            (Path(scratch) / "model").rename(folder)
        except OSError:  # another builder was faster
            if not folder.is_dir():
                raise
    return folder


def _write(folder: Path, recipe: Recipe) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    shown = warm_up.conversations(recipe.schedule, recipe.seed)
    tokenizer = _tokenizer(shown)
    texts = tokenizer(tokenizer.apply_chat_template(shown, tools=DEFINITIONS, tokenize=False))["input_ids"]
    model = _model(recipe, tokenizer)
    opening = tokenizer.encode("<|im_start|>assistant\n")
    with _progress(recipe.schedule.steps) as step_done:
        warm_up.train(model, texts, opening, tokenizer.eos_token_id, recipe.schedule, step_done)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(shown: list[list[dict[str, Any]]]) -> Any:
    from transformers import PreTrainedTokenizerFast

    said = (message["content"] for messages in shown[:2000] for message in messages if message["role"] != "assistant")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe.train(said),
        eos_token=bpe.END,
        pad_token=bpe.PADDING,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        model_max_length=CONTEXT,
    )


def _model(recipe: Recipe, tokenizer: Any) -> Any:
    """Fresh weights. Generation is left as the model samples: truncated sampling could not be trained on."""
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
        max_position_embeddings=CONTEXT,
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
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("building the base model"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("warm-up", total=steps)
        yield lambda: progress.advance(task)


def main() -> None:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "email_agent"
    parser = argparse.ArgumentParser(description="Build the base model of the e-mail agent, or find it built.")
    parser.add_argument("--cache", type=Path, default=default, help="where built models are kept (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(build(options.cache, Recipe(seed=options.seed)))


if __name__ == "__main__":
    main()
