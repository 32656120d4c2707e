"""A hostile page in a real Chromium: `.venv-browser/bin/python -m tests.attack.browser < targets.json`.

It reads `{"targets": [{"url": ..., "routes": [[path, [methods]], ...]}]}` and prints the responses that the page could
read. It needs Playwright and no package of Headrace. `evil.example` resolves to this machine, as after DNS rebinding.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
HOSTILE = Path(__file__).with_name("hostile_page.js").read_text(encoding="utf-8").partition("\n")[2]


class _Empty(BaseHTTPRequestHandler):
    """The attacker's own web server, which returns an empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>hostile</title><body></body>")

    def log_message(self, *_: object) -> None:
        pass


def requests_of(target: dict[str, Any], root: str) -> list[list[str]]:
    """Return method and URL of every route, with a name in place of each parameter."""
    requests = []
    for path, methods in target["routes"]:
        parts = ["m" if part.startswith("{") else part for part in path.split("/")]
        requests += [[method, root + "/".join(parts)] for method in [*methods, "DELETE"]]
    return requests


def play(page: Page, target: dict[str, Any], root: str) -> dict[str, Any]:
    outcome: dict[str, Any] = page.evaluate(HOSTILE, requests_of(target, root))
    return outcome


def main() -> None:
    targets = json.load(sys.stdin)["targets"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    attempts, readable = 0, list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--host-resolver-rules=MAP evil.example 127.0.0.1",
                "--disable-popup-blocking",
                "--disable-features=LocalNetworkAccessChecks",  # other browsers have none
            ],
        )
        for host in ("127.0.0.1", "evil.example"):  # another port of this machine, and another site
            page = browser.new_page()
            page.goto(f"http://{host}:{server.server_address[1]}/")
            for target in targets:
                outcome = play(page, target, target["url"])
                attempts, readable = (
                    attempts + outcome["tried"],
                    [*readable, *(f"{host}: {url}" for url in outcome["readable"])],
                )
            page.close()
        for target in targets:  # a name of the attacker's that now leads to the service: same origin for the browser
            root = f"http://evil.example:{urlsplit(target['url']).port}"
            page = browser.new_page()
            page.route(
                f"{root}/attack.html", lambda route: route.fulfill(body="<body></body>", content_type="text/html")
            )
            page.goto(f"{root}/attack.html")
            outcome = play(page, target, root)
            attempts, readable = (
                attempts + outcome["tried"],
                [*readable, *(f"rebinding: {url}" for url in outcome["readable"])],
            )
            page.close()
        browser.close()
    json.dump({"tried": attempts, "readable": readable}, sys.stdout)


if __name__ == "__main__":
    main()
