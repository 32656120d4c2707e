"""Tests of the console's login, sessions, roles, forms and headers."""

from __future__ import annotations

import contextlib
import re
import tomllib
from hashlib import sha256
from pathlib import Path

import httpx2
import pytest
from pydantic import ValidationError
from starlette.routing import Route

import headrace_console
from headrace_console.logins import SESSION_S, Logins
from headrace_console.pages.page import Page
from headrace_console.settings import ConsoleSettings, Role, Scope, UserSettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Refused
from headrace_schemas.http.stack_access import make_login_token
from tests.unit.console.support import BY_PAGE, ORIGIN, Stand, TestClock, form_token

PACKAGE = Path(headrace_console.__file__).parent


def routes(stand: Stand) -> list[tuple[str, str]]:
    """Return the method and a path of every route that needs a session."""
    return [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in stand.console.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD" and route.path not in ("/health", "/metrics", "/login", "/static/{name}")
    ]


async def test_the_printed_address_logs_in_once_without_leaving_the_token(stand: Stand) -> None:
    token = make_login_token(stand.data_dir)
    client = stand.client()
    reply = await client.get("/login", params={"token": token})
    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    assert reply.headers["referrer-policy"] == "no-referrer"
    cookie = reply.headers["set-cookie"].lower()
    assert all(part in cookie for part in ("headrace-8040=", "httponly", "samesite=strict"))
    assert "owner (operator)" in (await client.get("/")).text
    replayed = await stand.client().get("/login", params={"token": token})
    assert replayed.status_code == 401
    assert "set-cookie" not in replayed.headers


@pytest.mark.parametrize("token", ["", "wrong", "%ED%B3%BF", "operator%20", "%00"])
async def test_a_wrong_token_opens_no_session(stand: Stand, token: str) -> None:
    make_login_token(stand.data_dir)
    form_headers = {**BY_PAGE, "content-type": "application/x-www-form-urlencoded"}
    for reply in (
        await stand.client().post("/login", content=f"token={token}", headers=form_headers),
        await stand.client().get(f"/login?token={token}"),
    ):
        assert reply.status_code in (400, 401)
        assert "set-cookie" not in reply.headers


async def test_without_a_login_file_no_token_is_right(stand: Stand) -> None:
    assert (await stand.client().get("/login?token=")).status_code == 401


async def test_the_eleventh_login_within_a_minute_is_refused(stand: Stand) -> None:
    client = stand.client()
    for _ in range(10):
        assert (await client.post("/login", data={"token": "guess"}, headers=BY_PAGE)).status_code == 401
    refused = await client.post("/login", data={"token": "viewer"}, headers=BY_PAGE)
    assert refused.status_code == 429
    stand.clock.now_s += 61
    assert (await client.post("/login", data={"token": "viewer"}, headers=BY_PAGE)).status_code == 303


async def test_a_session_ends_after_twelve_hours_and_by_logout(stand: Stand) -> None:
    client = await stand.signed_in()
    assert (await client.get("/")).status_code == 200
    stand.clock.now_s += SESSION_S
    assert (await client.get("/")).headers["location"] == "/login"
    client = await stand.signed_in()
    copied = stand.client()
    copied.cookies = client.cookies
    await client.post("/logout", data={"form_token": await form_token(client)}, headers=BY_PAGE)
    assert (await copied.get("/")).headers["location"] == "/login"


async def test_sessions_go_on_after_a_restart_of_the_console(stand: Stand) -> None:
    client, ended = await stand.signed_in("operator"), await stand.signed_in()
    await ended.post("/logout", data={"form_token": await form_token(ended)}, headers=BY_PAGE)
    async with Stand(stand.data_dir) as again:
        for earlier, status in ((client, 200), (ended, 303)):
            later = again.client()
            later.cookies = earlier.cookies
            assert (await later.get("/")).status_code == status
    file = stand.data_dir / "console" / "sessions.json"
    assert file.stat().st_mode & 0o077 == 0
    assert not any(cookie in file.read_text() for cookie in client.cookies.values())


@pytest.mark.parametrize("content", ["", "[1]", '[{"digest": 1}]', "{}", "[" * 10_000])
async def test_a_damaged_file_of_sessions_costs_a_login(stand: Stand, content: str) -> None:
    client = await stand.signed_in()
    (stand.data_dir / "console" / "sessions.json").write_text(content)
    async with Stand(stand.data_dir) as again:
        later = again.client()
        later.cookies = client.cookies
        assert (await later.get("/")).headers["location"] == "/login"
        assert (await (await again.signed_in()).get("/")).status_code == 200


