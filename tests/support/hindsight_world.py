"""Conversations in which a user gives the right answer after a wrong one, and a base model that can use such replies.

No model can know the right answer to a question in advance: the user wants one of eight letters. The base was trained
on users that named their letter before the answer, and on answers with that letter; without a named letter it guesses.
The user's reply therefore raises this base's logprob of the right letter by ln 8, and that of an untrained base by 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.trajectory import TurnReward
from tests.support import tiny_model
from tests.unit.trainer.world import experience

LETTERS = "BCDFGHJK"
QUESTION = "<|im_start|>user\nWhich?<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"


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

    tiny_model.build(folder, layers=1)
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
