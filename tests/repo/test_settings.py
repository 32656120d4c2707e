"""Tests that test harnesses use existing setting names, and that settings have tiers.

Some harnesses run only once for each release. Pages show the few settings that users set with the descriptions of the
services.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest

from headrace_operations.settings_reference import Described, as_json_schema, as_toml, describe_settings
from headrace_operations.supervisor.plan import installed
from headrace_runtime.settings.reference import describe
from headrace_runtime.settings.sections import Common, complete
from tests.repo.compose_files import ROOT
from tests.support import tiny_model

FOLDERS = ("tests/attack", "tests/chaos", "tests/compose", "tests/support", "benchmarks", "examples", "deploy", "docs")
"""Tests that each `make test` runs notice it themselves, and some name a wrong setting on purpose."""
ENDINGS = (".py", ".yml", ".yaml", ".md", ".toml")
ALONE = ("docker-compose.yml", "Makefile", "README.md")
NAME = re.compile(r"\b(?:HEADRACE_)?([A-Z]+(?:__[A-Z0-9]+(?:_[A-Z0-9]+)*)+)\b")
"""As the environment has it: two underscores between a section and a setting."""


def setting_names() -> set[str]:
    models = {"": Common}
    for name, info in installed().items():
        models[f"{name}."] = complete(import_module(f"{info.module}.__main__").SERVICE.settings)
    return {doc.name.upper().replace(".", "__") for prefix, model in models.items() for doc in describe(model, prefix)}


def test_harnesses_examples_and_docs_name_settings_that_there_are() -> None:
    files = [ROOT / name for name in ALONE]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    settings = setting_names()
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in NAME.findall(path.read_text())
        if name not in settings
    }
    assert not unknown, sorted(unknown)


def test_a_renamed_setting_is_noticed() -> None:
    assert [name for name in NAME.findall('service("scorer", SCORER__SETTLE_S=1)') if name not in setting_names()] == [
        "SCORER__SETTLE_S"
    ]


COMMON_MAX = 40
HEADRACE = str(Path(sys.executable).with_name("headrace"))


@pytest.fixture(scope="module")
def described() -> Described:
    return describe_settings(installed())


def test_few_settings_are_common(described: Described) -> None:
    tiers = [setting.tier for settings in described.values() for setting in settings]
    assert set(tiers) == {"common", "tuning", "limits"}
    assert tiers.count("common") <= COMMON_MAX


def test_the_page_names_the_common_ones(described: Described) -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    rows: dict[str, list[str]] = {}
    for setting in (setting for settings in described.values() for setting in settings):
        if setting.tier == "common" and not setting.shared:
            section, _, name = setting.name.rpartition(".")
            rows.setdefault(f"`[{section}]`" if section else "at the top", []).append(f"`{name}`")
    table = "\n".join(f"| {section} | {', '.join(names)} |" for section, names in rows.items())
    assert table in page, table


def test_a_section_stands_once_in_the_reference(described: Described) -> None:
    """Tiers only order settings inside a table, because TOML does not permit a table twice."""
    tables = re.findall(r"^\[[\w.]+\]$", as_toml(described), re.MULTILINE)
    assert len(set(tables)) == len(tables)


def test_init_writes_what_users_set_and_overwrites_nothing(tmp_path: Path) -> None:
    command = [HEADRACE, "config", "init", "mine.toml", "--base", "models/mine", "--model", "helper"]
    for status in (0, 2):
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert process.returncode == status, process.stderr
    assert "mine.toml: exists already" in process.stderr
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert 'base = "models/mine"' in text.splitlines()
    assert 'model = "helper"' in text.splitlines()
    assert "#learning_rate = ..." in text
    assert "spool_bytes_max" not in text


def test_init_sets_what_follows_from_the_size_of_the_base(tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base")
    command = [HEADRACE, "config", "init", "mine.toml", "--base", str(base)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stderr
    settings = tomllib.loads((tmp_path / "mine.toml").read_text(encoding="utf-8"))["trainer"]
    assert settings["optimizer"] == {"learning_rate": 1e-4}
    assert settings["compute"] == {"pack_tokens": 4096}
    assert not settings["lora"]


def _uncommented(reference: str) -> dict[str, object]:
    """Return the committed reference as settings, with every commented default set."""
    lines = [re.sub(r"^#(?=[a-z]\w* = (?!\.\.\.$))", "", line) for line in reference.splitlines()]
    return tomllib.loads("\n".join(lines))


def test_schema_accepts_every_default_and_refuses_unknown_names_and_wrong_types(described: Described) -> None:
    schema = json.loads(json.dumps(as_json_schema(described)))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    defaults = _uncommented((ROOT / "deploy" / "headrace.toml").read_text(encoding="utf-8"))
    assert len(defaults) > 8, "the sections of the services are there"
    assert [error.message for error in validator.iter_errors(defaults)] == []
    wrong_files: list[dict[str, object]] = [
        {"gatway": {}}, {"gateway": {"prot": 8000}}, {"gateway": {"port": "many"}}, {"bus": 1},
    ]  # fmt: skip
    assert [wrong for wrong in wrong_files if validator.is_valid(wrong)] == []
    assert validator.is_valid({"gateway": {"port": 8000}, "trainer": {"base": "models/base"}})
