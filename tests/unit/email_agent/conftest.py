"""Fixtures for the e-mail agent: a mailbox and its tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from email_agent import mailbox
from email_agent.mailbox import Mailtools


@pytest.fixture(scope="session")
def box() -> mailbox.Mailbox:
    return mailbox.generate(1)


@pytest.fixture(scope="session")
def tools(box: mailbox.Mailbox) -> Iterator[Mailtools]:
    database = box.open()
    yield Mailtools(database)
    database.close()
