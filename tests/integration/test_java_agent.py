"""`make example-java` as a test: every line of the example on AgentScope Java holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.java_agent.__main__ import lines
from tests.support import presence


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_line_of_the_java_example_holds(tmp_path: Path) -> None:
    presence.need("agentscope-java")
    found = list(lines(tmp_path))
    assert len(found) == 11
    assert [line for line in found if not line.holds] == []
