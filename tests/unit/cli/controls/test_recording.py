"""Selection of experiences from a recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace_operations.controls.recording import from_file, select_trainable
from tests.unit.cli.controls.made import experience


def test_the_newest_revision_counts_in_the_order_of_first_revisions() -> None:
    first, second = experience(0, 0.1), experience(1, 0.2)
    later = first.model_copy(update={"revision": 2, "reward": 0.9})
    earlier = first.model_copy(update={"revision": 1, "reward": 0.5})
    experiences = select_trainable([first, second, later, earlier], "m", 10)
    assert [(selected.experience_id, selected.reward) for selected in experiences] == [("e0", 0.9), ("e1", 0.2)]


def test_withdrawn_experiences_are_left_out_and_restored_ones_have_their_tokens() -> None:
    original = experience(0, 0.1)
    withdrawn = original.model_copy(update={"revision": 1, "reward": None, "no_reward": "withdrawn", "branch": None})
    assert select_trainable([original, withdrawn], "m", 10) == []
    restored = original.model_copy(update={"revision": 2, "branch": None, "reward": 0.7})
    (selected,) = select_trainable([original, withdrawn, restored], "m", 10)
    assert (selected.reward, selected.branch) == (0.7, original.branch)


def test_only_the_newest_experiences_of_the_model_are_selected() -> None:
    experiences = [experience(number, 0.1) for number in range(4)]
    assert select_trainable(experiences, "other", 10) == []
    assert [selected.experience_id for selected in select_trainable(experiences, "m", 2)] == ["e2", "e3"]


def test_lines_of_replay_events_and_bare_events_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    text = experience(0, 0.5).to_json().decode()
    path.write_text(f'{{"topic": "experiences", "event": {text}}}\n\n{text}\n{{"problem": "no event"}}\n')
    assert [selected.experience_id for selected in from_file(path)] == ["e0", "e0"]


@pytest.mark.parametrize("line", ["no json", '{"event": {"experience_id": 1}}', "[]"])
def test_an_invalid_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"lines\.jsonl, line 1: is not an experience of `headrace replay events"):
        from_file(path)


def test_a_missing_file_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write a file with `headrace replay events experiences -o FILE`"):
        from_file(tmp_path / "none.jsonl")
