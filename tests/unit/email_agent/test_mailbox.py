from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from email_agent import mailbox, words

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
    assert len({thread.subject for thread in box.threads}) == len(words.PROJECTS) * len(words.MATTERS)
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
    said = [(mail.number, thread.id, mail.sender.name, mail.subject) for thread in box.threads for mail in thread.mails]
    assert rows == sorted(said)
