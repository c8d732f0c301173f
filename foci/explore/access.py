"""Who may ask: this machine, from the explorer's own page, with the secret of its address; and how much may be sent."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Stands before the application: checks each request, bounds what it sends, adds the headers of safety."""

    def __init__(self, app: App, secret: str, port: int, most: int) -> None:
        self.app, self.secret, self.most = app, secret, most
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There is nothing here for web sockets.
            return
        refusal = self.refusal(scope)
        send = add_security_headers(send)
        if refusal is not None:
            await send_refusal(send, *refusal)
            return
        prefix = f"/{self.secret}"
        inner = {**scope, "path": scope["path"][len(prefix) :] or "/", "root_path": prefix}
        inner.pop("raw_path", None)
        await self.bounded(inner, receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request is turned away, if it is."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        # A page elsewhere that has a name resolve to this machine still sends its own name.
        if headers.get("host", "").lower() not in self.hosts:
            return 421, "expected a request to 127.0.0.1 or localhost"
        if "origin" in headers and headers["origin"] not in self.origins:
            return 403, "expected a request from the explorer's own page"
        if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return 403, "expected a request from the explorer's own page"
        given = scope["path"].split("/")[1] if scope["path"].startswith("/") else ""
        if not hmac.compare_digest(given.encode(), self.secret.encode()):
            return 404, "expected the address that the terminal shows: it holds a secret"
        if not headers.get("content-length", "0").isdecimal() or int(headers.get("content-length", "0")) > self.most:
            return 413, self.too_large()
        return None

    def too_large(self) -> str:
        return f"expected at most {self.most // 2**20} MiB, received more"

    async def bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads what is sent, to the end or until it is too much, and hands it on in one piece."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.most:
                await send_refusal(send, 413, self.too_large())
                return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        await self.app(scope, lambda: replay_body(whole, receive), send)


async def replay_body(whole: list[Message], receive: Receive) -> Message:
    return whole.pop() if whole else await receive()


def add_security_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending


async def send_refusal(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
