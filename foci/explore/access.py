"""Accepts only requests from this machine and the explorer's own page, with the secret, up to a maximum size."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# A browser on the same machine sends a request body within seconds.
MAX_BODY_SECONDS = 60.0
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:;"
        " media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware that checks each request, bounds its body and adds security headers."""

    def __init__(self, app: App, secret: str, port: int, max_bytes: int) -> None:
        self.app, self.secret, self.max_bytes = app, secret, max_bytes
        # Browsers leave out the port of http, 80.
        names, ends = ("127.0.0.1", "localhost"), (f":{port}", "") if port == 80 else (f":{port}",)
        self.hosts = {name + end for name in names for end in ends}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # Web sockets are not supported.
            return
        refusal = self.refusal(scope)
        send = add_security_headers(send)
        if refusal is not None:
            await send_refusal(send, *refusal)
            return
        prefix = f"/{self.secret}"
        inner = {**scope, "path": scope["path"][len(prefix) :] or "/", "root_path": prefix}
        inner.pop("raw_path", None)
        await self.read_body(inner, receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason to refuse a request, or None."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        # DNS rebinding: a foreign page whose name resolves to this machine still sends its own name.
        if headers.get("host", "").lower() not in self.hosts:
            return 421, "the host must be 127.0.0.1 or localhost with the port of the explorer"
        if "origin" in headers and headers["origin"] not in self.origins:
            return 403, "the request must come from the explorer's own page"
        if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return 403, "the request must come from the explorer's own page"
        secret = scope["path"].split("/")[1] if scope["path"].startswith("/") else ""
        if not hmac.compare_digest(secret.encode(), self.secret.encode()):
            return 404, "the address must contain the secret: open the address that the terminal shows"
        if (
            not headers.get("content-length", "0").isdecimal()
            or int(headers.get("content-length", "0")) > self.max_bytes
        ):
            return 413, self.too_large()
        return None

    def too_large(self) -> str:
        return f"the request must have at most {self.max_bytes // 2**20} MiB"

    async def read_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, up to the maximum size and time, and pass it to the application in one message."""
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(MAX_BODY_SECONDS):
                while more and len(body) <= self.max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            await send_refusal(send, 408, f"the request must be sent within {MAX_BODY_SECONDS:g} seconds")
            return
        if len(body) > self.max_bytes:
            await send_refusal(send, 413, self.too_large())
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        await self.app(scope, lambda: replay_body(whole, receive), send)


async def replay_body(whole: list[Message], receive: Receive) -> Message:
    return whole.pop() if whole else await receive()


def add_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return send_with_headers


async def send_refusal(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
