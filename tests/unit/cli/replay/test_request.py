"""Requests of a replay: refusals before any work, each with a remedy, and the settings of its programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError, UsageError
from headrace.topics import Range
from headrace_operations.replay.program import failure_reason, start_program
from headrace_operations.replay.report import Report
from headrace_operations.replay.request import Request, make
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.services import ServiceInfo
from headrace_schemas.programs.replay import DryRunBatch, DryRunLine


def request(lineage: str = "again", topic: str = "experiences", **options: Any) -> Request:
    settings = {"trainer.base": "base", "trainer.lineage": "live", **options.pop("settings", {})}
    topic_range = options.pop("topic_range", Range(topic))
    return make(lineage, topic_range, Overrides(None, settings, {}), "bus:9092", **options)


def test_the_programs_get_the_lineage_and_topic_of_the_replay() -> None:
    replay_request = request(settings={"trainer.model": "m"})
    assert (replay_request.of, replay_request.model, replay_request.topic) == ("live", "m", "replay-again-experiences")
    environ = replay_request.environ(lineage="again", until_end=True)
    assert environ["HEADRACE_TRAINER__LINEAGE"] == '"again"'
    assert environ["HEADRACE_TRAINER__UNTIL_END"] == "true"
    assert environ["HEADRACE_TRAINER__BASE"] == '"base"'
    assert environ["HEADRACE_BUS__ADDRESS"] == '"bus:9092"'
    assert int(environ["HEADRACE_SCORER__FUNCTION_WORKERS"]) >= 2


def test_a_replay_is_complete_only_with_every_record() -> None:
    assert request(topic_range=Range("experiences", keys=frozenset())).is_complete
    assert not request(topic_range=Range("experiences", from_offset=0, to_offset=9)).is_complete
    assert not request(topic_range=Range("experiences", partitions=(1,))).is_complete
    assert not request(versions=frozenset({"m@0123456789ab"})).is_complete


@pytest.mark.parametrize(
    ("lineage", "options", "message"),
    [
        ("live", {}, "'live': is the live lineage; choose another name"),
        ("old", {"of": "old"}, "choose another name for the replay"),
        ("a/b", {}, "must have 1 to 100 letters, digits"),
        ("again", {"settings": {"trainer.base": ""}}, r"trainer.base is not set: .*--config FILE"),
        ("again", {"judge": True}, "judge.endpoint.base_url is not set"),
    ],
)
def test_refusals_name_the_remedy(lineage: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request(lineage, **options)


def test_the_last_error_line_of_a_program_is_the_failure_reason() -> None:
    assert (
        failure_reason(["noise", "headrace scorer: scorer.functions = 3: no", ""], "scorer")
        == "scorer: scorer.functions = 3: no"
    )
    line = json.dumps({"event": "refused_to_start", "error": "trainer.base: is not a folder"})
    assert failure_reason(["{", line], "trainer") == "trainer: trainer.base: is not a folder"
    assert failure_reason([], "trainer") == ""


async def test_the_error_of_a_failed_program_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").touch()
    (tmp_path / "broken" / "replay.py").write_text("import sys; sys.exit('headrace scorer: the remedy')")
    monkeypatch.setattr(
        "headrace_operations.replay.program.installed",
        lambda: {"scorer": ServiceInfo(module="broken", summary="Fails.")},
    )
    async with start_program(
        "scorer", {"PYTHONPATH": str(tmp_path), "PATH": str(Path(sys.executable).parent)}
    ) as program:
        with pytest.raises(HeadraceError, match="scorer: the remedy"):
            await anext(program.lines())


async def test_a_missing_service_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_operations.replay.program.installed", dict)
    with pytest.raises(UsageError, match=r"the judge service is not installed.*pip install headrace-judge"):
        async with start_program("judge", {}):
            pytest.fail("there is nothing to start")


@pytest.mark.parametrize(
    ("original", "replayed", "equal", "same"),
    [
        ("abc", "abc", 3, True),
        ("abc", "ab", 2, False),
        ("abc", "axc", 1, False),
        ("", "a", 0, False),
        ("ab", "abc", 2, False),
    ],
)
def test_batches_are_compared_in_order(original: str, replayed: str, equal: int, same: bool) -> None:
    report = Report("again", "main", "experiences")
    batches = tuple(DryRunBatch(experiences=1, digest=digit * 64) for digit in replayed.replace("x", "e"))
    report.training = DryRunLine(batches=batches)
    report.compare([digit * 64 for digit in original])
    assert (report.batches_equal, report.same) == (equal, same)
