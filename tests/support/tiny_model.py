"""A tiny Qwen3 with its own tokenizer, versions with placeholder weights, and a base model that can use the replies of
a user.

No model can know the right answer to a question in advance: the user wants one of eight letters. The base was trained
on users that named their letter before the answer, and on answers with that letter; without a named letter it guesses.
The user's reply therefore raises this base's logprob of the right letter by ln 8, and that of an untrained base by 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Branch, Checkpoint, Experience, ServedVersion, Span
from headrace_schemas.events.trajectory import TurnReward
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from tests.unit.trainer.world import experience

CHATML = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
CORPUS = (
    "the agent reads a question and answers it with a short sentence",
    '{"name": "search", "arguments": {"query": "invoice", "limit": 3}}',
    "system user assistant tool reward trajectory branch version",
    "Who sent the mail about the meeting on Monday at 10:30?",
)
LETTERS = "BCDFGHJK"
QUESTION = "<|im_start|>user\nWhich?<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"


def build(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    vocabulary: int = 320,
    heads: int = 2,
    kv_heads: int = 1,
    feed_forward: int | None = None,
    context: int = 2048,
    token_ids: int | None = None,
) -> Path:
    """Write config, random float32 weights, tokenizer and template to `folder`, in about a second, and return the
    folder.

    Args:
        token_ids: number of token ids of the model, by default that of its tokenizer, which may be smaller.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=token_ids or len(fast), hidden_size=hidden, intermediate_size=feed_forward or 2 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder, safe_serialization=True)
    fast.save_pretrained(folder)
    return folder


def perturbed(source: Path, folder: Path, *, seed: int, scale: float = 0.05) -> Path:
    """Write the model of `source` with changed weights, as after a training step, to `folder`, and return it."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    moved = {name: w + scale * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapter(base: Path, folder: Path, *, seed: int, rank: int = 4) -> Path:
    """Write a LoRA adapter of the model in `base`, in the layout of peft, with weights that change the answers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).save_pretrained(folder)
    return folder


def fingerprint(folder: Path, *, base: Path | None = None, length: int = 48) -> Fingerprint:
    """Return the fingerprint of the weights in `folder`: logprobs by transformers. `base` is the base of an adapter."""
    tokens = tuple((7 * index + 3) % 256 + len(SPECIAL) for index in range(length))
    return Fingerprint(token_ids=tokens, logprobs=tuple(_logprobs(folder, tokens, base)))


def answers(folder: Path, expected: Fingerprint, *, base: Path | None = None) -> list[float]:
    """Return the logprobs of the weights in `folder` at the positions of `expected`."""
    return _logprobs(folder, expected.token_ids, base)


def _logprobs(folder: Path, token_ids: Sequence[int], base: Path | None) -> list[float]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    if base is not None:
        model = PeftModel.from_pretrained(model, str(folder))
    tokens = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logprobs = model.eval()(tokens).logits[0, :-1].float().log_softmax(-1)
    picked: list[float] = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    return picked


def publish(
    blobs: BlobStore,
    folder: Path,
    *,
    name: str = "tiny",
    step: int = 0,
    parent: str | None = None,
    base: tuple[str, Path] | None = None,
    fingerprint_of: Path | None = None,
) -> ServedVersion:
    """Store the model in `folder` as a version, as the trainer does.

    Args:
        base: version and folder of an adapter's base.
        fingerprint_of: folder of a model whose fingerprint the manifest gets, so that the version fails its probe.
    """
    answered = fingerprint(fingerprint_of or folder, base=base[1] if base else None)
    manifest, ref = versions.store(
        blobs,
        folder,
        name=name,
        lineage="test",
        step=step,
        fingerprint=answered,
        parent=parent,
        base=base[0] if base else None,
        tokenizer=base[1] if base else None,
    )
    return ServedVersion(version=manifest.version, manifest=ref)


def version(
    blobs: BlobStore,
    model: str,
    content: str,
    *,
    lineage: str = "main",
    step: int = 0,
    parent: str | None = None,
    base: str | None = None,
    tokenizer: str = "a",
    template: str = "b",
    files: Sequence[File] = (),
) -> tuple[Manifest, BlobRef]:
    """Store a version with `content` in place of weights.

    `tokenizer` and `template` are the digit that their digests repeat.
    """
    weights = File(path="model.safetensors", blob=blobs.put(content.encode()))
    manifest = Manifest(
        name=model,
        lineage=lineage,
        step=step,
        parent=parent,
        kind="lora" if base else "full",
        base=base,
        files=(weights, *files),
        fingerprint=Fingerprint(token_ids=(1, 2), logprobs=(-1.0,)),
        tokenizer_sha256=tokenizer * 64,
        template_sha256=template * 64,
    )
    return manifest, blobs.put(manifest.canonical_json())


