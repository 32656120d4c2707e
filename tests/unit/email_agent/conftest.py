"""Examples are not installed: their folder is made importable, as `python -m` in it would."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from email_agent import mailbox  # noqa: E402
from email_agent.tools import Mailtools  # noqa: E402


@pytest.fixture(scope="session")
def box() -> mailbox.Mailbox:
    return mailbox.generate(1)


@pytest.fixture(scope="session")
def tools(box: mailbox.Mailbox) -> Iterator[Mailtools]:
    database = box.open()
    yield Mailtools(database)
    database.close()
