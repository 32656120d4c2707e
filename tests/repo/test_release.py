"""Metadata of the distributions: one version, what an index shows, and sizes that are counted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import headrace
from tests.repo.compose_files import ROOT
from tests.repo.sizes import sizes, tracked_files

PROJECTS = sorted(ROOT / folder / "pyproject.toml" for folder in ("schemas", "gateway", "examples"))
PROJECTS += sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")])
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def project(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return table


def test_changelog_has_a_section_for_the_version_of_the_client() -> None:
    assert f"\n## [{headrace.__version__}] - " in CHANGELOG


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_distribution_has_the_version_and_pins_others_to_it(path: Path) -> None:
    table = project(path)
    assert table["version"] == headrace.__version__
    extras = [text for texts in table.get("optional-dependencies", {}).values() for text in texts]
    for text in (*table["dependencies"], *extras):
        requirement = Requirement(text)
        if requirement.name.startswith("headrace") and requirement.name != table["name"]:
            pinned = (
                {"", f"=={headrace.__version__}"} if requirement.extras == {"db"} else {f"=={headrace.__version__}"}
            )
            assert str(requirement.specifier) in pinned, text


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_distribution_has_readme_licence_urls_and_classifiers(path: Path) -> None:
    table = project(path)
    assert (path.parent / table["readme"]).is_file()
    assert table["license"] == "Apache-2.0"
    assert table["urls"].keys() == {"Documentation", "Source", "Changelog"}
    assert "Programming Language :: Python :: 3" in table["classifiers"]
    build = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    (licence,) = build["sdist"]["force-include"]
    assert (path.parent / licence).samefile(ROOT / "LICENSE")


def test_the_product_installs_no_torch_and_its_extras_add_it() -> None:
    table = project(ROOT / "packages/headrace/pyproject.toml")
    names = {Requirement(text).name for text in table["dependencies"]}
    assert names.isdisjoint({"headrace-trainer", "headrace-inference", "headrace-demo"})
    assert {"headrace-client", "headrace-cli", "headrace-gateway", "headrace-registry", "headrace-broker"} <= names
    local = {Requirement(text).name for text in table["optional-dependencies"]["local"]}
    assert local == {"headrace-trainer", "headrace-inference", "headrace-demo"}


def test_sizes_are_counted_and_the_client_is_small() -> None:
    measured = {size.name: size for size in sizes(tracked_files("HEAD"))}
    assert all(size.value > 0 for size in measured.values())
    for name in ("lines of the client", "targets of make", "entries at the root", "decision records"):
        assert measured[name].holds, f"{name}: {measured[name].value:g}, {measured[name].limit}"
