"""An event with a value of a wrong JSON type, at any place, is read or refused as `InvalidEvent`; no other error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_schemas import EVENTS
from headrace_schemas.values import ids
from headrace_schemas.values.errors import InvalidEvent
from tests.support.hostile_json import kinds_everywhere

EXAMPLES = sorted((Path(ids.__file__).parents[1] / "examples").glob("*/*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_event_with_a_value_of_another_type_is_read_or_refused_by_name(path: Path) -> None:
    kind = EVENTS[path.parent.name]
    document = json.loads(path.read_bytes())
    refused = 0
    for changed in kinds_everywhere(document, kind.model_fields):
        try:
            event = kind.from_json(json.dumps(changed).encode())
        except InvalidEvent:
            refused += 1
        else:
            assert all(isinstance(text, str) for text in (event.key, event.subject, event.event_id)), changed
    assert refused > 20
