"""P11: a setting that no service uses stops the start, with its name, its value and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, SecretStr

from headrace_runtime.errors import SettingError
from headrace_runtime.main import secrets_of
from headrace_runtime.settings.sections import Common, Section, ServiceSettings, is_loopback, load
from tests.support import plugins


class Inner(Section):
    size_max: int = 10
    kind: str = "narrow"


class Outer(Section):
    """A section in a section, both with defaults of their own."""

    inner: Inner = Inner(size_max=5)
    name: str = "x"


def _even(number: int) -> int:
    if number % 2:
        raise ValueError("must be even")
    return number


class GatewaySettings(ServiceSettings):
    mode: Literal["a", "b"] = "a"
    even: Annotated[int, AfterValidator(_even)] = 0
    inner: Inner = Inner()
    wide: Inner = Inner(size_max=1000, kind="wide")
    outer: Outer = Outer(name="y")
    deep: Outer = Outer(inner=Inner(size_max=6))


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return path


def loaded(path: Path | None = None, **environ: str) -> tuple[Common, GatewaySettings]:
    return load("gateway", GatewaySettings, path, environ)


def test_defaults_need_no_file() -> None:
    common, settings = loaded()
    assert common.bus.address == "127.0.0.1:9092"
    assert settings.mode == "a"


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, 'data_dir = "x"\n[gateway]\nmode = "b"\n[gateway.inner]\nsize_max = 3\n')
    common, settings = loaded(path, HEADRACE_GATEWAY__INNER__SIZE_MAX="4", HEADRACE_BUS__ADDRESS="kafka:9092")
    assert (settings.mode, settings.inner.size_max, common.bus.address, common.data_dir) == (
        "b",
        4,
        "kafka:9092",
        Path("x"),
    )


def test_other_services_sections_are_theirs_to_check(tmp_path: Path) -> None:
    loaded(config(tmp_path, "[trainer]\nanything = 1\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gatway]\nport = 1\n", r"gatway = .*unknown; did you mean 'gateway'\?"),
        ("[gateway]\nprot = 1\n", r"gateway\.prot = 1: unknown; did you mean 'port'\?"),
        ("[gateway.inner]\nsize_mx = 1\n", r"gateway\.inner\.size_mx = 1: unknown; did you mean 'size_max'\?"),
        ("[gateway]\nport = 'eighty'\n", r"gateway\.port = 'eighty': .*integer"),
        ("[gateway]\nport = 70000\n", r"gateway\.port = 70000"),
        ("[gateway]\nmode = 'c'\n", r"gateway\.mode = 'c': .*'a' or 'b'"),
        ("[gateway]\neven = 1\n", r"gateway\.even = 1: must be even"),
        ("[gateway]\nmode = 'c'\nprot = 1\n", r"gateway\.prot = 1: unknown"),  # perhaps the cause of the other
        ("[bus]\nadress = 'x'\n", r"bus\.adress = 'x': unknown; did you mean 'address'\?"),
        ("[gateway\n", r"is not valid TOML"),
        ("[gateway]\nhost = '0.0.0.0'\n", r"gateway\.host = '0\.0\.0\.0': .*security\.internal_key"),
    ],
)
def test_mistakes_in_the_file_stop_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        loaded(config(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("HEADRACE_GATEWAY__PROT", r"gateway\.prot"),
        ("HEADRACE_GATWAY__PORT", r"gatway"),
        ("HEADRACE_NONSENSE", r"nonsense"),
        ("HEADRACE_GATEWAY__PORT__DEEP", r"gateway\.port"),
    ],
)
def test_mistakes_in_the_environment_stop_the_start(name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load("gateway", GatewaySettings, None, {name: "1"})


@pytest.mark.parametrize("key", ["4711471147114711", "1_000", "1e5", "0x10", "true", '"4711"', "plain"])
def test_a_key_from_the_environment_is_what_it_says(key: str) -> None:
    common, _ = loaded(HEADRACE_SECURITY__INTERNAL_KEY=key)
    assert common.security.internal_key.get_secret_value() == key.strip('"')


@pytest.mark.parametrize(
    "text",
    [
        "[security]\ninternal_key = 4711471147114711\n",
        "[security]\ninternal_kye = 'PLANTED'\n",
        "security = 'PLANTED'\nbus = 3\n",
        "[database]\nurl = 'postgresql://me:PLANTED@db/x'\nsize = 3\n",
        "[database]\nurl = ['postgresql://me:PLANTED@db/x']\n",
    ],
)
def test_a_mistake_about_a_secret_does_not_tell_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        loaded(config(tmp_path, text))
    assert "PLANTED" not in str(caught.value)
    assert "4711" not in str(caught.value)


def test_every_secret_of_the_settings_is_known_to_the_logs() -> None:
    common, settings = loaded(
        HEADRACE_SECURITY__INTERNAL_KEY="the-key", HEADRACE_DATABASE__URL="postgresql://me:p%40ss@db/x"
    )
    assert secrets_of(common, settings) == {"the-key", "p@ss", "p%40ss"}
    assert "the-key" not in repr(common)


def test_secrets_in_a_list_of_tables_are_known_as_well() -> None:
    class Endpoint(Section):
        key: SecretStr = SecretStr("")

    class House(Section):
        doors: tuple[Endpoint, ...] = ()

    assert secrets_of(House.model_validate({"doors": [{"key": "one"}, {}, {"key": "two"}]})) == {"one", "two"}


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SettingError, match=r"/does/not/exist.*cannot be read"):
        loaded(Path("/does/not/exist"))


def test_beyond_loopback_with_a_key_is_allowed() -> None:
    _, settings = loaded(HEADRACE_GATEWAY__HOST="0.0.0.0", HEADRACE_SECURITY__INTERNAL_KEY="k")
    assert settings.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("db", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("text", "wide", "outer"),
    [
        ("", (1000, "wide"), ("y", 5)),
        ("[gateway.wide]\n", (1000, "wide"), ("y", 5)),
        ("[gateway.wide]\nsize_max = 7\n", (7, "wide"), ("y", 5)),
        ("[gateway.outer.inner]\nkind = 'z'\n", (1000, "wide"), ("y", 5)),
        ("[gateway.outer]\nname = 'z'\n", (1000, "wide"), ("z", 5)),
    ],
)
def test_setting_one_value_of_a_section_leaves_its_others(
    tmp_path: Path, text: str, wide: tuple[int, str], outer: tuple[str, int]
) -> None:
    """A section may start with other values than its class has; writing down its name must not lose them."""
    _, settings = loaded(config(tmp_path, text))
    assert (settings.wide.size_max, settings.wide.kind) == wide
    assert (settings.outer.name, settings.outer.inner.size_max) == outer
    _, settings = loaded(config(tmp_path, "[gateway.deep.inner]\nkind = 'z'\n"))
    assert (settings.deep.inner.size_max, settings.deep.inner.kind, settings.deep.name) == (6, "z", "x")


def test_a_service_of_somebody_else_has_its_section_once_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name under the entry points `headrace.services` is all that it takes."""
    path = tmp_path / "headrace.toml"
    path.write_text("[echo]\nport = 1\n", encoding="utf-8")
    with pytest.raises(SettingError, match="echo"):
        load("gateway", ServiceSettings, path, {})
    path.write_text("services_elsewhere = ['echo']\n[echo]\nport = 1\n", encoding="utf-8")
    load("gateway", ServiceSettings, path, {})  # somebody says so
    path.write_text("[echo]\nport = 1\n", encoding="utf-8")
    plugins.install(tmp_path, "echo", {"headrace.services": {"echo": "echo_service:INFO"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    load("gateway", ServiceSettings, path, {})
    assert load("echo", ServiceSettings, path, {})[1].port == 1