def test_another_token_ends_the_sessions_of_its_user(tmp_path: Path) -> None:
    def logins(token: str, *, role: Role = "viewer", key: str = "k") -> Logins:
        users = (UserSettings(name="ann", sha256=sha256(token.encode()).hexdigest(), role=role),) if token else ()
        return Logins(tmp_path, users, SystemClock(), stack_key=key)

    (tmp_path / "run").mkdir()
    ann = logins("old").log_in("old")
    user = logins("old", role="operator").user_of(ann)
    assert user is not None
    assert user.role == "operator"
    assert logins("new").user_of(ann) is None
    assert logins("").user_of(ann) is None
    owner = logins("").log_in_once(make_login_token(tmp_path))
    namesake = UserSettings(name="owner", sha256=sha256(b"t").hexdigest(), role="viewer")
    user = Logins(tmp_path, (namesake,), SystemClock(), stack_key="k").user_of(owner)
    assert user is not None
    assert user.role == "operator"
    assert logins("").user_of(owner) is not None
    assert logins("", key="other").user_of(owner) is None


def test_at_most_200_sessions_are_open(tmp_path: Path) -> None:
    clock = TestClock()
    logins = Logins(tmp_path, (UserSettings(name="ann", sha256=sha256(b"t").hexdigest()),), clock)
    cookies = []
    for _ in range(201):
        clock.now_s += 7  # fewer than 10 logins a minute
        cookies.append(logins.log_in("t"))
    assert logins.user_of(cookies[0]) is None
    assert logins.user_of(cookies[1]) is not None
    assert Logins(tmp_path, (), clock).user_of(cookies[1]) is None


def test_nobody_ends_the_sessions_of_another_user_or_keeps_another_address_from_logging_in(tmp_path: Path) -> None:
    clock = TestClock()
    users = tuple(UserSettings(name=name, sha256=sha256(name.encode()).hexdigest()) for name in ("ann", "eve"))
    logins = Logins(tmp_path, users, clock)
    cookie = logins.log_in("ann", "10.0.0.1")
    for number in range(450):
        clock.now_s += 1
        with contextlib.suppress(Refused):  # after 10 within a minute
            logins.log_in("eve" if number % 2 else "wrong", f"10.0.0.{2 + number % 7}")
    assert logins.user_of(cookie) is not None
    for network in ("fd00:1:2:3::", "2001:db8::"):
        for number in range(11):
            with pytest.raises(Refused) as refusal:
                logins.log_in("wrong", f"{network}{number}")
            assert refusal.value.status == (429 if number == 10 else 401), "an IPv6 client has many addresses"
    assert logins.log_in("ann", "10.0.0.1")
    for number in range(3000):
        with pytest.raises(Refused):
            logins.log_in("wrong", f"10.{number >> 8}.{number & 255}.9")
    assert len(logins._attempts) <= 1000


async def test_no_page_opens_without_a_session(stand: Stand) -> None:
    client = stand.client()
    assert len(routes(stand)) > 4
    for method, path in routes(stand):
        reply = await client.request(method, path, headers=BY_PAGE)
        assert (reply.status_code, reply.headers["location"]) == (303, "/login"), path


async def test_a_page_refuses_a_lower_role(stand: Stand) -> None:
    rater = await stand.signed_in("rater")
    assert (await rater.get("/")).status_code == 403
    assert (await (await stand.signed_in("viewer")).get("/")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ORIGIN, "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": ORIGIN, "host": "evil.example"},
    ],
)
async def test_a_form_of_another_page_changes_nothing(stand: Stand, headers: dict[str, str]) -> None:
    client = await stand.signed_in("operator")
    fields = {"form_token": await form_token(client), "theme": "dark", "next": "/"}
    for method, path in routes(stand):
        if method == "POST":
            assert (await client.post(path, data=fields, headers=headers)).status_code == 403, path
    assert (await client.get("/")).status_code == 200


