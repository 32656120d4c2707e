"""The settings of the back end `ray` can be read without ray."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import complete
from headrace_trainer.backends import BACKENDS
from headrace_trainer.ray_learner import network
from headrace_trainer.ray_learner.settings import RaySettings
from headrace_trainer.settings import TrainerSettings


def settings(**more: Any) -> TrainerSettings:
    return complete(TrainerSettings).model_validate({"base": "folder", "backend": "ray", **more})


def test_its_section_is_part_of_the_trainers() -> None:
    chosen = settings(ray={"ranks": 3, "shard": "full"}).of("ray")
    assert isinstance(chosen, RaySettings)
    assert (chosen.ranks, chosen.shard, chosen.address) == (3, "full", "")
    assert isinstance(settings().of("ray"), RaySettings)


def test_a_client_of_a_cluster_is_no_machine_of_it() -> None:
    with pytest.raises(SettingError, match=r"trainer\.ray\.address"):
        settings(ray={"address": "ray://head:10001"})


def test_without_ray_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"headrace-trainer\[ray\]"):
        BACKENDS.get("ray").open(Path("folder"), settings())


def test_reading_settings_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from headrace_runtime.settings.sections import complete;"
        "from headrace_trainer.settings import TrainerSettings;"
        "complete(TrainerSettings).model_validate({'base': 'x', 'backend': 'ray', 'ray': {'ranks': 4}});"
        "print(sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert process.stdout.strip() == "[]", process.stderr


def test_a_setting_error_crosses_processes_with_its_name_and_its_sentence() -> None:
    error = SettingError("trainer.ray.ranks", 3, "too many")
    restored = pickle.loads(pickle.dumps(error))
    assert isinstance(restored, SettingError)
    assert (str(restored), restored.name) == (str(error), "trainer.ray.ranks")


def test_the_network_of_an_address_is_found() -> None:
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("203.0.113.7") is None
    assert network.interface_of("::1") is None