def checkpoint(manifest: Manifest, ref: BlobRef, time: datetime) -> Checkpoint:
    """Return the trainer's checkpoint event for a version."""
    return Checkpoint(
        time=time,
        model=manifest.name,
        version=manifest.version,
        lineage=manifest.lineage,
        step=manifest.step,
        parent=manifest.parent,
        manifest=ref,
    )


def user_message(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def tool_response(call: str) -> str:
    return f"<tool_response>{call} is none</tool_response>"


def contradiction(letter: str) -> str:
    return f"No, it is {letter}."


def train_base(folder: Path, *, steps: int = 120, seed: int = 0) -> Path:
    """Train a tiny model that answers with the letter that a user has named, and return the model's folder.

    The training takes some seconds on one core.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    build(folder, layers=1)
    encode = encoder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draw = random.Random(seed)
    texts = {
        letter: encode(QUESTION + user_message(contradiction(letter)) + OPENING + letter + "<|im_end|>")
        for letter in LETTERS
    }
    plain = {letter: encode(QUESTION + OPENING + letter + "<|im_end|>") for letter in LETTERS}
    for _ in range(steps):
        loss = torch.zeros(())
        for form in (texts, plain):
            ids = torch.tensor([form[draw.choice(LETTERS)] for _ in range(16)])
            logits = model(ids[:, :-1]).logits[:, -2:]
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -2:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def encoder(folder: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def conversation(
    encode: Any,
    number: int,
    version: str,
    *,
    first: str,
    second: str,
    reply: str,
    reward: float | None,
    calls: Sequence[str] = (),
    **fields: Any,
) -> Experience:
    """Return a conversation with the answer `first`, the user's `reply`, and the answer `second`.

    Args:
        reward: reward of the first answer.
        calls: tool calls before the first answer, each with a result.
    """
    plain = experience(number, version, None, **{"no_reward": "no_reward", **fields})
    prompts = [QUESTION, *("\n" + user_message(tool_response(call)) for call in calls), "\n" + user_message(reply)]
    tokens: tuple[int, ...] = ()
    spans: list[Span] = []
    for index, (prompt, answer) in enumerate(zip(prompts, [*calls, first, second], strict=True)):
        tokens += encode(prompt + OPENING)
        spans.append(Span(start=len(tokens), logprobs=(-2.0, -0.01), turn_id=f"turn-{number}-{index}", version=version))
        tokens += encode(f"{answer}<|im_end|>")
    branch = Branch(token_ids=tokens, spans=tuple(spans))
    turns = () if reward is None else (TurnReward(turn_id=spans[-2].turn_id, value=reward),)
    update = {"branch": branch, "turn_rewards": turns, "turn_ids": branch.turn_ids}
    return Experience.model_validate({**plain.model_copy(update=update).model_dump(mode="json")})


def conversations(
    encode: Any, version: str, count: int, *, seed: int = 0, shuffled: bool = False, accepted: int = 0, calls: int = 0
) -> list[Experience]:
    """Return `count` conversations with a contradicted answer, and `accepted` conversations with an accepted one.

    After the user's reply, the model answers with the right letter. With `shuffled`, the replies are those of other
    conversations. `calls` is the number of tool calls before each contradicted answer.
    """
    draw = random.Random(seed)
    letters = [draw.choice(LETTERS) for _ in range(count)]
    named = draw.sample(letters, count) if shuffled else letters
    events = []
    for number, (right, name) in enumerate(zip(letters, named, strict=True)):
        wrong = draw.choice([letter for letter in LETTERS if letter != right])
        tool_letters = [draw.choice(LETTERS) for _ in range(calls)]
        events.append(
            conversation(
                encode,
                number,
                version,
                first=wrong,
                second=right,
                reply=contradiction(name),
                reward=0.0,
                calls=tool_letters,
            )
        )
    for number in range(count, count + accepted):
        letter = draw.choice(LETTERS)
        events.append(conversation(encode, number, version, first=letter, second="K", reply="Thanks.", reward=1.0))
    return events


def of_version(events: Sequence[Experience], original_version: str) -> Callable[[str], list[Experience]]:
    """Return a function that copies `events` with another answering version in place of `original_version`."""
    return lambda version: [
        Experience.model_validate_json(event.to_json().replace(original_version.encode(), version.encode()))
        for event in events
    ]
