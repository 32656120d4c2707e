"""What the door accepts is inside the declared ranges: the scorer dead-letters nothing of it for its value."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.settings import GatewaySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import load
from headrace_runtime.settings.source_values import SourceValues
from headrace_schemas import DeadLetter, Feedback
from headrace_schemas.values import ids
from tests.support.gateway import gateway, until
from tests.unit.scorer.conftest import scorer

RANGES = {"feedback": (0.0, 1.0), "feedback:*": (0.0, 5.0), "stars*": (1.0, 5.0), "user": (-1.0, 1.0)}
LABELS = {"good": 1.0, "bad": 0.0, "superb": 100.0, "awful": -1e6}
_TURN = ids.response_id(ids.session_key("default", "s"))
_EDGES = (0.0, 1.0, -1.0, 5.0, 1e6, -1e6, 1e-320, math.nextafter(1.0, 2.0), math.nextafter(0.0, -1.0), 4.9999)


def _request(rng: random.Random) -> dict[str, Any]:
    value = rng.choice((*_EDGES, rng.uniform(-6, 6)))
    low = rng.choice((-100.0, 0.0, 1.0))
    form: dict[str, Any] = rng.choice(
        (
            {"value": value},
            {"value": rng.random() < 0.5},
            {"rating": rng.uniform(low, low + 10), "scale": [low, low + 10]},
            {"label": rng.choice([*LABELS, "unknown"])},
            {"parts": {"tone": value, "tact": rng.choice(_EDGES)}},
            {"withdrawn": True},
            {"context": {"a": 1}},
            {"edit": "better"},
        )
    )
    target: dict[str, Any] = rng.choice(({"session_id": "s"}, {"response_id": _TURN}))
    metric = {"metric": "tone"} if rng.random() < 0.3 and "value" in form else {}
    return {**form, **metric, **target, "source": rng.choice(("feedback", "stars", "stars:x", "user", "free"))}


async def test_door_and_scorer_refuse_the_same_values(tmp_path: Path, data_dir: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    values = SourceValues(ranges=RANGES, labels=LABELS)
    refused = 0
    async with gateway(tmp_path, values=values) as served:
        await until(lambda: served.publisher.connected)
        for _ in range(300):
            request = _request(rng)
            answer = await served.client.post("/v1/feedback", json=request)
            if answer.status_code != 202:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "out_of_range") or "edit" in request, answer.text
                refused += error["code"] == "out_of_range"
        for value in (0.5, 1.0, 1.5, -1e6):
            answer = await served.client.post("/feedback", json={"msg_ids": [_TURN], "reward": value})
            assert answer.status_code == (200 if 0 <= value <= 1 else 400), answer.text
        accepted = served.bus.events(Feedback)
    assert refused > 20
    assert len(accepted) > 50
    async with scorer("sqlite", data_dir, ranges=RANGES, labels=LABELS) as rig:
        await rig.deliver(*accepted)
        assert rig.stream.sent(DeadLetter) == []


@pytest.mark.parametrize(
    ("request_body", "field", "message"),
    [
        ({"value": 7}, "value", "feedback = 7: must be from 0 to 1 (scorer.ranges)"),
        ({"rating": 9, "scale": [0, 10], "source": "user-9"}, None, ""),
        ({"rating": 0, "scale": [0, 10], "source": "stars"}, "rating", "stars = 0: must be from 1 to 5"),
        ({"label": "superb"}, "label", "feedback = 100: must be"),
        ({"parts": {"tone": 2, "tact": 7}}, "parts.tact", "feedback:tact = 7: must be from 0 to 5"),
        ({"value": 7, "level": "task", "task_id": "t"}, "value", "feedback = 7"),
    ],
)
async def test_refusal_names_field_source_and_range(
    tmp_path: Path, request_body: dict[str, Any], field: str | None, message: str
) -> None:
    target = {} if "level" in request_body else {"session_id": "s"}
    async with gateway(tmp_path, values=SourceValues(ranges=RANGES, labels=LABELS)) as served:
        answer = await served.client.post("/v1/feedback", json={**request_body, **target})
    if field is None:
        assert answer.status_code == 202
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "out_of_range", field)
    assert message in error["message"]


def test_the_gateway_reads_the_declared_values_of_the_scorer(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("[scorer]\nfunctions = ['x.py:y']\nranges = { feedback = [0, 1] }\n")
    common, _ = load("gateway", GatewaySettings, path, {"HEADRACE_SCORER__LABELS": "{ good = 1.0 }"})
    assert common.section_of("scorer", SourceValues) == SourceValues(ranges={"feedback": (0, 1)}, labels={"good": 1.0})
    path.write_text("[scorer]\nranges = { feedback = [1, 0] }\n")
    common, _ = load("gateway", GatewaySettings, path, {})
    with pytest.raises(SettingError, match="scorer"):
        common.section_of("scorer", SourceValues)
    common, _ = load("gateway", GatewaySettings, None, {})
    assert common.section_of("scorer", SourceValues) == SourceValues()
