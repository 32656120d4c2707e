"""Kinds of advantages: ours by their names, and one of a package that nobody here wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.settings import load
from headrace_trainer.baselines import Baselines, Decay
from headrace_trainer.estimators import Rewarded, named
from headrace_trainer.settings import AdvantageSettings, TrainerSettings

DECAY = Decay(task=0.9, model=0.99, tasks_max=100)
BATCH = Rewarded([1.0, 0.0, 3.0], [1.0, 1.0, 1.0], ["a", "b", "c"], ["t", "t", None])
PLAIN = """
from headrace_trainer.advantages import Advantages
from headrace_trainer.estimators import estimator

@estimator(grouped=False)
def plain(batch, past, decay, settings):
    rewards_B = batch.rewards_B
    return Advantages.of(rewards_B, [0.5] * len(rewards_B), [1.0] * len(rewards_B)), past

not_one = 3
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package `foreign` with a kind `plain` and one that is broken."""
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n", encoding="utf-8")
    entries = "[headrace.advantages]\nplain = foreign:plain\nbroken = foreign:not_one\n"
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    (tmp_path / "foreign.py").write_text(PLAIN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("foreign")
def test_a_package_adds_a_kind_without_a_change_here(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[trainer]\nbase = "x"\nadvantage.kind = "plain"\n', encoding="utf-8")
    settings = load("trainer", TrainerSettings, path, {})[1]
    assert not settings.grouped
    found, past = settings.advantage.estimator.compute(BATCH, Baselines(), DECAY, settings.advantage)
    assert found.values_B == [0.5, -0.5, 2.5]
    assert past == Baselines()


@pytest.mark.usefixtures("foreign")
def test_what_is_no_estimator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="foreign:not_one is no estimator"):
        named("broken")


def test_an_unknown_kind_stops_the_start_and_lists_the_known(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[trainer]\nbase = "x"\nadvantage.kind = "grop"\n', encoding="utf-8")
    with pytest.raises(SettingError, match=r"did you mean 'grpo'\? there are grpo, reinforce\+\+, rloo"):
        load("trainer", TrainerSettings, path, {})


@pytest.mark.parametrize(("kind", "grouped"), [("reinforce++", False), ("grpo", True), ("rloo", True)])
def test_ours_say_what_they_need(kind: str, *, grouped: bool) -> None:
    assert named(kind).grouped is grouped


def test_a_run_without_a_task_is_a_group_of_its_own() -> None:
    assert BATCH.groups() == ["t", "t", "c"]
    with pytest.raises(ValueError, match="has one run"):
        named("rloo").compute(BATCH, Baselines(), DECAY, AdvantageSettings(kind="rloo"))
