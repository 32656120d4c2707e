"""`deploy/headrace.toml` matches the settings of the services, and the services read it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headrace_operations.settings_reference import as_toml
from headrace_operations.supervisor.plan import installed
from headrace_operations.toml_text import toml
from headrace_runtime.main import Service
from headrace_runtime.settings.reference import SettingDoc, describe
from headrace_runtime.settings.sections import Common, complete, load

CONFIG = Path(__file__).parents[3] / "deploy" / "headrace.toml"
NEEDED = {
    "HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://127.0.0.1:8000/v1",
    "HEADRACE_JUDGE__ENDPOINT__MODEL": "judge",
    "HEADRACE_TRAINER__BASE": "models/base",
}
"""Settings that a service needs to start."""


def service(name: str) -> Service[Any]:
    definition: Service[Any] = import_module(f"{installed()[name].module}.__main__").SERVICE
    return definition


def described(model: type, prefix: str = "") -> list[SettingDoc]:
    return [SettingDoc.model_validate(doc.model_dump()) for doc in describe(model, prefix)]


def uncommented(text: str) -> str:
    """Return the file with every default uncommented; settings without a default stay comments."""
    return re.sub(r"^#(?=\w+ = (?!\.\.\.$))", "", text, flags=re.MULTILINE)


def test_the_common_settings_are_all_there() -> None:
    assert as_toml({"common": described(Common)}, only="common") in CONFIG.read_text(), (
        "regenerate: headrace config reference -o deploy/headrace.toml"
    )


@pytest.mark.parametrize("name", installed())
def test_a_services_settings_are_all_there(name: str) -> None:
    expected = as_toml({name: described(complete(service(name).settings), f"{name}.")}, only=name)
    assert expected in CONFIG.read_text(), "regenerate: headrace config reference -o deploy/headrace.toml"


@pytest.mark.parametrize("name", installed())
@pytest.mark.parametrize("change", [str, uncommented])
def test_the_file_has_the_defaults(name: str, change: Any, tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(change(CONFIG.read_text()))
    model = service(name).settings
    from_file, defaults = (
        [section.model_dump() for section in load(name, model, source, NEEDED)] for source in (path, None)
    )
    assert from_file == defaults


def test_uncommenting_uncomments() -> None:
    text = '[a]\n# Words = not a setting\n#x = 1\n#y = ...\n#z = {"k" = [1, "#"]}\n'
    assert uncommented(text) == '[a]\n# Words = not a setting\nx = 1\n#y = ...\nz = {"k" = [1, "#"]}\n'


def test_values_as_toml() -> None:
    import tomllib

    value = {"a b": [1, 2.5, True, 'q"\\ü\n'], "c": {"d": "e"}}
    assert tomllib.loads(f"v = {toml(value)}")["v"] == value
