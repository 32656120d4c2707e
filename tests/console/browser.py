"""The console in a real Chromium: `.venv-browser/bin/python -m tests.console.browser < task.json`.

Reads one task, `{"task": "pages" or "decide" or "pictures", "url": ..., ...}`, and prints its observations as JSON. It
needs Playwright and axe, and no package of Headrace.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request, Response, Route, sync_playwright

CHROMIUM = "/usr/bin/chromium"
THEMES = ("light", "dark")
NARROW = {"width": 320, "height": 640}
WIDE = {"width": 1200, "height": 800}
_OPERABLE = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']"
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(
  `${event.effectiveDirective} ${event.blockedURI}`));
"""
_PAUSE = 'localStorage.setItem("headrace-paused", "yes");'
_LIST_OPERABLE = """(selector) => {
  window.operable = [...document.querySelectorAll(selector)].filter((item) => !item.disabled && item.checkVisibility());
  return window.operable.map((item) => `${item.tagName} ${item.id || item.textContent.trim().slice(0, 40)}`);
}"""
_FOCUS = """() => {
  const item = document.activeElement, style = getComputedStyle(item);
  return [window.operable.indexOf(item), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0];
}"""
_LIST_HIDDEN_NAMES = """() => {
  const links = [...document.querySelectorAll("tbody th a")], width = document.documentElement.clientWidth;
  return links.filter((link) => link.getBoundingClientRect().right > width).map((link) => link.textContent);
}"""
_PLANTED = """<script>window.planted = 1</script><img src="http://other.example/x.png">
<svg width="900" height="9"></svg>
<button tabindex="-1">never reached</button></main>"""


class Observer:
    """Recorder of requests to other origins and of JavaScript errors on the pages of one browser context."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self._origin = urlsplit(url).netloc
        context.add_init_script(_WATCH)
        context.on("request", self._note)
        context.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        context.on("weberror", lambda error: self.errors.append(str(error.error)))

    def _note(self, request: Request) -> None:
        if urlsplit(request.url).netloc != self._origin:
            self.foreign.append(request.url)


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[tuple[Page, Observer]]:
    """Open a page in a new context of the browser."""
    context = browser.new_context(base_url=url, viewport=options.pop("viewport", WIDE), **options)
    try:
        yield context.new_page(), Observer(context, url)
    finally:
        context.close()


def log_in(page: Page, token: str) -> None:
    page.goto("/login")
    page.fill("#token", token)
    with page.expect_navigation():  # keys that are pressed on the way to the next page are lost
        page.click("main button")


def examine(page: Page, path: str) -> dict[str, Any]:
    """Check a page with axe, at the width of a phone and with the Tab key, and return the observations."""
    reply = page.goto(path)
    assert reply is not None
    page.wait_for_load_state("networkidle")
    axe: list[str] = []
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        axe += [
            f"{theme} {item['id']}: {item['nodes'][0]['html'][:100]}" for item in Axe().run(page).response["violations"]
        ]
    page.set_viewport_size(NARROW)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    hidden_names = page.evaluate(_LIST_HIDDEN_NAMES) if path.startswith("/sessions") else []
    page.set_viewport_size(WIDE)
    unreached, without_ring = walk(page)
    return {
        "path": path, "status": reply.status, "headings": page.locator("h1").count(), "axe": axe,
        "overflow_px": overflow, "hidden_names": hidden_names, "unreached": unreached, "without_ring": without_ring,
        "policy": page.evaluate("window.violations"),
    }  # fmt: skip


def walk(page: Page) -> tuple[list[str], list[str]]:
    """Press the Tab key from the start of the page. Return the elements that it did not reach, and those without
    visible focus.
    """
    names = page.evaluate(_LIST_OPERABLE, _OPERABLE)
    page.evaluate("document.activeElement.blur()")
    reached, without_ring = set[int](), []
    for _ in range(len(names) + 5):
        page.keyboard.press("Tab")
        number, has_ring = page.evaluate(_FOCUS)
        reached.add(number)
        if number >= 0 and not has_ring:
            without_ring.append(names[number])
    return [name for number, name in enumerate(names) if number not in reached], without_ring


def search(page: Page, texts: list[str]) -> tuple[list[str], list[str]]:
    """Enter each text in the search box.

    Returns:
        The texts that opened no page within ten seconds, and the paths that the others opened.
    """
    lost, targets = [], []
    for text in texts:
        for _ in range(20):  # the console reads the topics with a delay
            page.goto("/models")
            page.fill("#q", text)
            with page.expect_navigation() as navigation:
                page.press("#q", "Enter")
            if navigation.value.ok:
                request = navigation.value.request
                while request.redirected_from is not None:
                    targets.append(urlsplit(request.url).path)
                    request = request.redirected_from
                targets.append(f"{urlsplit(request.url).path}?{urlsplit(request.url).query}")
                break
            page.wait_for_timeout(500)
        else:
            lost.append(text)
    return lost, targets


def path_of(page: Page) -> str:
    """Return the path of the page's current address."""
    path: str = urlsplit(page.url).path
    return path


