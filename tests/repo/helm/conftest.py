"""Fixture that requires helm for all tests in this folder."""

from __future__ import annotations

import pytest

from tests.support import presence


@pytest.fixture(autouse=True, scope="session")
def _helm() -> None:
    presence.need("helm")
