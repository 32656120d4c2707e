"""Adapter folders that vLLM would load only in part are refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headrace_inference.errors import VersionUnusable
from headrace_inference.vllm_engine.adapters import CONFIG, check
from tests.unit.inference.conftest import Models


def changed(models: Models, folder: Path, **changes: object) -> Path:
    shutil.copytree(models.adapter.folder, folder, dirs_exist_ok=True)
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_a_plain_adapter_is_taken(models: Models) -> None:
    check(models.adapter.folder, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": 5}, "the adapter has rank 5, inference.vllm.adapter_rank_max allows 4"),
        ({"peft_type": "IA3"}, "adapters of type IA3"),
        ({"use_dora": True}, "sets use_dora = true, which vLLM does not support"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "the adapter has rank 8"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": None, "rank_pattern": {"q_proj": 2}}, "cannot be read: TypeError"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_what_vllm_would_leave_out_is_refused(
    models: Models, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(VersionUnusable, match=reason):
        check(changed(models, tmp_path / "changed", **changes), 4)


@pytest.mark.parametrize("name", [CONFIG, "adapter_model.safetensors"])
def test_a_missing_file_is_named(models: Models, tmp_path: Path, name: str) -> None:
    folder = changed(models, tmp_path / "changed")
    (folder / name).unlink()
    with pytest.raises(VersionUnusable, match=name):
        check(folder, 4)


def test_a_configuration_that_is_no_json_is_named(models: Models, tmp_path: Path) -> None:
    folder = changed(models, tmp_path / "changed")
    (folder / CONFIG).write_text("{")
    with pytest.raises(VersionUnusable, match=f"{CONFIG} cannot be read: JSONDecodeError"):
        check(folder, 4)
