"""A tiny model that learned the steps of a repair from demonstrations, which name the right operator half of the time.

The demonstrations are real: the coding agents run against a replica whose answers are scripted.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.system.program import ROOT

sys.path.insert(0, str(ROOT / "examples"))  # examples are not installed

from example_parts import base_model
from example_parts.base_model import Recipe, chat_tokenizer, new_model
from headrace_runtime.chat_messages import template_message
from headrace_runtime.kafka import wire
from headrace_schemas import Message
from tests.clients.repairs import AGENT_KINDS, OPERATORS, TASK, Agent, Bug
from tests.support.fake_replica import Called, FakeReplica, Fault, Generation
from tests.support.gateway import gateway

RIGHT_SHARE = 0.5
"""Share of demonstrations with the right operator."""
CONTEXT = 16_384
_VOCABULARY = 1200
_TITLE = '{"title": "Repair calc"}'
_READ, _TEST, _DONE = "cat calc.py", "python3 -m unittest -q 2>&1 | tail -1", "Done."
_FUNCTION = re.compile(r"def (\w+)\(a, b\)")
_EDITS = re.compile(r"(?<==)\S+(?=; sed)")
_NAMES = re.compile(
    rf"(?<=def )\w+(?=\(a, b\))|(?<=return a )\S+(?= b)|(?<=\W)\w+(?==\S+; sed)|{_EDITS.pattern}|(?<=a \$)\w+(?= b\|)"
)
"""The function and the operators of a rendered conversation."""
Json = dict[str, Any]


@dataclass
class Demonstrator(FakeReplica):
    """A replica that plays the steps of a repair and stores each finished conversation."""

    draw: random.Random = field(default_factory=random.Random)
    conversations: list[tuple[list[Json], list[Json]]] = field(default_factory=list)
    """Messages and tools."""

    def _work(self, body: dict[str, Any], fault: Fault) -> Generation:
        answer = self._answer(body)
        if isinstance(answer, str):
            messages = [*body["messages"], {"role": "assistant", "content": answer}]
            self.conversations.append((messages, body.get("tools") or []))
        return Generation(body, body["model"], (), answer)

    def _answer(self, body: Json) -> str | Called:
        if "response_format" in body:
            return _TITLE
        results = list(_results_since_task(body["messages"]))
        if len(results) == 3:
            return _DONE
        tool = body["tools"][0]["function"]
        command = (lambda: _READ, lambda: self._edit(results[0]), lambda: _TEST)[len(results)]()
        return Called(tool["name"], {"command" if tool["name"] == "Bash" else "cmd": command})

    def _edit(self, source: str) -> str:
        match = _FUNCTION.search(source)
        assert match is not None, source
        right = OPERATORS[match[1]]
        wrong = sorted({*OPERATORS.values()} - {right})
        operator = right if self.draw.random() < RIGHT_SHARE else self.draw.choice(wrong)
        return f'{match[1]}={operator}; sed -i "s|a .* b|a ${match[1]} b|" calc.py'


def _results_since_task(messages: Sequence[Json]) -> Iterator[str]:
    """Yield the results of the commands after the last task."""
    task = max(index for index, message in enumerate(messages) if message["role"] == "user" and TASK in _text(message))
    return (_text(message) for message in messages[task:] if message["role"] == "tool")


def _text(message: Json) -> str:
    return Message.model_validate(message).text


async def record(programs: Path, folder: Path, draw: random.Random, bugs: Sequence[Bug]) -> list[Json]:
    """Let each agent repair each bug against the demonstrator, and return the rendered conversations."""
    replica = Demonstrator(grammars=("response_format", "tool_choice"), draw=draw)
    with mock.patch.object(wire, "PAYLOAD_BYTES_MAX", 64 << 20):  # the list that stands for the bus has no blobs
        async with replica.running(), gateway(folder, replica, any_model_name="always") as served:

            async def repair_all(kind: type[Agent]) -> None:
                for number, bug in enumerate(bugs):
                    agent = kind(programs, served.url, folder / f"{kind.__name__}-{number}")
                    bug.write(agent.repository)
                    async with agent:
                        await agent.ask(TASK)
                        if number % 5 == 0:
                            await agent.ask(TASK)

            await asyncio.gather(*(repair_all(kind) for kind in AGENT_KINDS))
    return [
        {"messages": [template_message(Message.model_validate(message)) for message in messages], "tools": tools}
        for messages, tools in replica.conversations
    ]


def build(folder: Path, conversations: Sequence[Json], steps: int, seed: int, step_done: Callable[[], None]) -> Path:
    """Train a model on the conversations and write it to `folder`."""
    tokenizer = _tokenizer(conversations)
    schedule = base_model.Schedule(steps=steps, batch=4)
    model = new_model(Recipe(schedule, seed, layers=2), tokenizer, CONTEXT)
    draw = random.Random(seed)
    rendered = [
        tokenizer.apply_chat_template(conversation["messages"], tools=conversation["tools"] or None, tokenize=False)
        for conversation in conversations
    ]
    right = [text for text in rendered if repairs_rightly(text)]
    shown = [right] * schedule.shown_right + [rendered] * (schedule.shown - schedule.shown_right)
    texts = [varied(draw.choice(choices), draw) for choices in shown]
    tokens = tokenizer(texts)["input_ids"]
    opening = tokenizer.encode("<|im_start|>assistant\n")
    base_model.train(model, tokens, opening, tokenizer.eos_token_id, schedule, step_done)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def repairs_rightly(text: str) -> bool:
    """Return whether the edits of a rendered conversation, if it has any, use the operator that its function needs."""
    match = _FUNCTION.search(text)
    return match is None or {*_EDITS.findall(text)} == {OPERATORS[match[1]]}


def varied(text: str, draw: random.Random) -> str:
    """Return a rendered conversation about another function. Its operators change with it: right ones remain right.

    Otherwise a model that sees a demonstration a dozen times memorizes it with its operator, right or wrong.
    """
    match = _FUNCTION.search(text)
    if match is None:
        return text
    function = draw.choice(sorted(OPERATORS))
    operators, others = sorted({*OPERATORS.values()}), sorted({*OPERATORS.values()} - {OPERATORS[function]})
    draw.shuffle(others)
    operators.remove(OPERATORS[match[1]])
    names = {match[1]: function, OPERATORS[match[1]]: OPERATORS[function], **dict(zip(operators, others, strict=True))}
    return _NAMES.sub(lambda place: names[place[0]], text)


def _tokenizer(conversations: Sequence[Json]) -> Any:
    """Train a tokenizer on the conversations, so that their long prompts are few tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[*base_model.CONTROL, *base_model.MARKUP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (json.dumps(conversation["messages"], ensure_ascii=False) for conversation in conversations)
    tokenizer.train_from_iterator((text.replace("\\n", "\n") for text in texts), trainer)
    return chat_tokenizer(tokenizer, CONTEXT)
