"""Tests that each image contains exactly the packages of its service, with versions and hashes of the workspace
lock."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repo.deployments import OWN_IMAGES, ROOT, ours, service_of

FOLDER = ROOT / "deploy" / "requirements"
DOCKERFILES = sorted((ROOT / "deploy").glob("*Dockerfile"))
SERVICES = sorted({*map(service_of, ours()), "broker"})
"""The broker's image is for a single Pod (deploy/helm)."""
WITH_TORCH = {"inference", "trainer"}
LOCKS = {"inference-vllm": "requirements/vllm.lock"}
"""Lists that are cut out of another lock than requirements/workspace.lock."""
INSTALLS = {"Dockerfile": 4, "all.Dockerfile": 2, "torch.Dockerfile": 5, "vllm.Dockerfile": 4, "trinity.Dockerfile": 6}
"""Commands of pip in each Dockerfile."""
ALONE = """
import importlib, json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Missing())
importlib.import_module(sys.argv[2])
"""
"""Imports a module where other modules are missing."""
Pins = dict[str, tuple[str, frozenset[str]]]


def pins(path: Path) -> Pins:
    """Return the marker and the hashes of each `name==version` in a requirements file."""
    details_by_pin: Pins = {}
    for entry in re.split(r"\n(?=[a-z0-9])", path.read_text(encoding="utf-8")):
        if match := re.match(r"(?P<pin>[a-z0-9._-]+==[^ ]+)(?: ; (?P<marker>[^\\]+))? \\", entry):
            details_by_pin[match["pin"]] = (
                (match["marker"] or "").strip(),
                frozenset(re.findall(r"sha256:[0-9a-f]{64}", entry)),
            )
    return details_by_pin


def installed_here(path: Path) -> set[str]:
    """Return the names of the packages in a file that pip would install for this interpreter on this system."""
    names: set[str] = set()
    for pin, (marker, _) in pins(path).items():
        requirement = Requirement(f"{pin} ; {marker}" if marker else pin)
        if requirement.marker is None or requirement.marker.evaluate():
            names.add(canonicalize_name(requirement.name))
    return names


def needed(roots: Iterable[str]) -> set[str]:
    """Return the names of the packages that `roots` need on this system, directly or indirectly.

    The dependencies of Headrace's own packages are included, but not these packages themselves.
    """
    names: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(root), "") for root in roots]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        names.add(name)
        for requested_extra in ("", *requirement.extras):
            if (name, requested_extra) not in seen:
                seen.add((name, requested_extra))
                todo += [(Requirement(text), requested_extra) for text in distribution(name).requires or ()]
    return {name for name in names if not name.startswith("headrace")}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_versions_and_hashes_are_those_of_the_lock(path: Path) -> None:
    lock = pins(ROOT / LOCKS.get(path.stem, "requirements/workspace.lock"))
    for pin, (_, hashes) in pins(path).items():
        assert hashes == lock[pin][1], f"{pin}: run `make lock`"


