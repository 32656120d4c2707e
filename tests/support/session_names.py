"""Session ids that are easily taken for one another, and requests that carry them byte for byte."""

from __future__ import annotations

import http.client
import json
import random
import socket
import unicodedata
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from headrace_schemas.values.ids import decode_name

Carrier = Literal["latin-1 header", "utf-8 header", "http.client header", "path", "latin-1 path", "metadata"]
_LETTERS = "äöüßéèñçåøÄÖÜÉ"
_WIDE = "ａｂｃ名前Ⅷﬁжλ"
_INVISIBLE = "\u200b\u200d\u2060\ufeff\u00ad\u202e"


@dataclass(frozen=True)
class NamedSession:
    """A session id and how a client sends it."""

    name: str
    carrier: Carrier


def draw(rng: random.Random, count: int) -> list[NamedSession]:
    """Return `count` sessions with different ids; the lookalikes of a word (case, width, NFD, zero-width) are among
    them, and words that differ in a single accented letter."""
    names: dict[str, None] = {}
    while len(names) < count:
        word = "m" + rng.choice(_LETTERS) + "".join(rng.choices("lrst", k=2)) + rng.choice(["", "e", "%41", "%C3%BC"])
        lookalikes = (
            word,
            word.upper(),
            unicodedata.normalize("NFD", word),
            word + rng.choice(_INVISIBLE),
            word + rng.choice(_WIDE),
            quote(word),
            f"{word}/end",
        )
        names |= dict.fromkeys(lookalikes)
    return [NamedSession(name, rng.choice(_carriers(name))) for name in rng.sample(list(names), count)]


def _carriers(name: str) -> list[Carrier]:
    carriers: list[Carrier] = ["utf-8 header", "path", "metadata"]
    try:
        raw = name.encode("latin-1")
    except UnicodeEncodeError:
        return carriers
    return [*carriers, "latin-1 header", "http.client header", "latin-1 path"] if decode_name(raw) == name else carriers


def request(session: NamedSession, path: str, body: dict[str, Any]) -> tuple[bytes, list[bytes], bytes]:
    """Return target, header lines and body of a request that names `session`."""
    headers: list[bytes] = []
    target = path.encode()
    match session.carrier:
        case "latin-1 header" | "http.client header":
            headers.append(b"X-Session-Id: " + session.name.encode("latin-1"))
        case "utf-8 header":
            headers.append(b"X-Session-Id: " + session.name.encode())
        case "path" | "latin-1 path":
            encoding = "utf-8" if session.carrier == "path" else "latin-1"
            target = f"/sessions/{quote(session.name, safe='', encoding=encoding)}{path}".encode()
        case "metadata":
            body = {**body, "metadata": {"session_id": session.name}}
    return target, headers, json.dumps(body).encode()


def post(url: str, session: NamedSession, path: str, body: dict[str, Any], key: str = "") -> tuple[int, Any]:
    """Send one request by `http.client` or by a raw socket; return status and parsed body."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    target, headers, content = request(session, path, body)
    if session.carrier == "http.client header":
        connection = http.client.HTTPConnection(host, port, timeout=60)
        named = {"X-Session-Id": session.name, "Content-Type": "application/json"}
        named |= {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request("POST", target.decode(), content, named)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()
    if key:
        headers = [*headers, f"Authorization: Bearer {key}".encode()]
    head = [b"POST " + target + b" HTTP/1.1", b"Host: gateway", b"Connection: close", *headers]
    head += [b"Content-Type: application/json", b"Content-Length: %d" % len(content)]
    with socket.create_connection((host, port), timeout=60) as raw:
        raw.sendall(b"\r\n".join(head) + b"\r\n\r\n" + content)
        reply = http.client.HTTPResponse(raw)
        reply.begin()
        return reply.status, json.loads(reply.read())
