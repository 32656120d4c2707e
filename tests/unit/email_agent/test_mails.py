"""Tests of mailboxes, tasks, tools and simulated users. Each kind of feedback contains only its own information."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from email_agent import agent, mailbox
from email_agent.agent import POISONERS, SIGNALS, AnsweredQuestion, _correction, thumbs
from email_agent.demonstrations import ROUTES, demonstrate
from email_agent.directions import Schedule, conversations, direction
from email_agent.mailbox import DEFINITIONS, HELD_OUT_SHARE, HITS, PARAMETER_OF, Mailbox, Mailtools, Task, stream, tasks
from example_parts.react import ERROR, Episode
from headrace.errors import UsageError
from headrace_cli.demo import recipe
from tests.repo.deployments import ROOT
from tests.support.fake_llm import Headrace
from tests.unit.email_agent.test_agent import Clerk, clueless, options

EXAMPLES = Path(mailbox.__file__).parents[1]
DUMP = "from email_agent import mailbox; print('\\n'.join(mailbox.generate({seed}).open().iterdump()))"


def dump(seed: int) -> str:
    database = mailbox.generate(seed).open()
    try:
        return "\n".join(database.iterdump())
    finally:
        database.close()


def test_a_seed_is_one_mailbox_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    elsewhere = subprocess.run(
        [sys.executable, "-c", DUMP.format(seed=7)], cwd=EXAMPLES, capture_output=True, text=True, check=True
    )
    assert sha256(elsewhere.stdout.strip().encode()).digest() == sha256(dump(7).strip().encode()).digest()


def test_another_seed_is_another_mailbox() -> None:
    assert dump(7) != dump(8)


def test_every_project_has_a_thread_on_every_matter(box: mailbox.Mailbox) -> None:
    assert len({thread.subject for thread in box.threads}) == len(mailbox.PROJECTS) * len(mailbox.MATTERS)
    assert len({thread.id for thread in box.threads}) == len(box.threads)
    assert len({contact.id for contact in box.contacts}) == len(box.contacts) == mailbox.CONTACTS


def test_replies_follow_what_they_answer_and_come_from_others(box: mailbox.Mailbox) -> None:
    for thread in box.threads:
        numbers = [mail.number for mail in thread.mails]
        assert numbers == sorted(numbers)
        assert 2 <= len(numbers) <= 1 + mailbox.REPLIES_MAX
        assert len({mail.sender for mail in thread.mails}) == len(thread.mails)


def test_the_database_says_what_the_mailbox_says(box: mailbox.Mailbox, tmp_path: Path) -> None:
    database = box.open(str(tmp_path / "mail.db"))
    rows = database.execute("SELECT number, thread, sender, mails.subject FROM mails ORDER BY number").fetchall()
    database.close()
    expected_rows = [
        (mail.number, thread.id, mail.sender.name, mail.subject) for thread in box.threads for mail in thread.mails
    ]
    assert rows == sorted(expected_rows)


def topics(tasks_of_split: list[Task]) -> set[str]:
    """Return the folders and people in the questions of a split."""
    return {task.about if task.kind == "mail_count" else task.about.split()[0] for task in tasks_of_split}


def test_held_out_tasks_share_nothing_with_the_traffic() -> None:
    for seed in range(5):
        box = mailbox.generate(seed)
        train, held_out = tasks(box, "train"), tasks(box, "held_out")
        assert topics(train).isdisjoint(topics(held_out))
        assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
        assert {task.question for task in train}.isdisjoint(task.question for task in held_out)
        assert len(held_out) / (len(train) + len(held_out)) == HELD_OUT_SHARE


def test_the_stream_of_one_split_never_shows_the_other(box: Mailbox) -> None:
    held_out = {task.id for task in tasks(box, "held_out")}
    task_ids = {task.id for task in itertools.islice(stream(box, "train", 3), 5000)}
    assert task_ids == {task.id for task in tasks(box, "train")}
    assert task_ids.isdisjoint(held_out)


def test_gate_and_audit_are_halves_of_what_is_held_out(box: Mailbox) -> None:
    gate, audit = ({task.id for task in tasks(box, split)} for split in ("gate", "audit"))
    assert gate.isdisjoint(audit)
    assert gate | audit == {task.id for task in tasks(box, "held_out")}
    for kind in ROUTES:
        halves = [sum(task.kind == kind for task in tasks(box, split)) for split in ("gate", "audit")]
        assert halves[0] - halves[1] in (0, 1)
        assert halves[1] >= 8


def test_a_stream_asks_all_kinds_alike_and_nothing_twice_before_all(box: Mailbox) -> None:
    streamed = list(itertools.islice(stream(box, "held_out", 0), 96))
    assert set(Counter(task.kind for task in streamed).values()) == {16}
    assert len({task.id for task in streamed}) == 96


def test_a_stream_is_the_same_for_the_same_seed(box: Mailbox) -> None:
    first, again, other = (list(itertools.islice(stream(box, "train", seed), 60)) for seed in (4, 4, 5))
    assert first == again != other


def test_the_right_way_leads_to_the_expected_answer(box: Mailbox, tools: Mailtools) -> None:
    for task in tasks(box, "train") + tasks(box, "held_out"):
        messages = demonstrate(task, tools, random.Random(0), lapses=0.0)
        called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
        assert messages[-1]["content"] == task.expected
        assert tuple(called) == ROUTES[task.kind]


def test_bad_habits_rarely_lead_to_it(box: Mailbox, tools: Mailtools) -> None:
    rng = random.Random(0)
    streamed = list(itertools.islice(stream(box, "train", 0), 600))
    right = Counter(t.kind for t in streamed if demonstrate(t, tools, rng, lapses=1.0)[-1]["content"] == t.expected)
    assert max(right.values()) <= 25, "of 100 for each kind"
    assert right.total() <= 60, "of 600"


def test_the_demo_has_a_recipe_for_each_of_them() -> None:
    demo_recipe = recipe.read(ROOT / "examples" / "email_agent")
    assert set(demo_recipe.signals) == set(SIGNALS)
    for name in SIGNALS:
        variant = demo_recipe.with_signal(name)
        assert name == "rewards" or variant.agent[-2:] == ("--signal", name)
    with pytest.raises(UsageError, match=r"has no \[signals.smiles\]; it has rewards, thumbs"):
        demo_recipe.with_signal("smiles")


async def _collect_feedback(model: Any, signal: str, tasks: int = 40) -> list[dict[str, Any]]:
    headrace = Headrace(model)
    await agent.Users(headrace.client(), options(tasks=tasks, signal=signal)).ask()
    return headrace.feedback


async def test_few_users_have_thumbs_and_nobody_says_what_was_right(box: Mailbox, tools: Mailtools) -> None:
    feedback = await _collect_feedback(Clerk(box, tools), "thumbs", 200)
    thumbs = [body for body in feedback if "value" in body]
    assert 8 <= len(thumbs) <= 36
    assert 0.5 < sum(body["value"] for body in thumbs) / len(thumbs) < 1
    assert all("context" not in body and body["ends_session"] for body in feedback)


async def test_poisoners_are_few_people_who_say_the_contrary(box: Mailbox, tools: Mailtools) -> None:
    headrace, draw = Headrace(Clerk(box, tools)), random.Random(0)
    task = next(stream(box, "train", 1))
    for _ in range(300):
        question = AnsweredQuestion(headrace.client(), "m", tools, task, Episode(task.expected, ["a"]), True, draw)
        await thumbs(question, share=1.0, poisoners=0.1)
    poisoner_feedback = [body for body in headrace.feedback if body["rater"].startswith("poisoner")]
    assert 15 <= len(poisoner_feedback) <= 50
    assert len({body["rater"] for body in poisoner_feedback}) == POISONERS
    assert not any(body["value"] for body in poisoner_feedback)


async def test_an_edit_is_the_right_step_in_place_of_the_first_wrong_one(box: Mailbox, tools: Mailtools) -> None:
    assert not [body for body in await _collect_feedback(Clerk(box, tools), "edits") if "edit" in body], (
        "nothing was wrong"
    )
    edits = [body for body in await _collect_feedback(clueless(), "edits", 6) if "edit" in body]
    assert len(edits) == 6
    assert all(body["edit"]["tool_calls"] and body["level"] == "response" for body in edits)


def test_a_wrong_end_is_corrected_at_the_end(box: Mailbox, tools: Mailtools) -> None:
    task = next(stream(box, "train", 1))
    right = demonstrate(task, tools, random.Random(0), lapses=0.0)
    episode = Episode(answer="unknown", response_ids=["a", "b", "c"], messages=right[:-1])
    assert _correction(episode, right) == ("c", right[-1])
    assert _correction(Episode(answer=task.expected, response_ids=["a", "b", "c"], messages=right[:-1]), right) is None


def test_a_direction_is_the_first_call_that_is_missing(box: Mailbox, tools: Mailtools) -> None:
    task = next(task for task in stream(box, "train", 1) if task.kind == "attachment")
    right = demonstrate(task, tools, random.Random(0), lapses=0.0)
    for message_count, next_call in ((2, 2), (4, 4), (6, 4)):
        text, rest = direction(task, tools, right[:message_count], random.Random(0))
        call = right[next_call]["tool_calls"][0]["function"]
        assert text == f"No, that is wrong. Call {call['name']} with {only_argument(call)}."
        assert rest == right[next_call:]


def only_argument(call: dict[str, str]) -> str:
    (argument,) = json.loads(call["arguments"]).values()
    return str(argument)


def test_half_of_what_the_other_base_is_shown_is_directed_to_the_right_end() -> None:
    warm_up_conversations = conversations(Schedule(steps=20), 0)
    directed_conversations = [
        messages for messages in warm_up_conversations if sum(message["role"] == "user" for message in messages) == 2
    ]
    assert 0.35 < len(directed_conversations) / len(warm_up_conversations) < 0.65
    assert all(messages[-1]["content"] != "unknown" for messages in directed_conversations)


async def test_a_correction_is_the_next_message() -> None:
    headrace = Headrace(clueless())
    await agent.Users(headrace.client(), options(tasks=3, signal="corrections")).ask()
    assert len(headrace.spoken) == 6, "each answer is followed by one more"
    assert all("value" not in body and len(body["msg_ids"]) == 2 for body in headrace.feedback)


def call(tools: Mailtools, name: str, argument: str) -> str:
    return tools.call(name, json.dumps({PARAMETER_OF[name]: argument}))


def test_there_are_seven_tools_and_each_says_what_it_takes() -> None:
    assert len(DEFINITIONS) == 7
    for definition in DEFINITIONS:
        function = definition["function"]
        assert function["parameters"]["required"] == [PARAMETER_OF[function["name"]]]
        assert callable(getattr(Mailtools, function["name"]))


def test_search_finds_each_thread_first_by_its_subject(box: Mailbox, tools: Mailtools) -> None:
    for thread in box.threads:
        lines = call(tools, "search_mail", thread.subject).splitlines()
        assert lines[0] == f"{thread.id} {thread.mails[0].sender.name}: {thread.subject}"
        assert len(lines) == HITS


def test_half_a_subject_finds_other_threads_too(box: Mailbox, tools: Mailtools) -> None:
    matter = box.threads[0].subject.split()[1]
    assert len({line.split()[-2] for line in call(tools, "search_mail", matter).splitlines()}) == HITS


@pytest.mark.parametrize("query", ["", " ", '"', "AND", "budget OR", "bud*", "NEAR(", "körper", "harbor'); DROP TABLE"])
def test_a_query_is_words_and_never_syntax(tools: Mailtools, query: str) -> None:
    assert not call(tools, "search_mail", query).startswith(ERROR)


def test_a_folder_shows_its_newest_threads(box: Mailbox, tools: Mailtools) -> None:
    folder_threads = [thread for thread in box.threads if thread.folder == "harbor"]
    newest = sorted(folder_threads, key=lambda thread: thread.mails[0].number, reverse=True)[:HITS]
    assert [line.split()[0] for line in call(tools, "list_folder", "harbor").splitlines()] == [t.id for t in newest]


def test_a_thread_can_be_read_listed_and_shows_its_attachment(box: Mailbox, tools: Mailtools) -> None:
    thread = box.threads[5]
    text = call(tools, "read_mail", thread.id)
    assert f"Subject: {thread.subject}" in text
    assert f"on {thread.day} in room {thread.room_number}." in text
    writers = [mail.sender.name for mail in reversed(thread.mails)]
    assert call(tools, "list_thread", thread.id).splitlines() == writers
    assert call(tools, "list_attachments", thread.id) == thread.attachment


def test_a_contact_is_found_by_name_and_counted_by_id(box: Mailbox, tools: Mailtools) -> None:
    contact = box.contacts[3]
    sent = sum(mail.sender == contact for thread in box.threads for mail in thread.mails)
    assert call(tools, "find_contact", contact.name) == f"{contact.id} {contact.name} extension {contact.extension}"
    assert call(tools, "count_mail", contact.id) == f"{sent} mails"


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("send_mail", "{}", "no tool send_mail"),
        ("_rows", '{"query": "DELETE FROM mails"}', "no tool _rows"),
        ("read_mail", '{"thread": "a1"', "arguments are not JSON"),
        ("read_mail", '["a1"]', "expected the argument thread"),
        ("read_mail", '{"id": "a1"}', "expected the argument thread"),
        ("read_mail", '{"thread": "a1", "folder": "harbor"}', "expected the argument thread"),
        ("read_mail", '{"thread": "zz"}', "no such thread"),
        ("list_thread", '{"thread": ""}', "no such thread"),
        ("list_attachments", '{"thread": null}', "no such thread"),
        ("list_folder", '{"folder": "nowhere"}', "no such folder"),
        ("find_contact", '{"name": "Nobody"}', "no such contact"),
        ("count_mail", '{"contact": "Anna Berg"}', "no such contact id"),
    ],
)
def test_a_wrong_call_is_answered_not_raised(tools: Mailtools, name: str, arguments: str, problem: str) -> None:
    assert tools.call(name, arguments) == f"{ERROR}{problem}"
