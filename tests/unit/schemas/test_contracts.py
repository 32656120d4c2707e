"""Documents match the models, topics match the events, no change breaks a reader of the released version.

Events are imported on first use: the names stay, and one import does not load the others.
"""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import headrace
import headrace_schemas
from headrace_schemas import EVENTS, topics
from headrace_schemas.generate import JSON_FOLDER, RELEASED_FOLDER, breaking_changes, documents
from headrace_schemas.lazy import lazily

EXAMPLES = Path(headrace_schemas.__file__).parent / "examples"


@pytest.mark.parametrize("name", documents())
def test_committed_documents_are_what_the_models_generate(name: str) -> None:
    assert (JSON_FOLDER / name).read_text() == documents()[name], "run `make schemas` and commit the result"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_examples_satisfy_the_json_schema(path: Path) -> None:
    jsonschema.validate(
        json.loads(path.read_text()), json.loads((JSON_FOLDER / f"{path.parent.name}.json").read_text())
    )


def test_each_event_has_its_topic_file_and_each_topic_file_its_event() -> None:
    specs = {name: yaml.safe_load(text) for name, text in topics.sources().items()}
    assert set(specs) == set(EVENTS)
    for name, spec in specs.items():
        assert spec["name"] == name
        assert "_" not in name
        assert spec["promises"], f"{name} promises nothing"
        assert spec["producer"]
        assert spec["consumers"], f"nobody reads {name}"


def test_topics_keyed_by_session_have_equal_partition_counts() -> None:
    specs = [yaml.safe_load(text) for text in topics.sources().values()]
    assert len({spec["partitions"] for spec in specs if spec["key"] == "session_key"}) == 1


@pytest.mark.parametrize("topic", EVENTS)
def test_no_reader_of_the_released_version_breaks(topic: str) -> None:
    released = json.loads((RELEASED_FOLDER / f"{topic}.json").read_text())
    current = json.loads((JSON_FOLDER / f"{topic}.json").read_text())
    assert breaking_changes(released, current) == []


def _rename(schema: dict[str, Any]) -> None:
    schema["properties"]["turn"] = schema["properties"].pop("turn_id")


def _tighten(schema: dict[str, Any]) -> None:
    schema["$defs"]["Choice"]["properties"]["index"]["maximum"] = 3


def _widen(schema: dict[str, Any]) -> None:
    schema["properties"]["purpose"]["enum"].append("shadow")


def _require(schema: dict[str, Any]) -> None:
    schema["properties"]["region"] = {"type": "string"}
    schema["required"].append("region")


def _relax(schema: dict[str, Any]) -> None:
    schema["required"].remove("usage")


@pytest.mark.parametrize("change", [_rename, _tighten, _widen, _require, _relax])
def test_a_breaking_change_is_noticed(change: Any) -> None:
    released = json.loads(documents()["turns.json"])
    changed = copy.deepcopy(released)
    change(changed)
    assert breaking_changes(released, changed)


def test_a_new_optional_field_and_new_prose_break_nobody() -> None:
    released = json.loads(documents()["turns.json"])
    changed = copy.deepcopy(released)
    changed["properties"]["region"] = {"type": "string", "default": "eu"}
    changed["properties"]["turn_id"]["description"] = "better words"
    assert breaking_changes(released, changed) == []


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
