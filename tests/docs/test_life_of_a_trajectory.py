"""`docs/life-of-a-trajectory.md` is true of the code. A turn that really takes this way: `test_running.py`."""

from __future__ import annotations

import pytest
import yaml

from headrace_schemas import EVENTS
from tests.docs.fences import ROOT
from tests.docs.trail import FOLLOWED
from tests.docs.walk import Step, definition, every_name, steps, used_by

TOPICS = ROOT / "schemas" / "src" / "headrace_schemas" / "topics"
OF_STEP = [pytest.param(step, id=f"{number}-{step.service}") for number, step in enumerate(steps(), 1)]


def test_what_is_named_exists() -> None:
    for name in every_name():
        assert name.path.exists(), f"no file {name.path.relative_to(ROOT)}"
        assert definition(name) is not None, f"no {name}"


@pytest.mark.parametrize("step", OF_STEP)
def test_the_order_of_the_story_is_that_of_the_code(step: Step) -> None:
    """Check that each name of a point is used by an earlier one."""
    assert step.points, "a step without a function"
    for names in step.points:
        before: set[str] = set()
        for name in names:
            called = name.qualified.split(".")[-2] if name.simple == "__call__" else name.simple
            assert not before or called in before, (
                f"nothing before {name} uses it: {[str(name_before) for name_before in names]}"
            )
            before |= used_by(name)


@pytest.mark.parametrize("step", OF_STEP)
def test_topics_have_the_producer_and_the_consumer_that_the_page_says(step: Step) -> None:
    for topic in step.reads | step.writes:
        described = yaml.safe_load((TOPICS / f"{topic}.yaml").read_text(encoding="utf-8"))
        if topic in step.reads:
            assert step.service in described["consumers"], f"{step.service} does not read {topic}"
        elif topic != "dead-letters":  # everybody's
            assert step.service == described["producer"], f"{step.service} does not write {topic}"


def test_the_trail_goes_through_every_topic_that_the_page_writes() -> None:
    written = {topic for step in steps() for topic in step.writes}
    assert written == {*FOLLOWED, "session-ends", "dead-letters"}
    assert written <= EVENTS.keys()