def test_all_locks_have_one_version_of_the_grammar_library() -> None:
    """Masks of other versions may differ, and a trainer drops answers of a replica with another grammar library."""
    texts = [
        path.read_text() for folder in ("requirements", "deploy/requirements") for path in (ROOT / folder).iterdir()
    ]
    found = [version for text in texts for version in re.findall(r"^llguidance==(\S+)", text, re.MULTILINE)]
    assert len(found) >= 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_gets_what_its_service_needs_and_nothing_else(service: str) -> None:
    roots = ("headrace-schemas", "headrace-runtime", f"headrace-{service}")
    assert installed_here(FOLDER / f"{service}.txt") == needed(roots), "run `make lock`"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_nothing_that_its_image_lacks(service: str) -> None:
    present = installed_here(FOLDER / f"{service}.txt") | installed_here(FOLDER / "torch.txt")
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not module.startswith("headrace") and present.isdisjoint(map(canonicalize_name, owners))
    ]
    command = [sys.executable, "-c", ALONE, json.dumps(absent), f"headrace_{service}.app"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert process.returncode == 0, process.stderr[-600:]


def test_the_image_with_vllm_gets_its_lock_without_the_tools_that_build() -> None:
    image_packages, lock_packages = (
        installed_here(path) for path in (FOLDER / "inference-vllm.txt", ROOT / "requirements/vllm.lock")
    )
    assert lock_packages - image_packages <= needed(["hatchling", "editables"]), "run `make lock`"
    assert image_packages >= needed(["headrace-schemas", "headrace-runtime", "headrace-inference"]) | {"vllm"}


def test_the_image_with_trinity_gets_a_trainer_that_can_hand_over() -> None:
    roots = ("headrace-schemas", "headrace-runtime", "headrace-trainer[trinity]")
    assert installed_here(FOLDER / "trainer-trinity.txt") == needed(roots), "run `make lock`"
    trinity_packages = installed_here(ROOT / "requirements/trinity.lock")
    assert {"trinity-rft", "verl", "ray", "torch"} <= trinity_packages


def test_the_example_gets_what_its_gate_imports() -> None:
    assert installed_here(FOLDER / "email-agent.txt") == needed(["openai"])
    assert installed_here(FOLDER / "build.txt") == needed(["hatchling"])


def test_torch_is_in_two_images_only_and_shared_by_them() -> None:
    shared = pins(FOLDER / "torch.txt")
    for service in SERVICES:
        packages = pins(FOLDER / f"{service}.txt")
        assert any(pin.startswith("torch==") for pin in packages) == (service in WITH_TORCH)
        assert service not in WITH_TORCH or shared.keys() <= packages.keys()
    for name, container in ours().items():
        if name not in OWN_IMAGES:
            assert container["build"]["dockerfile"].endswith("torch.Dockerfile") == (service_of(name) in WITH_TORCH)


ALL_IN_ONE: dict[str, dict[str, Any]] = {"all": {"build": {"dockerfile": "deploy/all.Dockerfile", "args": {}}}}


@pytest.mark.parametrize("name", [*ours(), *ALL_IN_ONE])
def test_what_is_copied_into_an_image_is_in_the_build_context(name: str) -> None:
    allowed = tuple(line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!"))
    build = {**ours(), **ALL_IN_ONE}[name]["build"]
    build_args = {"EXTRA": "deploy/requirements/extra.txt", **build["args"]}
    recipe = (ROOT / build["dockerfile"]).read_text(encoding="utf-8")
    copy_sources = [line.split()[1:-1] for line in recipe.splitlines() if re.match(r"COPY (?!--from)", line)]
    assert copy_sources
    for source in (
        re.sub(r"\$\{(\w+)\}", lambda use: build_args[use[1]], template)
        for templates in copy_sources
        for template in templates
    ):
        assert (ROOT / source).exists(), source
        inside = tuple(each for each in allowed if each.startswith(f"{source}/"))
        assert source.startswith(allowed) or inside, f".dockerignore leaves {source} out"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_one_process_as_nobody_in_particular(path: Path) -> None:
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert [words[1] for words in lines if words[0] == "USER"] == ["headrace"]
    assert [words[1] for words in lines if words[0] == "ENTRYPOINT"] == ['["/opt/start"]']
    assert {words[1] for words in lines if words[0] == "FROM"} == {"python:3.11-slim"}
    assert (ROOT / "deploy/start").read_text().splitlines()[-1].startswith("exec ")


def test_demo_and_the_image_of_all_services_install_the_product_and_no_tool_for_tests() -> None:
    path, workspace = ROOT / "requirements/demo.lock", pins(ROOT / "requirements/workspace.lock")
    demo = {pin: hashes for pin, (marker, hashes) in pins(path).items() if marker != "sys_platform == 'never'"}
    assert demo.items() <= {pin: hashes for pin, (_, hashes) in workspace.items()}.items(), "run `make lock`"
    extras = {"headrace-trainer", "headrace-inference", "openai", "rich"}  # of headrace[local], with those of the demo
    product = needed(["headrace[plots]", *extras, "hatchling", "editables"])
    assert installed_here(path) == product - {"triton"}, "run `make lock`"
    assert product.isdisjoint({"pytest", "mypy", "ray", "hypothesis"})


def test_the_start_of_an_image_runs_its_service_or_the_command(tmp_path: Path) -> None:
    for name in ("python3", "headrace"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def started(**environ: str) -> str:
        command = ["/bin/sh", str(ROOT / "deploy/start"), "up", "a b"]
        return subprocess.run(command, env={"PATH": str(tmp_path), **environ}, text=True, stdout=-1, check=True).stdout

    assert started() == "headrace up a b\n"
    assert started(SERVICE="scorer") == "python3 -m headrace_runtime.watchdog python3 -m headrace_scorer up a b\n"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_nothing_is_installed_without_its_hash(path: Path) -> None:
    commands = re.findall(r"pip install (?:[^\\\n]|\\\n)+", path.read_text(encoding="utf-8"))
    assert len(commands) == INSTALLS[path.name]
    for command in commands:
        assert "--no-deps" in command
        assert ("--require-hashes" in command) != ("--no-index" in command), "ours come from the context"
