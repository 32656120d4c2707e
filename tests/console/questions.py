"""The ten questions of users, each answered from the first page with the keyboard, with and without JavaScript, and the
keys of the pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace_console.pages.frame import NAVIGATION
from tests.console.stack import MODEL, ConsoleStack
from tests.support import presence
from tests.system.program import Line, no_problems

PROGRAM = Path(__file__).with_name("keyboard.py")
Step = tuple[str, ...]


def lines(stack: ConsoleStack, version: str) -> Iterator[Line]:
    """Yield the result lines with and without JavaScript. `version` is a version that was rolled back."""
    _, response = stack.call("asked", value=0.0)
    task = {"task": "questions", "url": stack.url, "user": "ann"}
    for script, name in ((True, "by keyboard alone"), (False, "by keyboard alone, without JavaScript")):
        queries = questions(response, version, f"why{'' if script else '-plain'}")
        observed = presence.drive(PROGRAM, {**task, "script": script, "questions": queries})
        yield no_problems(f"of {len(queries)} questions, those not answered {name}", observed["problems"], 10)
        yield no_problems(f"errors in the browser's console, {name}", observed["errors"])
    pages = {key: path for _, path, key in NAVIGATION}
    observed = presence.drive(PROGRAM, {"task": "keys", "url": stack.url, "user": "ann", "pages": pages})
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
            rf"{MODEL}.*(learns|got worse|not shown to change|(no|only the first) version has an audit score"
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
