"""Tests of the resolution of model names to versions, and of value ranges.

The gateway accepts only values in the declared ranges, so that the scorer dead-letters none of them for its value.
"""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.chat_call import Target
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_gateway.settings import GatewaySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import load
from headrace_runtime.settings.source_values import SourceValues
from headrace_schemas import DeadLetter, Feedback, Routing, ServedVersion
from headrace_schemas.values import ids
from headrace_schemas.values.blobs import BlobRef
from tests.support.gateway import gateway
from tests.support.presence import draw_seed
from tests.unit.scorer.conftest import scorer

V1, V2, V3 = (f"tiny@{digit * 16}" for digit in "123")
BLOB = BlobRef(uri="memory://m", sha256="0" * 64, size=1)


def routing(revision: int, champion: str | None, previous: str | None = None, **fields: tuple[str, ...]) -> Routing:
    aliases = {"champion": champion, "previous": previous}
    return Routing(
        time=datetime.now(UTC),
        model="tiny",
        revision=revision,
        aliases={name: version for name, version in aliases.items() if version},
        serve=tuple(ServedVersion(version=version, manifest=BLOB) for version in fields.get("serve", ())),
        withdrawn=fields.get("withdrawn", ()),
    )


def catalog(*rows: Routing, **aliases: str) -> ModelCatalog:
    model_catalog = ModelCatalog(
        {name.replace("_", "-"): to for name, to in aliases.items()}, lambda: True, lambda: None
    )
    for row in rows:
        model_catalog.update(row.model, row)
    return model_catalog


def test_a_bare_name_is_its_champion_an_alias_is_itself_a_version_is_exact() -> None:
    model_catalog = catalog(routing(1, V2, V1, serve=(V1, V2, V3)))
    for name, version in {"tiny": V2, "tiny:champion": V2, "tiny:previous": V1, V3: V3}.items():
        assert model_catalog.version_of(model_catalog.resolve(name)) == version


@pytest.mark.parametrize("name", ["gpt-4o", "qwen3:8b", "claude-sonnet-4@20250514", "models/x"])
def test_the_only_model_answers_to_names_that_are_not_known(name: str) -> None:
    model_catalog = ModelCatalog({}, lambda: True, lambda: None, any_name=True)
    model_catalog.update("tiny", routing(1, V2, V1))
    assert model_catalog.resolve(name, by_agent=True) == Target("tiny", is_substitute=True)
    for arguments in ({"by_agent": False}, {"by_agent": True, "may_use": lambda _: False}):
        with pytest.raises(ApiError):
            model_catalog.resolve(name, **arguments)
    model_catalog.update("other", routing(1, V2))
    with pytest.raises(ApiError):
        model_catalog.resolve(name, by_agent=True)


@pytest.mark.parametrize("name", ["tiny:stabel", "tiny@fedcba9876543210", "gone@fedcba9876543210"])
def test_a_wrong_alias_or_version_is_refused_also_where_any_name_is_answered(name: str) -> None:
    model_catalog = ModelCatalog({"*": "tiny"}, lambda: True, lambda: None, any_name=True)
    model_catalog.update("tiny", routing(1, V2, V1))
    with pytest.raises(ApiError):
        model_catalog.resolve(name, by_agent=True)


def test_a_star_stands_for_all_names_that_are_not_known_and_is_not_listed() -> None:
    model_catalog = ModelCatalog({"*": "tiny:previous", "gpt-4o": "tiny"}, lambda: True, lambda: None)
    model_catalog.update("tiny", routing(1, V2, V1))
    assert model_catalog.resolve("gpt-5") == Target("tiny", "previous", is_substitute=True)
    assert model_catalog.resolve("gpt-4o") == Target("tiny")
    assert "*" not in dict(model_catalog.names())


def test_foreign_names_lead_to_ours() -> None:
    model_catalog = catalog(routing(1, V2, V1), training_model="tiny", old="tiny:previous")
    assert model_catalog.resolve("training-model") == Target("tiny")
    assert model_catalog.version_of(model_catalog.resolve("old")) == V1
    assert "training-model" in [name for name, _ in model_catalog.names()]


@pytest.mark.parametrize("name", ["tin", "tiny:canary", f"tiny@{'9' * 16}", V3, "", "@", ":", "tiny@"])
def test_what_no_routing_names_does_not_exist(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        catalog(routing(1, V2, V1, serve=(V3,), withdrawn=(V3,))).resolve(name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_a_name_that_is_nearly_right_is_named() -> None:
    with pytest.raises(ApiError, match="did you mean 'tiny'"):
        catalog(routing(1, V1)).resolve("tinny")


def test_an_older_revision_changes_nothing() -> None:
    model_catalog = catalog(routing(2, V2), routing(1, V1))
    assert model_catalog.version_of(Target("tiny")) == V2
    model_catalog.update("tiny", None)
    assert not model_catalog.is_ready


def test_a_model_without_a_champion_is_known_and_waits() -> None:
    model_catalog = catalog(routing(0, None, serve=(V1,)))
    assert model_catalog.is_ready
    assert model_catalog.version_of(model_catalog.resolve("tiny")) is None


def test_nothing_is_known_before_the_topic_was_read_to_its_end() -> None:
    history_read = False
    model_catalog = ModelCatalog({}, lambda: history_read, lambda: None)
    model_catalog.update("tiny", routing(1, V1))
    assert not model_catalog.is_ready
    history_read = True
    assert model_catalog.is_ready


def test_a_key_with_models_of_its_own_knows_no_others() -> None:
    model_catalog = catalog(routing(1, V2, V1, serve=(V1, V2)), foreign="tiny")

    def other(model: str) -> bool:
        return model == "other"

    assert model_catalog.names(other) == []
    for name in ("tiny", "tiny:champion", V2, "foreign", "tin"):
        with pytest.raises(ApiError, match="GET /v1/models lists what is served") as caught:
            model_catalog.resolve(name, other)
        assert caught.value.status == 404
    assert model_catalog.resolve("tiny", lambda model: model == "tiny") == Target("tiny")


def test_labels_and_aliases_of_operators_are_names_like_roles() -> None:
    row = routing(1, V2, V1, serve=(V1, V2, V3)).model_copy(update={"names": {"stable": V1, "v1.0": V3}})
    model_catalog = catalog(row)
    assert {
        name: model_catalog.version_of(model_catalog.resolve(f"tiny:{name}")) for name in ("stable", "v1.0", "champion")
    } == {
        "stable": V1,
        "v1.0": V3,
        "champion": V2,
    }
    assert {"tiny:stable", "tiny:v1.0"} <= {name for name, _ in model_catalog.names()}


def test_no_name_of_an_operator_stands_for_a_role() -> None:
    model_catalog = catalog(routing(1, V2, V1).model_copy(update={"names": {"champion": V1}}))
    assert model_catalog.version_of(model_catalog.resolve("tiny:champion")) == V2


def test_what_a_registered_version_answers_is_never_trained() -> None:
    model_catalog = catalog(routing(1, V2, V1).model_copy(update={"untrained": (V1,)}))
    assert model_catalog.untrained("tiny", V1) == "registered"
    assert model_catalog.untrained("tiny", V2) is None
    assert model_catalog.untrained("nobody", V1) is None


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
    rng = random.Random(draw_seed())
    values = SourceValues(ranges=RANGES, labels=LABELS)
    refused = 0
    async with gateway(tmp_path, values=values) as served:
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