def make_queue(page: Page) -> str:
    """Create a review queue of sessions with the reviewer's form, and return its path."""
    page.goto("/review/new")
    page.fill("#name", "help")
    page.fill("#rubric", "Did the answer help?")
    page.get_by_role("button", name="Make the queue").click()
    return path_of(page)


def rate(page: Page, queue: str) -> str:
    """Rate an item with the key 1, or with the form if JavaScript is off, and return the path of the next page."""
    first = next_item(page, queue)
    if page.locator("#keys[hidden]").count() == 0:  # a script shows it
        with page.expect_navigation():
            page.keyboard.press("1")
    else:
        page.locator("button[name=answer]").first.click()
    following = path_of(page)
    return following if following not in (queue, first) else queue


def next_item(page: Page, queue: str) -> str:
    """Open the next item of the queue and return its path, or the queue's path if none appears in ten seconds."""
    for _ in range(20):  # the console reads the topics with a delay
        page.goto(queue)
        page.get_by_role("button", name="Rate the next item").click()
        if path_of(page) != queue:
            break
        page.wait_for_timeout(500)
    return path_of(page)


def crawl(page: Page, routes: list[str], targets: list[str]) -> dict[str, str]:
    """Follow links from `/` and `targets`. Return one reached path for each of `routes`."""
    paths: dict[str, str] = {}
    queue = ["/", *targets]
    while queue:
        path = queue.pop(0)
        route = next((route for route in routes if re.fullmatch(route, urlsplit(path).path)), "")
        if not route or route in paths:
            continue
        paths[route] = path
        page.goto(path)
        links = page.evaluate("[...document.querySelectorAll('a[href]')].map((link) => link.getAttribute('href'))")
        queue += [target for link in links if (target := urljoin(path, link)).startswith("/") and "#" not in link]
    return paths


def observe_refresh(page: Page) -> dict[str, Any]:
    """Focus an element of the live part and wait for the part's refresh. Return where the focus is afterwards."""
    page.goto("/")
    page.locator("#live a").first.wait_for()
    page.evaluate("for (const part of document.querySelectorAll('#live details')) part.open = true")
    page.locator("#live a").last.focus()
    page.evaluate("window.scrollTo(0, 60)")
    state = "() => [document.activeElement.outerHTML, document.querySelectorAll('#live details[open]').length, scrollY]"
    before, time = page.evaluate(state), page.locator("#live .note time").last.get_attribute("datetime")

    def is_refresh(response: Response) -> bool:
        return bool(response.request.headers.get("hx-request") == "true")

    for _ in range(20):  # the first one may be of the connection that was just opened
        with page.expect_response(is_refresh, timeout=30_000):
            pass
        page.wait_for_timeout(300)
        if page.locator("#live .note time").last.get_attribute("datetime") != time:
            break
    return {"before": before, "after": page.evaluate(state)}


def observe_planted(page: Page) -> dict[str, Any]:
    """Return the observations of `examine` on a page with planted faults, such as an inline script."""

    def plant(route: Route) -> None:
        if route.request.resource_type != "document":
            route.continue_()
            return
        reply = route.fetch()
        route.fulfill(response=reply, body=reply.text().replace("</main>", _PLANTED))

    page.route("**/*", plant)
    observed = examine(page, "/")
    page.unroute("**/*")
    return observed


