"""P11: settings that cannot work stop the start, with the one to change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import load
from headrace_trainer.settings import TrainerSettings


def read(tmp_path: Path, text: str) -> TrainerSettings:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return load("trainer", TrainerSettings, path, {})[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", r"trainer\.base = '': name a folder, or a model of the hub"),
        ("group_size = 1\nadvantage.kind = 'grpo'", r"trainer\.group_size = 1: grpo compares runs .* rolling baseline"),
        ("group_size = 1\nadvantage.kind = 'rloo'", r"trainer\.group_size = 1: rloo compares runs"),
        ("batch_experiences = 4\nbatch_experiences_min = 5", r"batch_experiences_min = 5: is more than"),
        ("memory.queue_experiences = 10", r"queue_experiences = 10: a batch needs 64"),
        (
            "memory.queue_tokens = 10\nmemory.sequence_tokens = 11",
            r"queue_tokens = 10: is less than memory\.sequence_tokens",
        ),
        ("advantage.kind = 'gae'", r"trainer\.advantage\.kind = 'gae'"),
        ("loss.clip_hgih = 0.3", r"trainer\.loss\.clip_hgih = 0\.3: unknown; did you mean 'clip_high'\?"),
        ("max_stalenes = 3", r"trainer\.max_stalenes = 3: unknown; did you mean 'max_staleness'\?"),
        ("steps_per_version = 0", r"trainer\.steps_per_version = 0"),
        ("optimizer.kind = 'sgd'", r"trainer\.optimizer\.kind = 'sgd'"),
        ("lineage = '../x'", r"trainer\.lineage = '\.\./x'"),
        ("loss.weight_max = 0.5", r"trainer\.loss\.weight_max = 0\.5"),
    ],
)
def test_a_setting_that_cannot_work_is_named(tmp_path: Path, lines: str, message: str) -> None:
    base = "base = 'somewhere'\n" if lines else ""
    with pytest.raises(SettingError, match=message):
        read(tmp_path, f"[trainer]\n{base}{lines}")


def test_grpo_with_groups_is_fine(tmp_path: Path) -> None:
    assert read(tmp_path, "[trainer]\nbase = 'x'\ngroup_size = 2\nadvantage.kind = 'grpo'").grouped
    assert not read(tmp_path, "[trainer]\nbase = 'x'\ngroup_size = 1").grouped


def started(**environ: Any) -> subprocess.CompletedProcess[str]:
    settings = {f"HEADRACE_{name}": str(value) for name, value in environ.items()}
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "headrace_trainer"],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        timeout=30,
        check=False,
    )


def test_singletons_are_refused_before_torch_is_imported() -> None:
    result = started(TRAINER__BASE="x", TRAINER__GROUP_SIZE=1, TRAINER__ADVANTAGE__KIND="grpo")
    assert result.returncode == 2
    assert "setting trainer.group_size = 1: grpo compares runs of one task" in result.stderr
    assert "| torch" not in result.stderr
