"""Tests of settings: an unused setting prevents the start, with its name, its value and a remedy (P11).

Any settings file is read, or refused in one sentence that names the setting.
"""

from __future__ import annotations

import asyncio
import codecs
import os
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import AfterValidator, BaseModel, SecretStr

from headrace_broker.settings import BrokerSettings
from headrace_collector.settings import CollectorSettings
from headrace_console.settings import ConsoleSettings
from headrace_gateway.settings import GatewaySettings
from headrace_inference.settings import InferenceSettings
from headrace_judge.settings import JudgeSettings
from headrace_registry.settings import RegistrySettings
from headrace_runtime import check
from headrace_runtime.errors import SettingError
from headrace_runtime.main import secrets_of
from headrace_runtime.settings.reference import describe
from headrace_runtime.settings.sections import Common, Section, ServiceSettings, is_loopback, load
from headrace_runtime.settings.table import Fixed, parse_toml, plain_types
from headrace_runtime.settings.table import read as read_table
from headrace_runtime.storage.disk import data_folder
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from tests.support import packages


class Inner(Section):
    FIXED: ClassVar = {"depth_max": Fixed(8), "rate": Fixed(Fraction(1, 8))}
    PARAMETERS: ClassVar = ("names",)

    size_max: int = 10
    kind: str = "narrow"
    names: tuple[str, ...] = ("a",)


class Outer(Section):
    """Section inside a section. Both have their own defaults."""

    inner: Inner = Inner(size_max=5)
    name: str = "x"


def _even(number: int) -> int:
    if number % 2:
        raise ValueError("must be even")
    return number


class PlainSettings(ServiceSettings):
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


def loaded(path: Path | None = None, **environ: str) -> tuple[Common, PlainSettings]:
    return load("gateway", PlainSettings, path, environ)


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
        (
            "[gateway.inner]\ndepth_max = 9\n",
            r"depth_max = 9: is no setting any more, its value is fixed \(8\)",
        ),
        ("[gateway.inner]\nnames = ['b']\n", r"names = \['b'\]: is no setting any more"),
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


def test_a_former_setting_with_its_fixed_value_is_reported_and_ignored(tmp_path: Path) -> None:
    text = "[gateway.inner]\ndepth_max = 8.0\nrate = '1/8'\nnames = ['a']\n[gateway.outer.inner]\nrate = 0.125\n"
    common, settings = loaded(config(tmp_path, text))
    assert settings.inner == Inner()
    names = [note.split(" = ")[0].removeprefix("setting ") for note in common.notes]
    assert names == [f"gateway.{name}" for name in ("inner.depth_max", "inner.rate", "inner.names", "outer.inner.rate")]
    assert common.notes[0].endswith("depth_max = 8.0: is no setting any more, its value is fixed (8); remove it")
    assert "names" not in {doc.name for doc in describe(Inner)}


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
        load("gateway", PlainSettings, None, {name: "1"})


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


