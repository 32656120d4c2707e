"""Stacks: settings that are compared with a running Headrace, and its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.stack import Addresses, Stack, attach, current, stack_for
from headrace_integrations.stack.connection import flat, support
from headrace_operations.arguments import model_name
from tests.unit.integrations.adapter_rig import RecordingGatewayStack

TRAINER_SETTINGS = {
    "trainer.base": "/models/Qwen3-0.6B",
    "trainer.model": "Qwen3-0.6B",
    "trainer.group_size": 8,
    "trainer.lora.rank": 0,
    "trainer.lora.targets": ["q_proj"],
}


def stack() -> RecordingGatewayStack:
    return RecordingGatewayStack(settings=TRAINER_SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.group_size": 4}, r"trainer.group_size = 4: the running trainer has 8"),
        ({"trainer.groups": 4}, r"trainer.groups = 4: no such setting"),
        ({"gateway.port": 1}, r"only settings of the trainer can be compared"),
    ],
)
def test_a_setting_that_differs_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stack().check(None, None, settings)


def test_check_accepts_the_settings_of_the_trainer() -> None:
    stack().check("/models/Qwen3-0.6B", "Qwen3-0.6B", {"trainer.group_size": 8, "trainer.lora.targets": ("q_proj",)})
    stack().check("Qwen/Qwen3-0.6B", None, {})  # named as the model is
    for base, model in (("/models/other", None), (None, "other")):
        with pytest.raises(UsageError, match=r"trainer\.(base|model)"):
            stack().check(base, model, {})


def test_the_entered_stack_is_used_and_checked() -> None:
    with pytest.raises(UsageError, match=r"no Headrace is attached"):
        current()
    with stack() as entered:
        assert current() is entered
        with stack_for(None, {"trainer.group_size": 8}) as used:
            assert used is entered
        with pytest.raises(UsageError, match=r"trainer\.group_size"), stack_for(None, {"trainer.group_size": 2}):
            pass
        with stack() as inner:
            assert current() is inner
        assert current() is entered
    with pytest.raises(UsageError):
        current()


def test_private_stack_needs_a_model_folder(tmp_path: Path) -> None:
    for base in (None, "Qwen/Qwen3-0.6B", tmp_path):
        with pytest.raises(UsageError, match=r"must be a model folder"):
            attach(base=base)
    with pytest.raises(UsageError, match="leave data_dir or url out"):
        attach("http://127.0.0.1:1", data_dir=tmp_path)


def test_names_of_models_have_no_slash() -> None:
    assert model_name("Qwen/Qwen3-0.6B") == model_name("/models/Qwen3-0.6B/") == "Qwen3-0.6B"
    assert model_name("a b") == "a-b"
    assert model_name("...") == "model"


def test_tables_are_flat_by_dotted_names() -> None:
    assert flat({"a": 1, "b": {"c": 2}}, "t.") == {"t.a": 1, "t.b": {"c": 2}, "t.b.c": 2}


def test_missing_package_is_named() -> None:
    with pytest.raises(UsageError, match="pip install headrace-nothing"):
        support("nothing_at_all", "headrace-nothing")


def test_a_decision_counts_when_clients_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry:
        """Registry with fixed versions."""

        champion: str | None = "m@1"
        state, paused, pinned = "promoted", False, None

        def model(self, _name: str) -> Any:
            return self

        def versions(self, _name: str, limit: int) -> list[Any]:
            self.id = "m@2"
            return [self]

    used = Stack(Addresses("http://gateway"), "m")
    registry = Registry()
    used.__dict__["registry"] = registry
    serving = ["m@1"]
    monkeypatch.setattr(Stack, "serving", lambda _self, _name=None: serving[0])
    assert used.decision("m@unknown") is None
    registry.champion = "m@2"
    assert used.decision("m@2") is None, "promoted, and the gateway does not know it yet"
    serving[0] = "m@2"
    assert used.decision("m@2") == "promoted"
    registry.state = "rejected"
    assert used.decision("m@2") == "rejected"
    registry.state = "registered"
    assert used.decision("m@2") is None
    registry.paused = True
    assert used.decision("m@2") == "waits"
