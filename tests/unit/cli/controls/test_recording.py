"""Which experiences a recording gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace_operations.controls.recording import from_file, select_trainable
from tests.unit.cli.controls.made import experience


def test_the_last_word_counts_at_its_first_place() -> None:
    first, second = experience(0, 0.1), experience(1, 0.2)
    later = first.model_copy(update={"revision": 2, "reward": 0.9})
    earlier = first.model_copy(update={"revision": 1, "reward": 0.5})
    found = select_trainable([first, second, later, earlier], "m", 10)
    assert [(one.experience_id, one.reward) for one in found] == [("e0", 0.9), ("e1", 0.2)]


def test_what_was_withdrawn_is_out_and_what_came_back_without_tokens_has_them() -> None:
    given = experience(0, 0.1)
    gone = given.model_copy(update={"revision": 1, "reward": None, "no_reward": "withdrawn", "branch": None})
    assert select_trainable([given, gone], "m", 10) == []
    back = given.model_copy(update={"revision": 2, "branch": None, "reward": 0.7})
    (found,) = select_trainable([given, gone, back], "m", 10)
    assert (found.reward, found.branch) == (0.7, given.branch)


def test_other_models_are_out_and_the_latest_stay() -> None:
    given = [experience(number, 0.1) for number in range(4)]
    assert select_trainable(given, "other", 10) == []
    assert [one.experience_id for one in select_trainable(given, "m", 2)] == ["e2", "e3"]


def test_lines_of_replay_events_and_bare_ones(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    text = experience(0, 0.5).to_json().decode()
    path.write_text(f'{{"topic": "experiences", "event": {text}}}\n\n{text}\n{{"problem": "no event"}}\n')
    assert [one.experience_id for one in from_file(path)] == ["e0", "e0"]


@pytest.mark.parametrize("line", ["no json", '{"event": {"experience_id": 1}}', "[]"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"lines\.jsonl, line 1: is not an experience of `headrace replay events"):
        from_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write a file with `headrace replay events experiences -o FILE`"):
        from_file(tmp_path / "none.jsonl")
