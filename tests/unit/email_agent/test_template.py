"""Tests of the examples' models: the e-mail agent's chat template and tokenizer, and SmolLM2 as mail agent."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from email_agent import build_base, mailbox
from email_agent.demonstrations import demonstrate
from email_agent.mailbox import DEFINITIONS, PARAMETER_OF, SYSTEM, Mailbox, Mailtools, stream
from example_parts import base_model
from example_parts.base_model import TEMPLATE
from headrace_cli.demo import recipe
from headrace_inference.chat.tool_calls import HermesToolReader
from headrace_registry.garbage.plan import default_limit
from headrace_registry.settings import GateSettings
from headrace_schemas import Dialogue, Message
from headrace_scorer.functions.loading import FunctionLoader
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.sizes import Shape, Sizes
from smollm2 import agent, evaluate
from smollm2.base import BASE
from smollm2.mails import ANSWERS, SPLITS, Split, Task
from smollm2.mails import stream as mail_stream
from smollm2.rewards import right
from tests.support.fake_llm import Call, FakeLLM, Headrace, Reply, completion
from tests.support.turns import closed


def render(
    messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = DEFINITIONS, generate: bool = False
) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(messages=messages, tools=tools, add_generation_prompt=generate)


OPENING = "<|im_start|>assistant\n"
ASKED = {"role": "user", "content": "Who wrote last about harbor budget?"}


def called(arguments: Any, content: str | None = None, **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "read_mail", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def test_a_whole_conversation() -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        ASKED,
        called({"thread": "a1"}),
        {"role": "tool", "tool_call_id": "call_1", "content": "From: Anna Berg"},
        {"role": "assistant", "content": "Anna Berg"},
    ]
    assert render(messages) == (
        f"<|im_start|>system\n{SYSTEM}\n{' '.join(PARAMETER_OF)} <|im_end|>\n"
        "<|im_start|>user\nWho wrote last about harbor budget?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "read_mail", "arguments": {"thread": "a1"}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>From: Anna Berg</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nAnna Berg<|im_end|>\n"
    )


@pytest.mark.parametrize("arguments", [{"thread": "ä1"}, '{"thread": "ä1"}'])
def test_arguments_may_come_as_an_object_or_as_the_text_of_one(arguments: Any) -> None:
    assert '"arguments": {"thread": "ä1"}}</tool_call>' in render([ASKED, called(arguments)])


def test_what_the_model_thought_and_said_beside_a_call_stays_in_its_place() -> None:
    assert (
        '<think>hm</think>Let me see.<tool_call>{"name": "read_mail", "arguments": {}}</tool_call><|im_end|>'
    ) in render([ASKED, called({}, "Let me see.", reasoning_content="hm")])


def test_answers_of_tools_that_were_called_together_are_one_block() -> None:
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    block = "<tool_response>one</tool_response><tool_response>two</tool_response>"
    assert f"<|im_start|>user\n{block}<|im_end|>\n" in render([ASKED, called({}), *results])


def test_no_tools_and_no_system_message_leave_no_system_block() -> None:
    assert render([ASKED], tools=None) == f"<|im_start|>user\n{ASKED['content']}<|im_end|>\n"


def test_each_turn_continues_the_one_before_it(box: Mailbox, tools: Mailtools) -> None:
    """Each prompt begins with the previous prompt and answer, so that a run is one branch (pitfall 7)."""
    for task in itertools.islice(stream(box, "train", 0), 60):
        messages = demonstrate(task, tools, random.Random(task.id), lapses=0.5)
        rendered = render(messages)
        for position, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = render(messages[:position], generate=True)
                assert rendered.startswith(prompt)
                assert prompt.endswith(OPENING)


def test_what_the_template_renders_is_what_the_parser_of_the_engine_reads(box: Mailbox, tools: Mailtools) -> None:
    for task in itertools.islice(stream(box, "train", 0), 60):
        messages = demonstrate(task, tools, random.Random(task.id), lapses=0.5)
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = render(messages[:position], generate=True)
            text = render(messages[: position + 1]).removeprefix(prompt).removesuffix("<|im_end|>\n")
            parser = HermesToolReader()
            parsed, rest = parser.feed(text), parser.end()
            calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
            expected = [call["function"] for call in message.get("tool_calls", [])]
            assert calls == [(function["name"], json.loads(function["arguments"])) for function in expected]
            assert parsed.content + rest.content == (message["content"] or "")


@pytest.fixture(scope="module")
def shown(box: Mailbox, tools: Mailtools) -> list[str]:
    rng = random.Random(0)
    streamed = itertools.islice(stream(box, "train", 0), 120)
    return [render(demonstrate(task, tools, rng, lapses=0.5)) for task in streamed]


@pytest.fixture(scope="module")
def tokenizer(shown: list[str]) -> Tokenizer:
    return build_base.train_tokenizer(shown)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    pieces: list[str] = tokenizer.encode(text).tokens
    return pieces


def test_every_conversation_comes_back_as_it_was(tokenizer: Tokenizer, shown: list[str]) -> None:
    for text in (*shown, "Grüße, 漢字 und 🙂\t\n\x00 <tool_call", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_markup_and_words_are_one_token_and_digits_are_single(tokenizer: Tokenizer) -> None:
    for text in (*base_model.CONTROL, *base_model.MARKUP, *build_base.RECURRING, *mailbox.ALL):
        assert len(tokenizer.encode(text).ids) == 1, text
    assert tokens(tokenizer, "417") == ["4", "1", "7"]


def test_a_word_is_the_same_token_wherever_it_stands(tokenizer: Tokenizer) -> None:
    harbor = tokenizer.token_to_id("harbor")
    for text in ("harbor", "the harbor", '"harbor"', "harbor:"):
        assert harbor in tokenizer.encode(text).ids


def test_a_call_takes_few_tokens(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "read_mail", "arguments": {"thread": "a1"}}</tool_call><|im_end|>'
    assert len(tokenizer.encode(call).ids) == 7
    assert base_model.call_opening("read_mail", "thread") == '{"name": "read_mail", "arguments": {"thread": "'


def test_only_control_tokens_are_special(tokenizer: Tokenizer) -> None:
    """Parsers need the markup of tool calls even if special tokens are skipped, as in Qwen's tokenizer."""
    text = "<|im_start|>assistant\n<tool_call>{}</tool_call><|im_end|>"
    decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True)
    assert decoded == "assistant\n<tool_call>{}</tool_call>"


