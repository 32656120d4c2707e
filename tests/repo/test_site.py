"""Tests of the documentation site before its build: navigation, links, resources, conversion of pages, and figures.

`make docs` builds the site in a separate environment and checks the output.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from starlette.applications import Starlette

from docs.site import check, openapi, results
from docs.site.assemble import (
    CONFIG,
    FRONT,
    ROOT,
    index_for_models,
    links,
    navigation,
    outside_code,
    page_text,
    pages,
    shown_as,
)
from headrace_gateway import http as gateway_http
from headrace_gateway.settings import GatewaySettings
from headrace_registry.pages.catalog_api import CatalogApi
from headrace_registry.pages.registry_api import RegistryApi
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_runtime.http import web

FOLDERS = {"docs/decisions/index.md": "docs/decisions"}
"""Pages of the navigation that are listings of a folder, made when the site is built."""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_navigation_names_pages_that_exist_each_once() -> None:
    navigation_pages = navigation()
    assert len(set(navigation_pages)) == len(navigation_pages)
    assert [
        page for page in navigation_pages if page not in pages() and not Path(ROOT, FOLDERS.get(page, "no")).is_dir()
    ] == []
    assert navigation_pages[0] == FRONT


def test_every_page_is_two_clicks_from_the_front_page() -> None:
    """The navigation is on each page, and a page outside the navigation is linked from a page in it."""
    first = set(navigation())
    second = set(first)
    for page in first & set(pages()):
        second |= {link.page for link in links(page, read(page))}
    for listing in first & FOLDERS.keys():
        second |= {page for page in pages() if page.startswith(f"{FOLDERS[listing]}/")}
    assert [page for page in pages() if page not in second] == []


def test_no_page_loads_anything_from_elsewhere() -> None:
    pattern = re.compile(r"!\[[^\]]*\]\(https?:|<(?:img|script|link|iframe)\b[^>]*(?:src|href)=.https?:")
    assert [(page, match[0]) for page in pages() for match in outside_code(read(page), pattern)] == []


def test_the_site_is_set_to_load_nothing_from_elsewhere() -> None:
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & config.keys()


def test_what_the_tests_read_of_a_fence_the_site_does_not_show() -> None:
    page = "docs/gate.md"
    text = page_text(
        page, "```python stack\nx\n```\n```toml file=a/b.toml\n```\n[code](../gateway/README.md#urls) `[no](x.py)`\n"
    )
    assert text == (
        '```python\nx\n```\n```toml title="a/b.toml"\n```\n[code](../gateway/README.md#urls) `[no](x.py)`\n'
    )


def test_a_link_to_code_leads_to_a_page_that_shows_it() -> None:
    text = page_text("docs/gate.md", "[it](../gateway/src/headrace_gateway/app.py) and [all](decisions)")
    assert text == "[it](../gateway/src/headrace_gateway/app_py.md) and [all](decisions/index.md)"
    assert shown_as(".env.example") == "_env_example.md"


def test_figures_are_those_of_the_one_file() -> None:
    values, texts = results.results(), results.templates()
    wrong = [page for page in results.PAGES if results.written(read(page), values, texts) != read(page)]
    assert not wrong, "run python -m docs.site.results"
    named = results.named(texts).keys()
    value_paths = {".".join(path) for path, _ in results.paths(values)}
    spreads = {path.rpartition(".")[0] for path in value_paths} & named  # median, least and most of one name
    assert {path if path in named else path.rpartition(".")[0] for path in value_paths} == named
    assert not spreads & value_paths, "each value is named by a template"
    blocks = [match[2] for page in pages() for match in results.BLOCK.finditer(read(page))]
    assert sorted(blocks) == sorted(texts), "each template stands on one page"


def test_only_listed_pages_have_figures() -> None:
    assert [page for page in pages() if results.BLOCK.search(read(page))] == sorted(results.PAGES)


def test_a_figure_that_is_not_there_is_named() -> None:
    page = "<!-- results: chaos -->\n7 lost\n<!-- end of results -->\n"
    texts = {"chaos": "{chaos.kafka.lost:,} lost\n"}
    assert results.written(page, {"chaos": {"kafka": {"lost": 1234}}}, texts).splitlines()[1:] == [
        "1,234 lost",
        "<!-- end of results -->",
    ]
    with pytest.raises(KeyError, match=r"kafka\.lost: results\.toml has no such value"):
        results.written(page, {"chaos": {"kafka": {}}}, texts)
    with pytest.raises(KeyError, match=r"results: chaos: templates\.toml has no such text"):
        results.written(page, {}, {})


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(0.4949, "p", "49"), (1485.8, ",.0f", "1,486"), ("0 of 3269 in 12 s", ",", "0 of 3,269 in 12 s"), ("5", "", "5")],
)
def test_how_a_figure_is_shown(value: object, form: str, text: str) -> None:
    assert results.as_text(value, form) == text


def test_a_report_gives_what_pages_name(tmp_path: Path) -> None:
    report = tmp_path / "attack.json"
    lines = [{"what": "flips", "figure": f"{number} of 9", "holds": True} for number in range(2)]
    broken = [{"what": "played to its end", "figure": "TimeoutError", "holds": False}]
    attacks = {"spool_flips": {"lines": lines}, "secrets": {"lines": broken}}
    report.write_text(json.dumps({"attacks": attacks}), encoding="utf-8")
    values: dict[str, Any] = {"attack": {"spool_flips": {"0": "7 of 9"}, "secrets": {"0": "0 of 4"}}}
    names = dict.fromkeys(["attack.spool_flips.1", "attack.secrets.0", "chaos.kafka.load_s"])
    assert results.take(report, values, names) == ["attack.secrets.0"], "it stays as it was"
    assert values["attack"] == {"spool_flips": {"0": "7 of 9", "1": "1 of 9"}, "secrets": {"0": "0 of 4"}}
    assert tomllib.loads(results.as_toml(values)) == values


def test_reports_are_read_as_their_targets_write_them(tmp_path: Path) -> None:
    """Each report has the format that its target writes, with only the values that pages name."""
    simulation_report = {"faults": {"kill": 2, "stop": 3}, "checks": {"p1": 4}, "failed": [{"seed": 1}], "seeds": 5}
    learned = [
        {"name": f"left by a correction: batch of 8, after {after}: weights", "value": value}
        for after, value in ((0, 0.1), (20, 0.02), (20, 0.07))
    ]
    reports: dict[str, Any] = {
        "simulation": simulation_report,
        "demo": {"seed": 1, "before": 0.25},
        "learning": {"after": 20, "lines": learned},
        "bench-trainer": {"peers": [{"model": "demo", "length": 512, "mixed": False, "ratio": 1.5}]},
        "compose": {"images": {"trainer": {"added_mb": 900}, "gateway": {"added_mb": 40}}},
        "bench-bus": {
            "rates": {
                "record": {"bytes": 1},
                "embedded": {"per_s": {"bulk": {"best": 5}}},
                "kafka": {"per_s": {"bulk": {"best": 10}}},
            }
        },
    }
    expected = {
        "simulation.total.faults": 5,
        "simulation.total.failed": 1,
        "simulation.seeds": 5,
        "demo.1.before": 0.25,
        "learning.left.training.most": 0.07,
        "learning.left.the first batch.least": 0.1,
        "bench-trainer.peers.demo, all 512.ratio": 1.5,
        "compose.added_mb.most": 40,
        "bench-bus.share_of_kafka.bulk": 0.5,
    }
    values: dict[str, Any] = {}
    for target, report in reports.items():
        path = tmp_path / f"{target}.json"
        path.write_text(json.dumps(report), encoding="utf-8")
        assert results.take(path, values, dict.fromkeys(expected)) == []
    assert {name: results.at(values, name) for name in expected} == expected


def test_decisions_are_numbered_without_gaps() -> None:
    decisions = list((ROOT / "docs" / "decisions").glob("0*.md"))
    numbers = [path.name[:4] for path in decisions]
    assert sorted(numbers) == [f"{number:04}" for number in range(1, len(numbers) + 1)]
    for path in decisions:
        assert path.read_text(encoding="utf-8").startswith(f"# {int(path.name[:4])}. "), path.name


def test_the_check_of_the_built_site_sees_what_is_wrong(tmp_path: Path) -> None:
    for name, text in {
        "index.html": '<a href="a/">a</a><script src="https://cdn.example/x.js"></script>',
        "a/index.html": '<a href="../b/index.html">b</a>',
        "b/index.html": '<a href="../c/#there">c</a>',
        "c/index.html": "",
        "lost/index.html": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    built = check.read(tmp_path)
    assert check.clicks(built) == {"index.html": 0, "a/index.html": 1, "b/index.html": 2, "c/index.html": 3}
    assert check.elsewhere(built) == ["https://cdn.example/x.js"]
    assert check.unbuilt("- [A](a/): text\n- [D](d/)\n- [Front](./)\n", built) == ["d/"]


def test_llms_txt_lists_the_pages_of_the_navigation_with_what_they_are_about() -> None:
    lines = index_for_models().splitlines()
    assert lines[:3] == ["# Headrace", "", "> Your agent gets better from its own traffic."]
    assert len([line for line in lines if line.startswith("- ")]) == len(navigation())
    (gate,) = [line for line in lines if "(docs/gate/)" in line]
    assert re.fullmatch(r"- \[The gate\]\(docs/gate/\): [A-Z][^*`]{20,}\.", gate)
    assert "- [Gateway](gateway/): " in "\n".join(lines)


def test_what_builds_the_site_is_pinned_with_hashes_and_names_no_host() -> None:
    lock = read("requirements/docs.lock")
    entries = re.split(r"\n(?=\w)", lock.strip())
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in lock
    group = tomllib.loads(read("pyproject.toml"))["dependency-groups"]["docs"]
    assert set(group) <= {entry.split("==")[0] for entry in entries}


def _rows(routes: list[Any]) -> set[tuple[str, str]]:
    """Return the method and path of each route, without path converters and without the HEAD of a GET."""
    return {
        (method, re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path))
        for route in routes
        for method in route.methods - {"HEAD"}
    }


def test_openapi_has_each_route_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    applications: list[Starlette] = []
    make = web.app

    def keep(*arguments: Any, **options: Any) -> Starlette:
        applications.append(make(*arguments, **options))
        return applications[-1]

    monkeypatch.setattr(web, "app", keep)
    gateway_http.application(gateway_http.Parts(GatewaySettings(), Mock(), Mock(), Mock(), Mock(), Mock()))
    assert _rows(list(applications[0].routes)) == openapi.GATEWAY.keys()


def test_openapi_has_each_route_of_the_registry() -> None:
    apis = (RegistryApi(*[Mock()] * 5), CatalogApi(*[Mock()] * 6), RolloutApi(*[Mock()] * 4))
    application = web.app({}, [route for api in apis for route in api.routes()])
    assert _rows(list(application.routes)) == openapi.REGISTRY.keys()


@pytest.mark.parametrize(("name", "text"), openapi.documents().items())
def test_openapi_documents_are_committed_and_complete(name: str, text: str) -> None:
    assert read(f"docs/reference/{name}") == text, "run `make schemas`"
    document = json.loads(text)
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert references <= document["components"]["schemas"].keys()
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations) > 15
    assert all(re.fullmatch(r"[A-Z].{8,}\.", each["summary"]) for each in operations)
