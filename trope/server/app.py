"""The server: routes, and what starts and ends with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from trope.environment import __version__
from trope.server.answers import curve
from trope.server.gate import PAGE, Application, Gate, Handler, refusal_body
from trope.server.limits import Limits
from trope.server.logs import Log
from trope.server.metrics import Metrics
from trope.server.models import Models
from trope.server.queue import BatchQueue
from trope.server.refusal import Refused
from trope.server.schema import Question, Reader, read_moment
from trope.server.served import Served
from trope.server.store import Store
from trope.server.worker import Ask, Call, Post, Worker

PAGE_FILES = Path(__file__).parent / "page"
_STEPS, _K = 53, 10


@dataclass(frozen=True)
class Options:
    """How a server is run."""

    data: Path | None = None
    device: str = "auto"
    keys: tuple[str, ...] = ()
    rate: float = 0.0
    hosts: tuple[str, ...] = ()
    watch: Path | None = None
    watch_seconds: float = 2.0
    limits: Limits = field(default_factory=Limits)


class Service:
    """What the routes do. Parsing happens on the event loop, everything else on the worker's thread."""

    def __init__(self, served: Served, store: Store, options: Options, log: Log) -> None:
        self.store, self.options, self.log, self.metrics = store, options, log, Metrics()
        self.queue = BatchQueue(Worker(served, store, self.metrics), options.limits, self.metrics)
        self.models = Models(self.queue, options.data, options.device, self.metrics, log)
        self.reader = Reader(served.catalogue.is_text, options.limits)
        self.metrics.serve(served.version)

    async def events(self, body: bytes) -> bytes:
        """`POST /events`: answered when they are stored."""
        return await self.queue.do(Post(self.reader.events(body)))

    async def recommend(self, body: bytes) -> bytes:
        """`POST /recommend`: one question or a list."""
        return await self.queue.do(Ask(*self.reader.questions(body)))

    async def swap(self, body: bytes) -> bytes:
        """`POST /model`: serve another run."""
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise Refused(f"the body is not JSON: {error}") from None
        path = content.get("path") if isinstance(content, dict) and len(content) == 1 else None
        if not isinstance(path, str) or not path or "\0" in path or "://" in path:
            raise Refused('the body must be {"path": "..."} with a folder on this machine')
        return orjson.dumps(await self.models.swap(Path(path)))

    async def timeline(self, user: str, query: dict[str, str]) -> bytes:
        """`GET /users/{id}/timeline`: the user's best items over time."""
        moments = self._moments(query, ("k", "filter_seen"))
        k = self.reader.count(query.get("k", _K), "k", self.options.limits.k)
        if len(moments) * k > self.options.limits.rows * _K:
            raise Refused(f"steps times k may be {self.options.limits.rows * _K:,}, got {len(moments) * k:,}")
        seen = query.get("filter_seen", "none")
        if seen not in ("none", "window", "history"):
            raise Refused("filter_seen must be one of none, window, history")
        question = Question(self.reader.user(user), None, moments, is_sweep=True, k=k, filter_seen=seen)
        return await self.queue.do(Ask([question], is_list=False))

    async def curve(self, item: str, query: dict[str, str]) -> bytes:
        """`GET /items/{id}/curve`: an item's score over time."""
        moments = self._moments(query, ("user_id",))
        wanted = self.reader.item_in_path(item)
        user = self.reader.user(query["user_id"]) if "user_id" in query else None
        return orjson.dumps(await self.queue.do(Call(lambda worker: curve(worker.served, wanted, user, moments))))

    async def describe(self) -> bytes:
        """`GET /model`."""
        said = await self.queue.do(Call(lambda worker: worker.served.describe()))
        return orjson.dumps({**said, "store": self.store.describe(), "trope": __version__})

    def _moments(self, query: dict[str, str], others: tuple[str, ...]) -> list[int]:
        """Evenly spaced moments, both ends included."""
        unknown = query.keys() - {"from", "to", "steps", *others}
        if unknown:
            raise Refused(
                f"there is no parameter {min(unknown)[:40]!a}; known are from, to, steps, {', '.join(others)}"
            )
        if "from" not in query or "to" not in query:
            raise Refused("the parameters from and to are missing; give two moments, such as 2017-01-01")
        first, last = read_moment(query["from"], "from"), read_moment(query["to"], "to")
        steps = self.reader.count(query.get("steps", _STEPS), "steps", self.options.limits.moments)
        if last < first:
            raise Refused("to lies before from; exchange them")
        if steps == 1 or first == last:
            return [first]
        return [first + (last - first) * step // (steps - 1) for step in range(steps)]


def make_app(served: Served, store: Store, options: Options, log: Log | None = None) -> Application:
    """The application that uvicorn runs; it closes the store when it ends."""
    log = log or Log()
    service = Service(served, store, options, log)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.queue.start()
        watching = None
        if options.watch is not None:
            watching = asyncio.create_task(service.models.watch(options.watch, options.watch_seconds))
        yield
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        await service.queue.close()
        await asyncio.to_thread(store.close)
        log.say("stopped")

    app = FastAPI(title="trope", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    posts: dict[str, Handler] = {
        "/events": service.events, "/recommend": service.recommend, "/model": service.swap,
    }  # fmt: skip
    for path, handler in posts.items():
        app.add_api_route(path, _documented(handler), methods=["POST"], openapi_extra={"requestBody": _BODY})
    _add_gets(app, service)
    _add_failures(app)
    if PAGE_FILES.is_dir():
        app.mount(PAGE, StaticFiles(directory=PAGE_FILES, html=True), name="page")
    return Gate(app, posts, options.keys, options.rate, options.hosts, options.limits, service.metrics, log)


_BODY = {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}


def _documented(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The post as FastAPI's documentation knows it; the gate answers before it comes to this."""

    async def endpoint(request: Request) -> Response:
        return _json(await handler(await request.body()))

    endpoint.__doc__ = handler.__doc__
    return endpoint


def _add_gets(app: FastAPI, service: Service) -> None:
    @app.get("/users/{user_id}/timeline")
    async def timeline(user_id: str, request: Request) -> Response:
        """The user's best items over time: from, to, steps, k, filter_seen."""
        return _json(await service.timeline(user_id, dict(request.query_params)))

    @app.get("/items/{item_id}/curve")
    async def item_curve(item_id: str, request: Request) -> Response:
        """An item's score over time: from, to, steps, user_id."""
        return _json(await service.curve(item_id, dict(request.query_params)))

    @app.get("/model")
    async def model() -> Response:
        """The served model."""
        return _json(await service.describe())

    @app.get("/health")
    async def health() -> Response:
        """Whether the process lives."""
        return _json(b'{"status":"ok"}')

    @app.get("/ready")
    async def ready() -> Response:
        """Whether questions are answered."""
        if not service.queue.is_open:
            raise Refused("the server is shutting down", 503, retry_after=1)
        return _json(orjson.dumps({"status": "ready", "model": service.queue.worker.served.version}))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def root() -> Response:
        """The page, where there is one."""
        if (PAGE_FILES / "index.html").is_file():
            return Response(status_code=307, headers={"location": f"{PAGE}/"})
        return _json(orjson.dumps({"trope": __version__, "see": "/openapi.json"}))


def _add_failures(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return _json(refusal_body(error), error.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        said = {404: "there is nothing at this path", 405: "this path has no such method"}
        message = said.get(error.status_code, str(error.detail))
        return _json(refusal_body(Refused(message)), error.status_code, dict(error.headers or {}))


def _json(body: bytes, status: int = 200, headers: dict[str, Any] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