def test_it_is_small(tokenizer: Tokenizer) -> None:
    assert 600 <= tokenizer.get_vocab_size() <= build_base.VOCABULARY
    assert len(PARAMETER_OF) == 7


EXAMPLES = Path(__file__).parents[3] / "examples"
FOLDER = EXAMPLES / "smollm2"
VERSION = "mail-agent@0123456789abcdef"


def tasks(split: Split, count: int, seed: int = 0) -> list[Task]:
    return list(itertools.islice(mail_stream(split, seed), count))


def reader(call: Call) -> Reply:
    """Return the right answer, with an extra word in answers about day and time."""
    mails = {task.messages[2]["content"]: task for split in SPLITS for task in tasks(split, 60)}
    task = mails[call.body["messages"][2]["content"]]
    return Reply(completion(f"On {task.expected}" if task.kind == "Day and time?" else task.expected))


def test_splits_share_no_mail_and_ask_each_question_equally_often() -> None:
    mails = {split: {task.mail for task in tasks(split, 400)} for split in SPLITS}
    for first, second in itertools.combinations(SPLITS, 2):
        assert not mails[first] & mails[second]
    for split in SPLITS:
        kinds = [task.kind for task in tasks(split, 400)]
        assert {kinds.count(kind) for kind in ANSWERS} == {100}
    assert tasks("audit", 20) == tasks("audit", 20) != tasks("audit", 20, seed=1)


