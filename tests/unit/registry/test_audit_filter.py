"""The audit filter: its output and its refusals."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

import pytest

from headrace_registry.gate import evaluation
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_schemas.programs.replay import Measure, Measured

PROGRAM = """
import json, sys
print(json.dumps({"gate": ["g"], "audit": ["a", "b", "c"]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(asked | {"score": asked["seed"] / 10}), flush=True)
"""
VERSION = "m@000000000000"


async def test_audit_filter_reports_the_task_of_each_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = b"measure %s\n" % Measure(version=VERSION, plays=5).model_dump_json().encode()
    output = BytesIO()
    monkeypatch.setattr(evaluation, "Lines", lambda: Lines(BytesIO(request), output))
    settings = RegistrySettings.model_validate({"gate": {"command": [sys.executable, "-c", PROGRAM]}})
    await evaluation.play_audits(Common(data_dir=tmp_path), settings)
    word, _, value = output.getvalue().partition(b" ")
    assert word == b"measured"
    scores = (("a", 0.0), ("b", 0.1), ("c", 0.2), ("a", 0.3), ("b", 0.4))
    assert Measured.model_validate_json(value) == Measured(version=VERSION, scores=scores)


async def test_audit_filter_requires_a_gate_program(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no program plays held-out tasks"):
        await evaluation.play_audits(Common(data_dir=tmp_path), RegistrySettings())
