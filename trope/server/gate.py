"""What every request passes first: where it comes from, key, rate, size. And last: its status, metrics, one log line.

The posts are answered here, before FastAPI's routing, which would take longer than the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from trope.server.limits import Limits, TokenBuckets
from trope.server.logs import Log
from trope.server.metrics import Metrics
from trope.server.refusal import Refused

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[bytes], Awaitable[bytes]]
Headers = list[tuple[bytes, bytes]]

OPEN_ROUTES = ("/health", "/ready", "/")
"""Answered without a key, as are the page's files: they hold no data."""
PAGE = "/page"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_JSON = (b"content-type", b"application/json")
_NONE: Headers = []


class Gate:
    """An ASGI application around another one.

    Args:
        app: answers what is not in `posts`.
        posts: what answers a body, by path.
        keys: API keys, one of which a request must carry; none lets everybody in.
        rate: requests a second for each client; 0 for no limit.
        hosts: names under which the server may be addressed; empty for any. A page of another site, whose name was
            made to point to this machine, is refused by it.
    """

    def __init__(
        self,
        app: Application,
        posts: dict[str, Handler],
        keys: tuple[str, ...],
        rate: float,
        hosts: tuple[str, ...],
        limits: Limits,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self.app, self.posts, self.limits, self.metrics, self.log = app, posts, limits, metrics, log
        self._keys = [_digest(key.encode()) for key in keys]
        self._buckets = TokenBuckets(rate) if rate else None
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, path = time.perf_counter(), scope["path"]
        handler = self.posts.get(path) if scope["method"] == "POST" else None
        if handler is None:
            status, size = await self._pass_on(scope, path, receive, send)
        else:
            status, size = await self._post(scope, path, handler, receive, send)
        seconds, route = time.perf_counter() - started, self._route(scope)
        self.metrics.count_request(route, status, seconds)
        self.log.request(scope["method"], route, status, seconds, size)

    async def _post(self, scope: Scope, path: str, handler: Handler, receive: Receive, send: Send) -> tuple[int, int]:
        """Answer a post; returns status and size of the answer."""
        status, more = 200, _NONE
        try:
            headers = dict(scope["headers"])
            self._admit(scope, path, headers)
            # A foreign page can post plain text from a browser without asking; JSON it cannot.
            if not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
                raise Refused("the body must come with the header Content-Type: application/json", 415)
            answer = await handler(await self._read(headers, receive))
        except Refused as refused:
            status, answer, more = refused.status, refusal_body(refused), _retry(refused)
        except Exception as error:  # our own mistake; the client gets a line, the log the rest
            status, answer = 500, refusal_body(self._mistake(error))
        await _send(send, status, answer, more)
        return status, len(answer)

    async def _pass_on(self, scope: Scope, path: str, receive: Receive, send: Send) -> tuple[int, int]:
        """Let the application answer; returns status and size of the answer."""
        status = size = 0

        async def noting(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            size += len(message.get("body", b""))
            await send(message)

        try:
            self._admit(scope, path, dict(scope["headers"]))
            await self.app(scope, receive, noting)
        except Refused as refused:
            if not status:
                await _send(noting, refused.status, refusal_body(refused), _retry(refused))
        except Exception as error:
            mistake = self._mistake(error)
            if not status:
                await _send(noting, mistake.status, refusal_body(mistake), [])
        return status, size

    def _mistake(self, error: Exception) -> Refused:
        """Log our own mistake; called where it is handled."""
        self.log.say("error", kind=type(error).__name__, trace=traceback.format_exc())
        return Refused("the server made a mistake, which is in its log", 500)

    def _admit(self, scope: Scope, path: str, headers: dict[bytes, bytes]) -> None:
        if self._hosts:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._hosts:
                raise Refused("the Host header names another machine; address this server as 127.0.0.1", 421)
        # Before the key, so that keys cannot be guessed faster.
        client = scope.get("client")
        if self._buckets is not None and not self._buckets.take(client[0] if client else ""):
            raise Refused("too many requests from this address; slow down", 429, retry_after=1)
        if self._keys and path not in OPEN_ROUTES and not path.startswith(f"{PAGE}/"):
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            given = headers.get(b"x-api-key") or (token if scheme.lower() == b"bearer" else b"")
            digest = _digest(given)
            # Every key is compared, so that the time does not tell which one was nearly right.
            if not sum([hmac.compare_digest(digest, key) for key in self._keys]):
                raise Refused("the API key is missing or wrong; send it as X-API-Key", 401)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        most = self.limits.body
        said = headers.get(b"content-length", b"0")
        if said.isdigit() and int(said) > most:
            raise Refused(f"a body may have {most:,} bytes, got {int(said):,}; send several", 413)
        body, more = b"", True
        try:
            async with asyncio.timeout(self.limits.upload):
                while more:
                    message = await receive()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise Refused(f"a body may have {most:,} bytes, got more; send several", 413)
        except TimeoutError:
            raise Refused(f"the body was not here after {self.limits.upload:g} seconds; send it at once", 408) from None
        return body

    def _route(self, scope: Scope) -> str:
        """The route's template: no id, and no path that a client made up, in metrics and logs."""
        if scope["path"] in self.posts:
            return str(scope["path"])
        return str(getattr(scope.get("route"), "path", "other")).replace(":id}", "}")


async def _send(send: Send, status: int, body: bytes, more: Headers) -> None:
    headers = [_JSON, (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _retry(refused: Refused) -> Headers:
    return [] if refused.retry_after is None else [(b"retry-after", b"%d" % refused.retry_after)]


def refusal_body(refused: Refused) -> bytes:
    """`{"error": "..."}`."""
    return orjson.dumps({"error": str(refused)})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
