"""Settings that a service publishes, and settings that it keeps secret."""

from __future__ import annotations

import json

from pydantic import BaseModel, SecretStr
from starlette.testclient import TestClient

from headrace_runtime.http import web
from headrace_runtime.http.web import public_settings, settings_route
from headrace_runtime.settings.sections import Common, SecuritySettings


class Inner(BaseModel):
    """A section."""

    api_key: str = "sk-very-secret"
    token: SecretStr = SecretStr("also-secret")
    tokens: int = 7


class Outer(BaseModel):
    """Settings with secrets of all kinds."""

    inner: Inner = Inner()
    url: str = "postgresql://me:hunter22@db/name"
    urls: tuple[str, ...] = ("http://me:hunter22@host",)
    rank: int = 8
    nothing: str | None = None


def test_secrets_are_hidden_wherever_they_are() -> None:
    text = json.dumps(public_settings(Outer()))
    assert not [secret for secret in ("very-secret", "also-secret", "hunter22") if secret in text]
    assert public_settings(Outer())["rank"] == 8
    inner = public_settings(Outer())["inner"]
    assert isinstance(inner, dict)
    assert inner["tokens"] == 7


def test_the_page_needs_the_internal_key_where_there_is_one() -> None:
    common = Common(security=SecuritySettings(internal_key=SecretStr("between-us")))
    with TestClient(web.app({}, [settings_route("trainer", Outer(), common)], common)) as http:
        assert http.get("/settings").status_code == 401
        response = http.get("/settings", headers={"Authorization": "Bearer between-us"})
        assert response.json()["service"] == "trainer"
    open_to_all = Common()
    with TestClient(web.app({}, [settings_route("trainer", Outer(), open_to_all)], open_to_all)) as http:
        assert http.get("/settings").json()["settings"]["rank"] == 8
