"""Events are imported on first use: the names stay, and one import does not load the others."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import headrace
import headrace_schemas
from headrace_schemas.lazy import lazily

PACKAGES = (headrace_schemas, headrace)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_what_its_module_defines(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert dir(package) == sorted(names)
    for name in names:
        attribute = getattr(package, name)
        home = getattr(attribute, "__module__", "headrace_schemas.events.envelope")
        assert attribute is getattr(import_module(home), name)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_type_checker_sees_the_same_names(package: object) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(package.__all__)  # type: ignore[attr-defined]


def test_an_unknown_name_is_an_attribute_error() -> None:
    get, _ = lazily("headrace_schemas", {"headrace_schemas.values.base": ("Event",)})
    with pytest.raises(AttributeError, match="module 'headrace_schemas' has no attribute 'Evnt'"):
        get("Evnt")
    assert not hasattr(headrace_schemas, "Evnt")


def test_one_event_imports_no_other() -> None:
    code = "import sys; from headrace_schemas import Reward; print('headrace_schemas.events.turn' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