def test_what_is_no_small_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would block the start for ever, and `/dev/zero` fill the memory."""
    pipe, large = tmp_path / "pipe.toml", tmp_path / "large.toml"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 30)
    for path, problem in (
        (Path("/dev/zero"), "not a regular file"),
        (pipe, "not a regular file"),
        (large, "larger than"),
    ):
        with pytest.raises(SettingError, match=f"cannot be read: {problem}"):
            read_table(path, {})


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
    """A section may start with other values than the defaults of its class, and must keep them when one value is
    set."""
    _, settings = loaded(config(tmp_path, text))
    assert (settings.wide.size_max, settings.wide.kind) == wide
    assert (settings.outer.name, settings.outer.inner.size_max) == outer
    _, settings = loaded(config(tmp_path, "[gateway.deep.inner]\nkind = 'z'\n"))
    assert (settings.deep.inner.size_max, settings.deep.inner.kind, settings.deep.name) == (6, "z", "x")


def test_a_shared_value_holds_where_a_section_sets_none(tmp_path: Path) -> None:
    text = 'host = "::1"\nlease_s = 4\n[judge]\nlease_s = 5\n[gateway]\nport = 1\n[console]\nhost = "localhost"\n'
    path = config(tmp_path, text)
    needed = {"HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://x/v1", "HEADRACE_JUDGE__ENDPOINT__MODEL": "m"}
    common, judge = load("judge", JudgeSettings, path, needed)
    assert (judge.host, judge.lease_s, judge.retry_s) == ("::1", 5, 60)
    assert load("scorer", ScorerSettings, path, {"HEADRACE_RETRY_S": "7"})[1].lease_s == 4
    assert load("registry", RegistrySettings, path, {"HEADRACE_RETRY_S": "7"})[1].retry_s == 7
    assert [common.section_of(name, ServiceSettings).host for name in ("gateway", "console")] == ["::1", "localhost"]
    environ = {"HEADRACE_INFERENCE__WAITING_MAX": "3", "HEADRACE_INFERENCE__VLLM__WAITING_MAX": "9"}
    _, inference = load("inference", InferenceSettings, None, environ)
    engines = inference.model_dump()
    assert (engines["torch"]["waiting_max"], engines["vllm"]["waiting_max"]) == (3, 9)
    assert engines["torch"]["sequences_max"] == 64


def test_a_shared_address_beyond_loopback_needs_a_key_too(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"gateway\.host = '0\.0\.0\.0': listens beyond this machine without a key"):
        loaded(config(tmp_path, 'host = "0.0.0.0"\n'))


def test_a_service_of_somebody_else_has_its_section_once_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service of another package only needs a name under the entry points `headrace.services`."""
    path = tmp_path / "headrace.toml"
    path.write_text("[echo]\nport = 1\n", encoding="utf-8")
    with pytest.raises(SettingError, match="echo"):
        load("gateway", ServiceSettings, path, {})
    path.write_text("services_elsewhere = ['echo']\n[echo]\nport = 1\n", encoding="utf-8")
    load("gateway", ServiceSettings, path, {})  # somebody says so
    path.write_text("[echo]\nport = 1\n", encoding="utf-8")
    packages.install(tmp_path, "echo", {"headrace.services": {"echo": "echo_service:INFO"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    load("gateway", ServiceSettings, path, {})
    assert load("echo", ServiceSettings, path, {})[1].port == 1


WRONG = [
    "true",
    "inf",
    "-inf",
    "nan",
    "9" * 30,
    "-" + "9" * 30,
    '"\\u0000"',
    "[]",
    "[true]",
    "{}",
    "1e400",
    "-1",
    '"x"',
]
WRONG += [
    "1979-05-27T07:32:00Z",
    "1e12",
    "9000000000000",
    '"\\u001b[31m"',
    '["a", 1, true]',
    "9" * 5000,
    "[" * 50 + "]" * 50,
]
MODELS: dict[str, type[ServiceSettings]] = {
    "broker": BrokerSettings,
    "collector": CollectorSettings,
    "console": ConsoleSettings,
    "gateway": GatewaySettings,
    "inference": InferenceSettings,
    "judge": JudgeSettings,
    "registry": RegistrySettings,
    "scorer": ScorerSettings,
    "trainer": TrainerSettings,
}


def names(model: type[BaseModel], prefix: str = "") -> list[tuple[str, set[Any]]]:
    setting_names = []
    for name, field in model.model_fields.items():
        kinds = plain_types(field.annotation)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        setting_names.append((prefix + name, kinds))
        for section in inner if field.annotation in inner else ():
            setting_names += names(section, f"{prefix}{name}.")
    return setting_names


SETTINGS = [("gateway", name, kinds) for name, kinds in names(Common)]
SETTINGS += [(service, name, kinds) for service, model in MODELS.items() for name, kinds in names(model, f"{service}.")]


def read(tmp_path: Path, content: bytes, service: str = "gateway") -> str | None:
    """Return the error message for a settings file with `content`, or None if it is valid."""
    path = tmp_path / "headrace.toml"
    path.write_bytes(content)
    try:
        load(service, MODELS[service], path, {})
    except SettingError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("service", "name", "kinds"), SETTINGS, ids=[name for _, name, _ in SETTINGS])
def test_a_wrong_value_is_a_sentence(tmp_path: Path, service: str, name: str, kinds: set[Any]) -> None:
    for value in WRONG:
        sentence = read(tmp_path, f"{name} = {value}\n".encode(), service)
        if sentence is not None:
            assert name.split(".")[0] in sentence or "config" in sentence
            assert sentence.isprintable() or "\n" in sentence, sentence
            assert len(sentence) < 4_000
        if kinds & {int, float}:
            impossible = {"inf", "-inf", "nan", "1e400", "9" * 30, "-" + "9" * 30, "9" * 5000}
            impossible |= set() if bool in kinds else {"true"}
            impossible |= {"1e12", "9000000000000"} if name.endswith("_s") and not name.endswith("_per_s") else set()
            assert value not in impossible or sentence, f"{name} = {value[:20]} is accepted"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (codecs.BOM_UTF8 + b"[gateway]\nport = 8100\n", None),
        (b"[gateway]\r\nport = 8100\r\n", None),
        ("[gateway]\nport = 8100\n".encode("utf-16"), "UTF-16"),
        ("[gateway]\nport = 8100\n".encode("utf-16-le"), "UTF-16"),
        ('data_dir = "/tmp/müller"\n'.encode("latin-1"), "Latin-1"),
        (b"\xff\xfe\x00", "UTF-16"),
        (b"[gateway", "not valid TOML"),
        (b"a = " + b"[" * 100_000, "not valid TOML"),
        (b"a = " + b"9" * 5_000, "not valid TOML"),
        (bytes(range(128, 256)), "UTF-8"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_file_in_any_encoding_is_read_or_named(tmp_path: Path, content: bytes, words: str | None) -> None:
    sentence = read(tmp_path, content)
    assert (sentence is None) == (words is None), sentence
    if words and sentence:
        assert words in sentence


def test_a_byte_order_mark_changes_nothing() -> None:
    text = b"[gateway]\nport = 8100\n"
    assert parse_toml(codecs.BOM_UTF8 + text) == parse_toml(text) == {"gateway": {"port": 8100}}


@pytest.mark.parametrize(
    "folder",
    ["/proc/x", "/proc/self/x/y", "/dev/null", "/dev/null/x", "{file}", "{file}/x", "/" + "x" * 300, "/a\x00b"],
)
def test_an_impossible_data_dir_is_a_sentence(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("x")
    path = Path(folder.format(file=tmp_path / "file"))
    problems = asyncio.run(check.find_problems("gateway", Common(data_dir=path), None, None, bus=False))
    assert any(sentence.startswith("setting data_dir") for sentence in problems), problems
    with pytest.raises(SettingError, match="setting data_dir"):
        data_folder(path)