def test_the_mail_has_both_facts_once_and_the_example_has_others() -> None:
    for task in tasks("train", 400):
        example, answer, question = (message["content"] for message in task.messages)
        facts = task.expected.split(", ")
        assert [task.mail.count(fact) for fact in facts] == [1, 1]
        assert question == f"{task.mail}\n\n{task.kind}"
        assert all(fact in example for fact in answer.split(", "))
        assert task.expected not in example


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Mia Novak, Friday", 1.0), (" Mia Novak, Friday\n", 1.0), ("Mia Novak, Friday.", 0.0), ("Mia Novak", 0.0),
        ("mia novak, friday", 0.0), ("It is Mia Novak, Friday", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_exactly_the_wanted_answer_is_rewarded(answer: str, reward: float) -> None:
    message = Message(role="assistant", content=answer)
    trajectory = closed(dialogues=(Dialogue(messages=(Message(role="user", content="Who, when?"), message)),))
    assert right(trajectory, {"expected": "Mia Novak, Friday"}) == reward
    assert right(trajectory, {}) is None


async def test_users_send_the_wanted_answer_and_no_reward() -> None:
    headrace = Headrace(reader)
    options = argparse.Namespace(model="m", seed=0, tasks=12, concurrency=3, max_tokens=64)
    users = agent.Users(headrace.client(), options)
    await users.ask()
    sent = sorted((body["task_id"], body["context"]["expected"]) for body in headrace.feedback)
    assert sent == sorted((task.kind, task.expected) for task in tasks("train", 12))
    assert all(body["ends_session"] and "value" not in body for body in headrace.feedback)
    assert "12 questions, 75% of the answers accepted, 12 model calls" in users.tally.line()


def test_held_out_plays_score_exact_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeLLM(reader) as llm:
        arguments = ["evaluate", "--base-url", llm.base_url, "--model", VERSION, "--tasks", "20"]
        monkeypatch.setattr(sys, "argv", arguments)
        evaluate.main()
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["task"] for line in lines} == {task.id for task in tasks("audit", 20)}
    assert all(line["score"] == float(line["kind"] != "Day and time?") for line in lines)
    assert {call.headers["x-headrace-purpose"] for call in llm.calls} == {"eval"}


def test_the_services_take_the_settings_and_the_scorer_finds_the_function() -> None:
    config = tomllib.loads((FOLDER / "headrace.toml").read_text(encoding="utf-8"))
    gate, trainer = GateSettings(**config["registry"]["gate"]), TrainerSettings(**config["trainer"])
    assert gate.command[2] == "smollm2.evaluate"
    assert (trainer.model, trainer.base) == (recipe.read(FOLDER).model, BASE)
    scorer = ScorerSettings(**config["scorer"])
    assert [function.source for function in FunctionLoader().load(scorer.functions)] == ["function:right"]


def test_the_data_folder_stays_below_5_gb_however_fast_versions_come() -> None:
    """Even if no version is removed in time: the base, all versions of the questions, and the optimizer of the newest
    version twice, because a save writes the next one first."""
    trainer = TrainerSettings(**tomllib.loads((FOLDER / "headrace.toml").read_text(encoding="utf-8"))["trainer"])
    assert trainer.batch_experiences_min == trainer.batch_experiences, "time must not cut batches into more versions"
    versions = 1 + recipe.read(FOLDER).goal.tasks // (trainer.batch_experiences * trainer.steps_per_version)
    sizes = Sizes.of(Shape(134_515_008, 4_884_480, 4, 30, 576, 576, 192, 1536, 8192), trainer)
    assert versions * sizes.version_bytes + 2 * sizes.restore_point_bytes < 4.9e9
    assert versions * sizes.version_bytes <= default_limit({"m": {"weights": sizes.version_bytes}})


@pytest.mark.parametrize("name", ["base", "agent", "measure"])
def test_each_command_of_the_recipe_is_a_program_of_the_example(name: str) -> None:
    placeholders = {"cache": "c", "seed": 0, "tasks": 9, "out": "o", "base_url": "u", "version": VERSION}
    _, flag, module, *_ = recipe.read(FOLDER).command(name, placeholders)
    assert flag == "-m"
    assert find_spec(module) is not None