def pages(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Open every page as the owner of the stack, as a viewer, and without JavaScript."""
    url, observed = task["url"], dict[str, Any]()
    with opened(browser, url) as (page, observer):
        page.goto(task["login"])
        observed["login"] = [path_of(page), "token" in page.url, page.locator("h1").inner_text()]
        reply = page.goto(task["login"])
        observed["replay"] = reply.status if reply else 0
        observer.errors.clear()  # of the refused address
        observed["refresh"] = observe_refresh(page)
        page.add_init_script(_PAUSE)
        observed["not_found"], targets = search(page, task["searched"])
        queue = make_queue(page)
        item = rate(page, queue)
        paths = crawl(page, task["routes"], [item, f"{queue}/agreement", *targets, *task["targets"]])
        observed["unlinked"] = [route for route in task["routes"] if route not in paths]
        observed["pages"] = [examine(page, path) for path in paths.values()]
        observed |= {"errors": list(observer.errors), "foreign": list(observer.foreign)}
        observed["pages"].append(examine(page, "/nothing-here"))
        observed["planted"] = observe_planted(page)
    paths = {route: path for route, path in paths.items() if path != item}  # it is reserved for the owner
    with opened(browser, url) as (page, _):
        observed["pages"].append(examine(page, "/login"))
        log_in(page, task["viewer"])
        observed["viewer_forms"] = []  # without those that only compute probabilities
        for path in paths.values():
            page.goto(path)
            observed["viewer_forms"] += page.locator("main form[method=post]:not([action$='/now'])").evaluate_all(
                "(all) => all.map((form) => form.action)"
            )
        token = page.locator("input[name=form_token]").first.get_attribute("value")
        observed["viewer_posts"] = [
            page.request.post(path, form={"form_token": token or "", "reason": "no"}, headers={"origin": url}).status
            for path in task["changes"]
        ]
    with opened(browser, url, java_script_enabled=False) as (page, _):
        log_in(page, task["operator"])
        observed["plain"] = []
        for path in paths.values():
            reply = page.goto(path)
            observed["plain"].append([path, reply.status if reply else 0, len(page.locator("main").inner_text())])
        observed["plain_rating"] = rate(page, queue) != queue
        page.click(".account summary")
        page.select_option("#theme", "dark")
        page.click("header form[action='/theme'] button")
        observed["plain_theme"] = page.locator("html").get_attribute("data-theme")
    return observed


def decide(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Send the form of a decision, by keyboard alone or, without JavaScript, by the mouse."""
    with opened(browser, task["url"], java_script_enabled=task["script"]) as (page, observer):
        log_in(page, task["user"])
        page.goto(task["path"])
        if task["script"]:
            press_until(page, "item.name === 'reason' && item.form.textContent.includes(text)", task["button"])
            page.keyboard.type(task["reason"])
            press_until(page, "item.tagName === 'BUTTON' && item.textContent.trim() === text", task["button"])
            with page.expect_navigation():
                page.keyboard.press("Enter")
        else:
            button = page.get_by_role("button", name=task["button"])
            page.locator("form", has=button).locator("[name=reason]").fill(task["reason"])
            button.click()
        return {
            "path": path_of(page),
            "problem": " ".join(page.locator("main .problem").all_inner_texts()),
            "errors": observer.errors,
        }


def press_until(page: Page, condition: str, text: str) -> None:
    """Press the Tab key until the JavaScript expression `condition` holds for `item`, the focused element."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate(f"(text) => {{ const item = document.activeElement; return {condition}; }}", text):
            return
    raise AssertionError(f"200 presses of the tabulator key do not reach {text!r}")


def pictures(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Write a screenshot of each page without its navigation, in the light theme."""
    written = []
    with opened(browser, task["url"], color_scheme="light", device_scale_factor=task["scale"]) as (page, _):
        page.goto(task["login"])
        for name, path, height in task["pictures"]:
            page.set_viewport_size({"width": task["width"], "height": height})
            page.goto(path)
            page.wait_for_load_state("load")
            page.locator("header").evaluate("(header) => header.remove()")
            target = Path(task["folder"]) / f"{name}.png"
            page.screenshot(path=target, animations="disabled")
            written.append(str(target))
    return {"written": written}


def run(tasks: Mapping[str, Callable[[Browser, dict[str, Any]], dict[str, Any]]]) -> None:
    """Run the task that the standard input names, and print its observations."""
    task = json.load(sys.stdin)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        json.dump(tasks[task["task"]](browser, task), sys.stdout)
        browser.close()


if __name__ == "__main__":
    run({"pages": pages, "decide": decide, "pictures": pictures})
