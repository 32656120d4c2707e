"""Each tutorial is walked from its top to its end: its files, its commands in their order, its services started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.fences import ROOT, tutorials
from tests.docs.walking import Walk, copy_of_repository
from tests.support import tiny_model

TUTORIALS = ROOT / "docs" / "tutorials"
OWN_MODEL = TUTORIALS / "own-model.md"
EVENT_FIELD = TUTORIALS / "add-an-event-field.md"
STEP_S = 600.0
RISE_MIN = 0.2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in tutorials() if page != OWN_MODEL], ids=lambda page: page.stem)
def test_what_the_page_says_works(page: Path, tmp_path: Path) -> None:
    if page == EVENT_FIELD:
        copy_of_repository(ROOT, tmp_path, ("pyproject.toml", "schemas", "tests/__init__.py", "tests/unit/schemas"))
    elif "models/base" in page.read_text(encoding="utf-8"):
        tiny_model.build(tmp_path / "models" / "base")
    with Walk(page, tmp_path) as walk:
        for fence in walk.steps():
            walk.walk(fence, STEP_S)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_held_out_success_rises_with_nothing_but_the_page(tmp_path: Path) -> None:
    """A new user's model, agent, reward and gate, and the defaults."""
    with Walk(OWN_MODEL, tmp_path) as walk:
        output = "".join(walk.walk(fence, 1500) for fence in walk.steps())
    before, after = (float(number) for number in re.findall(r"^([01]\.\d{3})$", output, re.MULTILINE))
    assert after - before >= RISE_MIN, output
