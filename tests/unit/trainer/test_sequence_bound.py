"""The free memory bounds the length of a sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from headrace_runtime.errors import SettingError
from headrace_trainer.experiences import admission
from headrace_trainer.settings import ComputeSettings, TrainerSettings
from headrace_trainer.torch_learner.model import devices, sequence_bound
from tests.support import tiny_model
from tests.unit.trainer.test_forward import open_policy, rows

GB = 1_000_000_000


def test_what_a_token_costs_does_not_depend_on_the_sequence(base: Path) -> None:
    """The memory of a pass is linear in the length, so a sequence of 48 tokens predicts a long one."""
    policy = open_policy(base)
    short, _, _, long = (sequence_bound.token_bytes(policy, row, recomputed=False) for row in rows())
    assert 0.9 < long / short < 1.1
    assert long > 0


def test_recomputed_layers_keep_less(tmp_path: Path) -> None:
    tiny_model.build(tmp_path, layers=8)
    policy, row = open_policy(tmp_path, gradient_checkpointing=True), rows()[3]
    assert (
        sequence_bound.token_bytes(policy, row, recomputed=True)
        < sequence_bound.token_bytes(policy, row, recomputed=False) / 1.5
    )
    assert policy.model.training, "it is put back"


def test_tokens_are_what_is_left_of_the_memory() -> None:
    chunks = 4 * (64 << 20)
    assert sequence_bound.tokens(10 * GB, 0, 1000.0) == pytest.approx((8 * GB - chunks) / 1000, abs=1)
    assert sequence_bound.tokens(10 * GB, 100_000_000, 1000.0) == pytest.approx((6.4 * GB - chunks) / 1000, abs=1)
    assert sequence_bound.tokens(1 * GB, 100_000_000, 1000.0) == 0


def test_the_bound_is_the_smallest_of_context_memory_and_queue(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_bound, "free_bytes", lambda _: GB)
    plenty = open_policy(base).sequence_bound()
    monkeypatch.setattr(sequence_bound, "free_bytes", lambda _: GB // 2)
    assert 0 < open_policy(base).sequence_bound() < plenty
    settings = TrainerSettings(base="x", memory={"queue_tokens": 5000})
    assert admission.limits_of(settings, 320, 9000).sequence_tokens == 5000
    assert admission.limits_of(settings, 320, 300).sequence_tokens == 300
    named = TrainerSettings(base="x", memory={"sequence_tokens": 40})
    assert admission.limits_of(named, 320, 300).sequence_tokens == 40


def test_no_room_at_all_is_a_setting_error(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_bound, "free_bytes", lambda _: 1000)
    with pytest.raises(SettingError, match=r"sequence_tokens = 'none': 0\.0 GB have room for 0 tokens"):
        open_policy(base).sequence_bound()


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(sequence_bound, "_LIMITS", (limit,))
    monkeypatch.setattr(sequence_bound, "_USED", (used,))
    cpu = torch.device("cpu")
    machine = sequence_bound.free_bytes(cpu)
    limit.write_text("3000000\n")
    used.write_text("1000000\n")
    assert sequence_bound.free_bytes(cpu) == 2_000_000
    limit.write_text("max\n")
    assert machine is None or (sequence_bound.free_bytes(cpu) or 0) > 2_000_000


@pytest.mark.parametrize("able", [True, False])
def test_auto_is_what_the_device_multiplies(base: Path, monkeypatch: pytest.MonkeyPatch, able: bool) -> None:
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda _: able)
    cpu = torch.device("cpu")
    assert devices.resolve_types(ComputeSettings(dtype="auto"), cpu).dtype == ("bfloat16" if able else "float32")
    with capture_logs() as logs:
        assert devices.resolve_types(ComputeSettings(dtype="bfloat16"), cpu).dtype == "bfloat16"
    assert [line["event"] for line in logs] == ([] if able else ["bfloat16_is_slow"])
    exact, automatic = open_policy(base), open_policy(base, dtype="auto")
    pair = [each.logprobs(each.collate(rows()))[0] for each in (exact, automatic)]
    assert torch.equal(*pair) != able