@pytest.mark.parametrize("token", [None, "", "0" * 64, "other"])
async def test_a_form_without_the_sessions_token_changes_nothing(stand: Stand, token: str | None) -> None:
    client, other = await stand.signed_in("operator"), await stand.signed_in("operator")
    fields = {} if token is None else {"form_token": await form_token(other) if token == "other" else token}
    for method, path in routes(stand):
        if method == "POST":
            reply = await client.post(path, data={**fields, "theme": "dark"}, headers=BY_PAGE)
            assert reply.status_code == 403, path
            assert "set-cookie" not in reply.headers


async def test_unknown_addresses_answer_alike_and_inside_the_frame(stand: Stand) -> None:
    client = await stand.signed_in()
    replies = [await client.get(path) for path in ("/nothing", "/a/b/c", "/%3Cscript%3E")]
    assert {reply.status_code for reply in replies} == {404}
    bodies = {reply.text.replace(reply.url.path, "") for reply in replies[:2]}
    assert len({re.sub(r'name="next" value="[^"]*"', "", body) for body in bodies}) == 1
    assert "<script>" not in replies[2].text.replace("<script src", "")


@pytest.mark.parametrize(
    ("target", "location"),
    [("/flow", "/flow"), ("//evil.example", "/"), ("/\\evil.example", "/"), ("http://evil.example/", "/"), ("", "/")],
)
async def test_the_theme_is_kept_in_a_cookie_and_leads_back_to_this_console(
    stand: Stand, target: str, location: str
) -> None:
    client = await stand.signed_in()
    fields = {"form_token": await form_token(client), "theme": "dark", "next": target}
    reply = await client.post("/theme", data=fields, headers=BY_PAGE)
    assert (reply.status_code, reply.headers["location"]) == (303, location)
    assert '<html lang="en" data-theme="dark">' in (await client.get("/")).text


async def test_every_response_has_the_security_headers(stand: Stand) -> None:
    client = await stand.signed_in()
    replies: list[httpx2.Response] = [
        await client.get(path) for path in ("/", "/login", "/nothing", "/static/console.css", "/health")
    ]
    for reply in replies:
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == ("no-cache" if "static" in reply.url.path else "no-store")
        assert "access-control-allow-origin" not in reply.headers


async def test_static_files_are_those_of_the_folder_and_are_sent_once(stand: Stand) -> None:
    client = stand.client()
    first = await client.get("/static/console.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = await client.get("/static/console.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for name in ("vendor.toml", "..", "nothing.js"):
        assert (await client.get(f"/static/{name}")).status_code in (303, 404)


def test_templates_hold_no_inline_script_style_or_handler() -> None:
    templates = sorted((PACKAGE / "templates").glob("*.html"))
    assert len(templates) > 3
    allowed = {"hx-get", "hx-trigger", "hx-swap"}
    for path in templates:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|\|\s*safe|autoescape", text), path.name
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text)), path.name
        assert set(re.findall(r"\b(hx-[a-z-]+)=", text)) <= allowed, path.name
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text), path.name


def test_vendored_files_are_those_of_the_list_and_the_rest_is_small() -> None:
    folder = PACKAGE / "static"
    listed = tomllib.loads((folder / "vendor.toml").read_text(encoding="utf-8"))["file"]
    for entry in listed:
        assert sha256((folder / entry["name"]).read_bytes()).hexdigest() == entry["sha256"], entry["name"]
    served = [path for path in folder.iterdir() if path.suffix in (".js", ".css")]
    assert sum(path.stat().st_size for path in served) <= 100 * 1024


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"host": "0.0.0.0"}, "set console.users"),
        ({"host": "0.0.0.0", "users": [{"name": "a", "sha256": "0" * 64}]}, "set console.behind_tls"),
        ({"users": [{"name": "a", "sha256": "0" * 64}, {"name": "a", "sha256": "1" * 64}]}, "listed twice"),
        ({"users": [{"name": "a", "sha256": "0" * 64, "role": "admin"}]}, "operator"),
    ],
)
def test_unsafe_settings_stop_the_start(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ConsoleSettings.model_validate(values)


def test_a_scope_permits_its_tenants() -> None:
    assert Scope().permits("any")
    assert Scope(frozenset({"a"})).permits("a")
    assert not Scope(frozenset({"a"})).permits("b")
    role: Role = UserSettings(name="a", sha256="0" * 64).role
    assert (role, Page("/x", None).role) == ("viewer", "viewer")  # type: ignore[arg-type]
