"""Errors of a database that another try may mend, and errors that are permanent."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError

from headrace_runtime.errors import Unavailable
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database


class Refusal(Exception):
    """A driver's error with PostgreSQL's code."""

    def __init__(self, sqlstate: str | None) -> None:
        super().__init__("said the server")
        self.sqlstate = sqlstate


async def raised_by(folder: Path, error: Exception) -> Exception:
    database = Database.open("test", Common(data_dir=folder))
    try:
        async with database.transaction():
            raise error
    except Exception as seen:  # noqa: BLE001 - it is what the test is about
        return seen
    finally:
        await database.close()


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "57P01", "57P02", "57P03"])
async def test_a_transaction_that_lost_a_race_or_its_server_is_tried_again(tmp_path: Path, sqlstate: str) -> None:
    """Serialization failure, deadlock, and a server that shuts down, crashed or starts."""
    assert isinstance(await raised_by(tmp_path, DBAPIError("", {}, Refusal(sqlstate))), Unavailable)


@pytest.mark.parametrize("sqlstate", ["23505", "22P05", "42601", None])
async def test_what_is_wrong_with_the_statement_is_not(tmp_path: Path, sqlstate: str | None) -> None:
    error = DBAPIError("", {}, Refusal(sqlstate))
    assert await raised_by(tmp_path, error) is error


async def test_a_lost_connection_is_tried_again(tmp_path: Path) -> None:
    lost_connection = DBAPIError("", {}, Refusal(None), connection_invalidated=True)
    for error in (lost_connection, OperationalError("", {}, Refusal(None)), ConnectionResetError(), TimeoutError()):
        assert isinstance(await raised_by(tmp_path, error), Unavailable)
