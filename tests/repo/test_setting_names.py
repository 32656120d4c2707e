"""A renamed setting is renamed in the harnesses that give it to a service, too: some of them run once in a release."""

from __future__ import annotations

import re
from importlib import import_module

from headrace_operations.supervisor.plan import installed
from headrace_runtime.settings.reference import describe
from headrace_runtime.settings.sections import Common, complete
from tests.repo.compose_files import ROOT

FOLDERS = ("tests/attack", "tests/chaos", "tests/compose", "tests/support", "benchmarks", "examples", "deploy", "docs")
"""Tests that each `make test` runs notice it themselves, and some name a wrong setting on purpose."""
ENDINGS = (".py", ".yml", ".yaml", ".md", ".toml")
ALONE = ("docker-compose.yml", "Makefile", "README.md")
NAME = re.compile(r"\b(?:HEADRACE_)?([A-Z]+(?:__[A-Z0-9]+(?:_[A-Z0-9]+)*)+)\b")
"""As the environment has it: two underscores between a section and a setting."""


def known() -> set[str]:
    models = {"": Common}
    for name, info in installed().items():
        models[f"{name}."] = complete(import_module(f"{info.module}.__main__").SERVICE.settings)
    return {doc.name.upper().replace(".", "__") for prefix, model in models.items() for doc in describe(model, prefix)}


def test_harnesses_examples_and_docs_name_settings_that_there_are() -> None:
    files = [ROOT / name for name in ALONE]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    settings = known()
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in NAME.findall(path.read_text())
        if name not in settings
    }
    assert not unknown, sorted(unknown)


def test_a_renamed_setting_is_noticed() -> None:
    assert [name for name in NAME.findall('service("scorer", SCORER__SETTLE_S=1)') if name not in known()] == [
        "SCORER__SETTLE_S"
    ]
