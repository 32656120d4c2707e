"""P11: invalid settings stop the start, with the name of the setting and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_judge import app
from headrace_judge.rubric import load, load_all
from headrace_judge.settings import JudgeSettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.reference import describe
from headrace_runtime.settings.sections import load as load_settings
from tests.support.judge_rig import settings

CONFIGURED = {"HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://h/v1", "HEADRACE_JUDGE__ENDPOINT__MODEL": "m"}
CRITERION = '[[criteria]]\nname = "a"\ndescription = "A?"\n'


def loaded(**environ: str) -> JudgeSettings:
    return load_settings("judge", JudgeSettings, None, CONFIGURED | environ)[1]


def test_without_an_endpoint_the_judge_does_not_start() -> None:
    """Run the judge as a process, as a supervisor does: the exit status is 2, also with `--check-config`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-m", "headrace_judge", "--check-config"]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30, check=False)
    assert result.returncode == 2
    assert (
        "setting judge.endpoint.base_url = '': the judge has no endpoint; set judge.endpoint.base_url" in result.stderr
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HEADRACE_JUDGE__ENDPOINT__MODEL": ""}, r"judge\.endpoint\.model = '': the judge has no model"),
        ({"HEADRACE_JUDGE__ENDPOINT__BASE_URL": "localhost:8000"}, r"endpoint\.base_url = 'localhost:8000': must be"),
        ({"HEADRACE_JUDGE__SAMPLES": "3"}, r"judge\.samples = 3: .*raise the temperature"),
        ({"HEADRACE_JUDGE__ENDPOINT__CONCURENCY": "3"}, r"unknown; did you mean 'concurrency'"),
        ({"HEADRACE_JUDGE__ENDPOINT__EXTRA": "{n = 2, stream = true}"}, r"n, stream cannot be set here"),
        ({"HEADRACE_JUDGE__PAIRS__WINDOW_S": "1.0"}, r"judge\.pairs\.window_s = 1.0: is shorter than wait_s"),
        (
            {"HEADRACE_JUDGE__ENDPOINT__API_KEY": "k", "HEADRACE_JUDGE__ENDPOINT__API_KEY_ENV": "K"},
            r"judge\.endpoint\.api_key_env = 'K': api_key is set as well",
        ),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        loaded(**environ)


def test_a_configured_judge_is_accepted() -> None:
    assert loaded(HEADRACE_JUDGE__ENDPOINT__BASE_URL="http://h/v1/").endpoint.base_url == "http://h/v1"
    assert loaded().port == 8033
    own_temperature = {"HEADRACE_JUDGE__ENDPOINT__OMIT": '["temperature"]', "HEADRACE_JUDGE__SAMPLES": "3"}
    assert loaded(**own_temperature).samples == 3


def test_the_key_comes_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    named = settings("http://h/v1", endpoint={"api_key_env": "THE_JUDGES_KEY"}).endpoint
    monkeypatch.setenv("THE_JUDGES_KEY", "secret")
    assert app.api_key(named) == "secret"
    monkeypatch.delenv("THE_JUDGES_KEY")
    with pytest.raises(SettingError, match=r"api_key_env = 'THE_JUDGES_KEY': this environment variable is not set"):
        app.api_key(named)


def test_the_shipped_rubric_is_good() -> None:
    rubric = load("helpfulness")
    assert (rubric.name, rubric.mode, rubric.source) == ("helpfulness", "single", "judge:helpfulness")
    assert {"question", "tool_calls", "tool_results", "answer"} <= set(rubric.show)
    assert len(rubric.digest) == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not valid TOML"),
        ('name = "r"\ninstructions = "J"\n', "criteria: Field required"),
        (f'name = "R r"\ninstructions = "J"\n{CRITERION}', "name: String should match"),
        (f'name = "r"\ninstructions = "J"\nmood = "x"\n{CRITERION}', "mood: Extra inputs"),
        (f'name = "r"\ninstructions = "J"\n{CRITERION}{CRITERION}', "two criteria have one name"),
        (f'name = "r"\ninstructions = "J"\n{CRITERION}weight = 0\n', "criteria.0.weight"),
        (f'name = "r"\ninstructions = "J"\nshow = ["question"]\n{CRITERION}', "no output of the model"),
        (f'name = "r"\ninstructions = "J"\nshow = ["answers"]\n{CRITERION}', "show.0"),
        (f'name = "r"\ninstructions = "J"\nrun_chars_max = 5000\n{CRITERION}', "a quarter of run_chars_max"),
        (f'name = "r"\nmode = "both"\ninstructions = "J"\n{CRITERION}', "mode"),
    ],
)
def test_a_bad_rubric_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=message) as refusal:
        load(str(path))
    assert "judge.rubrics" in str(refusal.value)


def test_a_missing_rubric_lists_the_shipped_ones_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(SettingError, match="one of: helpfulness"):
        load("helpfullness")
    with pytest.raises(SettingError, match="another rubric is named 'helpfulness'"):
        load_all(["helpfulness", "helpfulness"])


def test_every_setting_says_what_it_is() -> None:
    assert [doc.name for doc in describe(JudgeSettings) if not doc.description] == []
