from __future__ import annotations

import json

import pytest

from email_agent.mailbox import Mailbox
from email_agent.tools import DEFINITIONS, HITS, PARAMETER_OF, Mailtools
from example_parts.tools import ERROR


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
    own = [thread for thread in box.threads if thread.folder == "harbor"]
    newest = sorted(own, key=lambda thread: thread.mails[0].number, reverse=True)[:HITS]
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
