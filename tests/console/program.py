"""Tests of the console on running stacks: pages in a real browser, decisions, reasons for missing training, kills.

Every page is opened, the ten questions of users are answered by the keyboard, and the registry executes decisions. The
program also takes the console's pictures.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
from PIL import Image
from starlette.routing import Route

from headrace.rollouts import Rollouts
from headrace_console.app import Console
from headrace_console.pages.frame import NAVIGATION
from headrace_console.settings import ConsoleSettings
from headrace_operations.supervisor import read
from headrace_runtime.clock import SystemClock
from headrace_runtime.settings.sections import Common
from headrace_schemas.http.catalog import AuditList
from headrace_schemas.http.registry_api import VersionState
from headrace_schemas.http.stack_access import make_login_token
from tests.console import causes, kills
from tests.console.stack import BATCHES, MODEL, USERS, ConsoleStack, console_stack, hostile_lines, pair_lines
from tests.support import presence, tiny_model
from tests.support.processes import wait_until
from tests.system.program import Line, Program, Run, at_most, caught, equals, no_problems, none_of

BROWSER = Path(__file__).with_name("browser.py")
_VERSIONS = 4
_WAIT_S = 180.0
_NO_PAGES = ("/health", "/metrics", "/login", "/static/{name}", "/live", "/{path:path}")
_REASON = "seen in the browser"
KEYBOARD = Path(__file__).with_name("keyboard.py")
Step = tuple[str, ...]


def settings(base: Path) -> dict[str, object]:
    """Return the settings of a stack with two users, whose rollouts begin at once and never end by themselves."""
    users = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "role": role}
        for name, role in USERS.items()
    ]
    return {**BATCHES, "trainer.base": str(base), "console.users": users}


def page_lines(folder: Path, base: Path) -> Iterator[Line]:
    """Yield the result lines of the pages and of the decisions."""
    with console_stack(folder, settings(base)) as stack:
        stack.supervisor.wait_ready(180)
        make_versions(stack)
        stack.send_garbage(3)  # so that the pages of dead letters have content
        candidates = [version for version in versions(stack) if version.state == "registered"][::-1]
        rollout = begin_rollout(stack, candidates[0].id)
        with LiveTraffic(stack):
            observed = presence.drive(
                BROWSER, {"task": "pages", "url": stack.url, **_pages(stack, candidates[1], rollout)}
            )
        yield from _page_lines(observed)
        yield from _decision_lines(stack, candidates, rollout)
        yield from question_lines(stack, candidates[-1].id)


def make_versions(stack: ConsoleStack) -> None:
    """Let the trainer make versions, which wait because the model is paused.

    Every task is played twice in a batch: the only run of a task has no advantage, and steps that leave the weights
    unchanged make no version.
    """
    stack.call("task of the first version")
    with stack.registry() as registry:
        registry.pause(MODEL, reason="decisions are made in the browser")
    for number in range(4 * _VERSIONS):
        stack.call(f"task {number % 2}")
    wait_until(lambda: len(versions(stack)) > _VERSIONS, _WAIT_S, f"{_VERSIONS} versions are registered")


def versions(stack: ConsoleStack) -> tuple[VersionState, ...]:
    """Return the versions, the newest first."""
    with stack.registry() as registry:
        return registry.versions(MODEL)


def begin_rollout(stack: ConsoleStack, version: str) -> str:
    """Begin a canary and return its id once the version gets traffic."""
    with stack.registry() as registry:
        rollouts = Rollouts(registry)
        rollouts.begin(MODEL, version, reason="to be decided in the browser")
        wait_until(
            lambda: (rollout := rollouts.newest_of(MODEL, version)) is not None and rollout.phase == "canary",
            _WAIT_S,
            f"the rollout of {version} is under way",
        )
        rollout = rollouts.newest_of(MODEL, version)
        assert rollout is not None
        return rollout.id


class LiveTraffic:
    """Agent that makes calls during the block, so that live pages change."""

    def __init__(self, stack: ConsoleStack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._call, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _call(self) -> None:
        while not self._stop.wait(0.5):
            self._stack.call("live", purpose="eval")


def _pages(stack: ConsoleStack, version: VersionState, rollout: str) -> dict[str, Any]:
    console = Console(Common(data_dir=stack.folder / "routes"), ConsoleSettings(), SystemClock())
    routes = [route for route in console.app.routes if isinstance(route, Route) and route.path not in _NO_PAGES]
    path = f"/models/{MODEL}/{version.id.partition('@')[2]}"
    session, response = stack.call("found by its ids")
    return {
        "searched": [session, response, version.id],
        "targets": [f"/r/{response}"],  # an address that a client's log has, and no page
        "login": stack.login_path(),
        "viewer": "eve",
        "operator": "ann",
        "routes": [route.path_regex.pattern for route in routes if "GET" in (route.methods or ())],
        "changes": [f"{path}/promote", f"{path}/withdraw", f"/rollouts/{rollout}/stop"],
    }


def _page_lines(observed: dict[str, Any]) -> Iterator[Line]:
    pages = observed["pages"]
    yield equals(
        "login by the printed address: path, token left in the address, heading",
        observed["login"],
        ["/", False, "Loop"],
    )
    yield equals("the same address once more", observed["replay"], 401)
    yield no_problems("routes that no link leads to", observed["unlinked"])
    yield no_problems("ids that the search box does not find", observed["not_found"])
    yield none_of("pages without one main heading", sum(page["headings"] != 1 for page in pages), len(pages))
    yield no_problems("violations of axe-core, on every page in two themes", _listed(pages, "axe"))
    wide = [f"{page['path']}: {page['overflow_px']} px" for page in pages if page["overflow_px"] > 0]
    yield no_problems("pages that scroll sideways at 320 px", wide)
    yield no_problems("sessions whose first words are outside a page of 320 px", _listed(pages, "hidden_names"))
    yield no_problems("controls that the tabulator key does not reach", _listed(pages, "unreached"))
    yield no_problems("focused controls without a visible ring", _listed(pages, "without_ring"))
    yield no_problems("violations of the Content Security Policy", _listed(pages, "policy"))
    yield no_problems("errors in the browser's console", observed["errors"])
    yield no_problems("requests to other origins", observed["foreign"])
    yield equals(
        "focus, open details and scroll position after a live refresh",
        observed["refresh"]["after"],
        observed["refresh"]["before"],
    )
    plain = [f"{path}: {status}" for path, status, length in observed["plain"] if status != 200 or length < 40]
    yield no_problems("pages that cannot be read without JavaScript", plain)
    yield equals("an item rated without JavaScript, and the next one shown", observed["plain_rating"], True)
    yield equals("theme chosen without JavaScript", observed["plain_theme"], "dark")
    yield no_problems("forms of decisions that a viewer sees", observed["viewer_forms"])
    yield equals("answers to decisions that a viewer sends anyway", sorted(set(observed["viewer_posts"])), [403])
    planted = observed["planted"]
    for fault, field in (
        ("an image without a text", "axe"),
        ("an inline script", "policy"),
        ("a wide picture", "overflow_px"),
        ("a button that the tabulator key skips", "unreached"),
    ):
        yield caught(fault, by_the_suite=bool(planted[field]))


def _listed(pages: list[dict[str, Any]], field: str) -> list[str]:
    return [f"{page['path']}: {problem}" for page in pages for problem in page[field]]


def _decision_lines(stack: ConsoleStack, candidates: list[VersionState], rollout: str) -> Iterator[Line]:
    """Decide in the browser, then check in the registry the decisions, their authors and reasons."""
    held, chosen, rolled, promoted = (version.id for version in (*candidates[:2], candidates[-1], candidates[2]))
    button = "Hold: no more traffic"
    yield _decide(stack, "hold a rollout, by keyboard", f"/rollouts/{rollout}", button, held, "hold")
    path, button = f"/rollouts/{begin_rollout(stack, chosen)}", "Promote now, without further evidence"
    yield _decide(stack, "promote a rollout, by keyboard", path, button, chosen, "promoted")
    path, button = f"/rollouts/{begin_rollout(stack, rolled)}", "Roll back for good, with its descendants"
    yield _decide(stack, "roll a rollout back, without JavaScript", path, button, rolled, "roll_back", script=False)
    path, button = f"/models/{MODEL}/{promoted.partition('@')[2]}", "Make it the next candidate at the gate"
    yield _decide(stack, "promote a version, by keyboard", path, button, promoted, "promote")


def _decide(
    stack: ConsoleStack, name: str, path: str, button: str, version: str, decision: str, *, script: bool = True
) -> Line:
    task = {"task": "decide", "url": stack.url, "user": "ann", "path": path, "button": button, "reason": _REASON}
    observed = presence.drive(BROWSER, {**task, "script": script})
    expected = (decision, "ann", True)
    deadline = time.monotonic() + 10
    while (seen := _decisions(stack, version)) and expected not in seen and time.monotonic() < deadline:
        time.sleep(0.2)
    return Line(
        name,
        f"{decision if expected in seen else seen}, {observed['problem'] or 'no problem'}",
        f"{decision} by ann with the reason, no problem",
        expected in seen and not observed["problem"] and not observed["errors"],
        observed,
    )


def _decisions(stack: ConsoleStack, version: str) -> list[tuple[str, str, bool]]:
    """Return all decisions about a version: kind, author, and whether the reason is the one entered in the browser.

    The registry itself promotes a version on a user's request, so that the audit log alone names the user.
    """
    events = next((state.decisions for state in versions(stack) if state.id == version), ())
    with stack.registry() as registry:
        audited = registry.ask("GET", f"/v1/audit?model={MODEL}", AuditList).data
    requests = [entry for entry in audited if entry.version == version]
    return [
        *((entry.action, entry.who, entry.why == _REASON) for entry in requests),
        *(
            (kind, event.who or "", _REASON in (event.reason or ""))
            for event in events
            for kind in filter(None, (event.decision, event.rollout.kind if event.rollout else None))
        ),
    ]


def question_lines(stack: ConsoleStack, version: str) -> Iterator[Line]:
    """Yield the result lines with and without JavaScript. `version` is a version that was rolled back."""
    _, response = stack.call("asked", value=0.0)
    task = {"task": "questions", "url": stack.url, "user": "ann"}
    for script, name in ((True, "by keyboard alone"), (False, "by keyboard alone, without JavaScript")):
        queries = questions(response, version, f"why{'' if script else '-plain'}")
        observed = presence.drive(KEYBOARD, {**task, "script": script, "questions": queries})
        yield no_problems(f"of {len(queries)} questions, those not answered {name}", observed["problems"], 10)
        yield no_problems(f"errors in the browser's console, {name}", observed["errors"])
    pages = {key: path for _, path, key in NAVIGATION}
    observed = presence.drive(KEYBOARD, {"task": "keys", "url": stack.url, "user": "ann", "pages": pages})
    yield no_problems("keys with another effect than their description", observed["problems"], len(pages) + 7)
    yield no_problems("errors in the browser's console after keys", observed["errors"])


def questions(response: str, version: str, queue: str) -> list[tuple[str, list[Step], str]]:
    """Return each question with the links to follow from the first page, and a pattern of the answer.

    Args:
        response: response id of a call.
        version: a version that was rolled back.
        queue: name of a review queue that does not exist yet.
    """
    search = ("enter", "q", response)
    digest = version.partition("@")[2]
    model = [("follow", "Models"), ("follow", MODEL)]
    return [
        (
            "Is it learning?",
            [],
            rf"{MODEL}.*(learns|has learned|got worse|not shown to change"
            r"|(no|only the first) version has an audit score"
            r"|the first version is the champion)",
        ),
        ("Why does nothing train?", [("follow", "Why")], r"What to do|being trained|No cause was found"),
        ("What did this user see, which weights answered?", [search], rf"{MODEL}@(?s:.*)hello"),
        ("Why was this version refused?", [*model, ("address", digest)], r"was (taken back|refused|withdrawn)"),
        ("Should I promote?", [("follow", "Rollouts"), ("address", "/rollouts/")], r"Rule: (?s:.*)evidence"),
        (
            "What should this answer have been?",
            [search, ("follow", "Score or edit this turn"), ("type", "text", "Ada."), ("follow", "Send the edit")],
            r"Edit sent",
        ),
        ("Which reward is broken, who disagrees?", [("follow", "Rewards")], r"parse error(?s:.*)function:"),
        ("What taught this version?", [*model, ("address", digest), ("follow", "Learned from")], r"pushed up"),
        (
            "What was refused, can it go back?",
            [("follow", "Dead letters"), ("address", "/dead-letters/group"), ("address", "/dead-letters/plan")],
            r"would be retried",
        ),
        (
            "What is there for me to rate, do we agree?",
            [
                ("follow", "Review"), ("follow", "Make a queue"), ("type", "name", queue), ("type", "rubric", "Good?"),
                ("follow", "Make the queue"), ("follow", "Rate the next item"), ("follow", "1 bad"),
                ("follow", "Back to the queue"), ("follow", "Agreement of the raters"),
            ],
            r"Krippendorff",
        ),
    ]  # fmt: skip


PARTS: dict[str, Callable[[Path, Path], Iterator[Line]]] = {
    "browser": page_lines,
    "pairs": pair_lines,
    "hostile": hostile_lines,
    "causes": causes.lines,
    "kills": kills.lines,
}
"""Parts by name. Each part gets its own folder and the folder of a base model."""
_WITHOUT_BROWSER = ("causes", "kills")
_PICTURE_BYTES_MAX = 100_000
PICTURES = (("console", "/", 664),)
"""Name of the file, path of the page, and height of the screenshot in CSS pixels."""
_WIDTH, _SCALE, _COLOURS = 1000, 1.5, 48


def play(run: Run) -> None:
    if run.options.pictures is not None:
        paths = take_pictures(run.options.pictures, run.options.data_dir)
        run.add(*(at_most(f"bytes of {path.name}", path.stat().st_size, _PICTURE_BYTES_MAX) for path in paths))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    base = tiny_model.build(run.folder / "base", seed=run.seed % 1000)
    for name in run.options.only:
        if name not in _WITHOUT_BROWSER and (reason := presence.missing_browser()):
            run.skip(f"{name}, in a browser", reason)
            continue
        run.add_all(PARTS[name](run.folder / name, base))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--pictures", type=Path, help="only write pictures of a running stack into this folder")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(".headrace/demo"),
        help="data directory of that stack (default: %(default)s)",
    )


PROGRAM = Program("Open the console of running stacks in a browser.", play, _add_arguments)


def take_pictures(folder: Path, data_dir: Path) -> list[Path]:
    """Write screenshots of the stack with the data directory `data_dir` to `folder`, in the light theme and with few
    colours.
    """
    task = {
        "task": "pictures",
        "url": read(data_dir).services["console"].url,
        "login": f"/login?token={make_login_token(data_dir)}",
        "pictures": PICTURES,
        "folder": str(folder.absolute()),
        "width": _WIDTH,
        "scale": _SCALE,
    }
    paths = [Path(path) for path in presence.drive(BROWSER, task)["written"]]
    for path in paths:
        with Image.open(path) as picture:
            reduced = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
    return paths
