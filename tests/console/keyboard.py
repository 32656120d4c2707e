"""Tasks that use the keyboard alone, and pages with hostile texts, in a real Chromium: see `browser.py` for the
protocol.
"""

from __future__ import annotations

import re
import time
from typing import Any

from playwright.sync_api import Browser, Dialog, Page, Route
from playwright.sync_api import TimeoutError as NavigationTimeout

from tests.console.browser import log_in, opened, path_of, press_until, run

_FOREIGN_ELEMENTS = (
    "script:not([src^='/static/']), img, iframe, object, embed, base, style, [style], [onerror], [onload], [onclick],"
    " [hx-get]:not(#live), [hx-on], meta[http-equiv]:not(noscript *), svg:not(figure svg), math, video, audio,"
    " a[href^='java']"
)
"""CSS selector of elements that no page of the console contains."""
_INJECTED = f"() => [...document.querySelectorAll({_FOREIGN_ELEMENTS!r})].map((item) => item.outerHTML.slice(0, 80))"


def pairs(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Rate the pairs of a queue until none is left. Return the texts of A and B and the key that was pressed for each
    pair.
    """
    rated: list[list[str]] = []
    with opened(browser, task["url"]) as (page, observer):
        page.goto("/login")
        press_until(page, "item.id === text", "token")
        page.keyboard.type(task["user"])
        with page.expect_navigation():
            page.keyboard.press("Enter")
        follow(page, task["queue"])
        follow(page, "Rate the next item")
        keys = task["keys"]
        while page.locator("[aria-label='Your answer']").count() and len(rated) < task["most"]:
            sides = [page.locator(f"section[aria-label='{side}'] pre").inner_text() for side in ("A", "B")]
            key = keys[len(rated) % len(keys)]
            rated.append([path_of(page), *sides, key])
            with page.expect_navigation():
                page.keyboard.press(key)
        return {"rated": rated, "end": path_of(page), "errors": observer.errors}


def follow(page: Page, name: str) -> None:
    """Press the Tab key until the link or button with the text `name` has the focus, then press Enter."""
    press_until(page, "['A', 'BUTTON'].includes(item.tagName) && item.textContent.trim() === text", name)
    with page.expect_navigation():
        page.keyboard.press("Enter")


def questions(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Find the answer to each question from the first page with the keyboard alone. Return a problem per failed
    question.
    """
    problems = []
    with opened(browser, task["url"], java_script_enabled=task["script"]) as (page, observer):
        log_in(page, task["user"])
        for name, steps, pattern in task["questions"]:
            page.goto("/")
            try:
                for kind, target, *text in steps:
                    _take(page, kind, target, *text)
            except AssertionError as error:
                problems.append(f"{name}: {error}")
                continue
            content = page.locator("main").inner_text()
            if re.search(pattern, content) is None:
                problems.append(f"{name}: {path_of(page)} has no {pattern!r}: {content[:160]!r}")
        return {"problems": problems, "errors": observer.errors}


def _take(page: Page, kind: str, target: str, text: str = "") -> None:
    if kind == "follow":
        follow(page, target)
    elif kind == "address":  # a link by a part of its address
        press_until(page, "item.tagName === 'A' && item.getAttribute('href').includes(text)", target)
        with page.expect_navigation():
            page.keyboard.press("Enter")
    else:
        press_until(page, "item.id === text", target)
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(text)
        if kind == "enter":
            with page.expect_navigation():
                page.keyboard.press("Enter")


def keys(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Press each key of the pages. Return an entry for each key that has another effect than its description."""
    problems = []

    def expect(name: str, observed: object, expected: object) -> None:
        if observed != expected:
            problems.append(f"{name}: {observed!r} in place of {expected!r}")

    def open_by(*presses: str) -> str:
        try:
            with page.expect_navigation():
                for key in presses:
                    page.keyboard.press(key)
        except NavigationTimeout as error:
            return f"{path_of(page)}, no navigation: {error.message.splitlines()[0]}"
        return path_of(page)

    with opened(browser, task["url"]) as (page, observer):
        log_in(page, task["user"])
        for key, path in task["pages"].items():
            expect(f"g {key}", open_by("g", key), path)
        page.goto("/sessions")
        page.keyboard.press("/")
        page.keyboard.type("g?jsl")
        state = "[document.activeElement.id, document.activeElement.value, document.getElementById('shortcuts').open]"
        expect("/ and keys in a text field", [path_of(page), *page.evaluate(state)], ["/sessions", "q", "g?jsl", False])
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("?")
        dialog = page.locator("#shortcuts")
        expect("? and the heading of the dialog", dialog.get_by_role("heading").inner_text(), "Keys")
        expect("keys in the dialog", dialog.locator("kbd").all_inner_texts()[-3:-2], ["e"])
        page.keyboard.press("Escape")
        expect("Escape", dialog.is_visible(), False)
        rows = page.locator("[aria-label='Sessions'] tbody th a")
        second = rows.nth(1).get_attribute("href")
        expect("j j k j Enter", open_by("j", "j", "k", "j", "Enter"), second)
        expect("e", open_by("j", "e"), f"{second}/feedback")
        page.goto("/sessions")
        page.keyboard.press("?")
        page.locator("#single-keys").uncheck()
        dialog.get_by_role("button").click()
        for key in ("g", "l", "j", "?"):
            page.keyboard.press(key)
        expect("keys after they are switched off", [path_of(page), dialog.is_visible()], ["/sessions", False])
        return {"problems": problems, "errors": observer.errors}


def hostile(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Open pages with hostile texts.

    Return the effects of the texts, and the load time of the slowest page in seconds.
    """
    injected, slow, unready, executed = list[str](), list[tuple[float, str]](), list[str](), list[str]()

    def refuse(dialog: Dialog) -> None:
        executed.append(f"dialog {dialog.message}")
        dialog.dismiss()

    with opened(browser, task["url"]) as (page, observer):
        page.on("dialog", refuse)
        log_in(page, task["user"])
        for path in task["paths"]:
            began_s = time.monotonic()
            reply = page.goto(path, wait_until="load")
            slow.append((time.monotonic() - began_s, path))
            if reply is None or reply.status not in (200, 400, 404):
                unready.append(f"{path[:80]}: {reply.status if reply else 'no answer'}")
            if reply is not None and "html" in reply.headers.get("content-type", ""):  # a text has no elements
                injected += [f"{path[:80]}: {text}" for text in page.evaluate(_INJECTED)]
            marks = page.evaluate("[...(window.executed ? ['script'] : []), ...window.violations]")
            executed += [f"{path[:80]}: {text}" for text in marks]
        foreign = list(observer.foreign)
        planted = _planted(page, task["paths"][0], task["planted"])
    return {
        "pages": len(slow), "injected": injected, "executed": executed, "foreign": foreign, "unready": unready,
        "slowest": max(slow), "planted": planted,
    }  # fmt: skip


def _planted(page: Page, path: str, text: str) -> bool:
    """Show a text without escaping it, and return whether the checks notice it."""

    def plant(route: Route) -> None:
        if route.request.resource_type != "document":
            route.continue_()
            return
        reply = route.fetch()
        route.fulfill(response=reply, body=reply.text().replace("</main>", f"{text}</main>"))

    page.route("**/*", plant)
    page.goto(path)
    noticed = bool(page.evaluate(_INJECTED))
    page.unroute("**/*")
    return noticed


if __name__ == "__main__":
    run({"pairs": pairs, "questions": questions, "keys": keys, "hostile": hostile})
