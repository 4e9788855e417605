"""The server: routes, and what starts and ends with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException

from trope.environment import __version__
from trope.server.answers import curve
from trope.server.gate import PAGE, Application, Gate, Handler, refusal_body
from trope.server.limits import Limits
from trope.server.logs import Log
from trope.server.metrics import Metrics
from trope.server.models import Models
from trope.server.page_files import PageFiles
from trope.server.queue import BatchQueue
from trope.server.refusal import Refused
from trope.server.schema import Question, Reader, read_moment
from trope.server.served import Served
from trope.server.store import Store
from trope.server.timeline import timeline
from trope.server.trial import Trial
from trope.server.worker import Ask, Call, Post, Worker

_STEPS, _K = 53, 10
_FOUND, _MOST_FOUND = 20, 100


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
    """What the routes do. Parsing happens on the event loop, everything else on the worker's thread.

    models: as in `Worker`. Kept there alone, so that a model that was swapped is freed.
    compared: a second model, which the page shows beside the first; no other route asks it.
    trial: an experiment, whose arms answer lists and timelines; the other routes ask the first model, the control's.
    """

    def __init__(
        self,
        models: Mapping[str, Served],
        store: Store,
        options: Options,
        log: Log,
        compared: Served | None = None,
        trial: Trial | None = None,
    ) -> None:
        self.compared, self.trial = compared, trial
        self._trying: asyncio.Future[Any] | None = None
        self.store, self.options, self.log, self.metrics = store, options, log, Metrics()
        is_text = next(iter(models.values())).catalogue.is_text
        worker = Worker(models, store, self.metrics, trial, compared)
        self.queue = BatchQueue(worker, options.limits, self.metrics)
        self.models = Models(self.queue, options.data, options.device, self.metrics, log)
        self.reader = Reader(is_text, options.limits, has_arms=trial is not None)
        self.metrics.serve(model.version for model in models.values())
        if trial is not None:
            trial.exposures.on_kept, trial.exposures.on_lost = (
                self.metrics.exposures.inc,
                self.metrics.exposures_lost.inc,
            )
            self.metrics.exposures_failing.set_function(lambda: float(trial.exposures.failure is not None))

    # These two give the queue's own future: a coroutine around it would take longer than the check of the body.
    def events(self, body: bytes) -> Awaitable[bytes]:
        """`POST /events`: answered when they are stored."""
        return self.queue.do(Post(self.reader.events(body)))

    def recommend(self, body: bytes) -> Awaitable[bytes]:
        """`POST /recommend`: one question or a list."""
        questions, is_list = self.reader.questions(body)
        if self.trial is not None:
            self.trial.check(questions)
        return self.queue.do(Ask(questions, is_list, is_shown=True))

    async def swap(self, body: bytes) -> bytes:
        """`POST /model`: serve another run."""
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise Refused(f"the body is not JSON: {error}") from None
        names = {"path"} if self.trial is None else {"path", "arm"}
        path = content["path"] if isinstance(content, dict) and content.keys() == names else None
        if not isinstance(path, str) or not path or "\0" in path or "://" in path:
            wanted = ", ".join(f'"{name}": "..."' for name in sorted(names, reverse=True))
            raise Refused(f"the body must be {{{wanted}}} with a folder on this machine")
        arm = None if self.trial is None else self.trial.check_arm(content["arm"])
        return orjson.dumps(await self.models.swap(Path(path), arm))

    async def timeline(self, user: str, query: dict[str, str]) -> bytes:
        """`GET /users/{id}/timeline`: the user's best items over time."""
        moments = self._moments(query, ("k", "filter_seen"))
        k = self.reader.count(query.get("k", _K), "k", self.options.limits.k)
        seen = query.get("filter_seen", "none")
        if seen not in ("none", "window", "history"):
            raise Refused("filter_seen must be one of none, window, history")
        question = Question(self.reader.user(user), None, moments, is_sweep=True, k=k, filter_seen=seen)
        self.reader.check_size([question])
        return await self.queue.do(Ask([question], is_list=False))

    async def sweep(self, body: bytes) -> bytes:
        """`POST /timeline`: a question at many moments, answered in few bytes; what the page asks."""
        question, is_compared = self.reader.timeline(body)
        self.reader.check_size([question])
        if question.new_items:
            raise Refused("new_items is for /recommend; leave it out")
        if is_compared and self.compared is None:
            raise Refused("no model is compared; start the server with --compare RUN")
        if self.trial is not None:
            self.trial.check([question])

        def do(worker: Worker) -> dict[str, Any]:
            if is_compared and worker.compared is not None:
                return timeline(worker.compared, question)
            trial = worker.trial
            return timeline(worker.served if trial is None else worker.models[trial.arm_of(question)], question)

        return orjson.dumps(await self.queue.do(Call(do)))

    async def users(self, query: dict[str, str]) -> bytes:
        """`GET /users`: users of the dataset whose id begins with a text."""
        unknown = query.keys() - {"prefix", "limit"}
        if unknown:
            raise Refused(f"there is no parameter {min(unknown)[:40]!a}; known are prefix, limit")
        limit = self.reader.count(query.get("limit", _FOUND), "limit", _MOST_FOUND)
        prefix = self.reader.user(query["prefix"], "prefix") if query.get("prefix") else ""
        known = self.queue.worker.served.known
        found = [] if known is None else known.search(prefix, limit)
        return orjson.dumps({"users": [user._asdict() for user in found]})

    async def curve(self, item: str, query: dict[str, str]) -> bytes:
        """`GET /items/{id}/curve`: an item's score over time."""
        moments = self._moments(query, ("user_id",))
        wanted = self.reader.item_in_path(item)
        user = self.reader.user(query["user_id"]) if "user_id" in query else None
        return orjson.dumps(await self.queue.do(Call(lambda worker: curve(worker.served, wanted, user, moments))))

    async def describe(self) -> bytes:
        """`GET /model`."""
        said = await self.queue.do(Call(_describe))
        compared = None if self.compared is None else self.compared.describe()
        return orjson.dumps({**said, "store": self.store.describe(), "trope": __version__, "compared": compared})

    def ready(self) -> dict[str, Any]:
        """`GET /ready`: refused while the store does not answer."""
        if not self.queue.is_open:
            raise Refused("the server is shutting down", 503, retry_after=1)
        worker = self.queue.worker
        failing = worker.failure
        self._try_store()
        if failing is not None:
            raise Refused(failing, 503, retry_after=1)
        said: dict[str, Any] = {"status": "ready", "model": worker.served.version}
        if self.trial is not None:
            failure = self.trial.exposures.failure
            said["arms"] = {arm: served.version for arm, served in worker.models.items()}
            said["exposures"] = "kept" if failure is None else f"not kept: {failure}"
        return said

    def _try_store(self) -> None:
        """Let the worker follow the store, so that the next `ready` knows of a failure, or its end, without traffic."""
        if self._trying is not None and not self._trying.done():
            return
        with contextlib.suppress(Refused):  # a full queue follows the store anyway
            self._trying = self.queue.do(Call(lambda _: None))
            self._trying.add_done_callback(lambda tried: tried.cancelled() or tried.exception())

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


def _describe(worker: Worker) -> dict[str, Any]:
    said = worker.served.describe()
    return said if worker.trial is None else {**said, "experiment": worker.trial.describe(worker.models)}


def make_app(
    models: Mapping[str, Served],
    store: Store,
    options: Options,
    log: Log | None = None,
    compared: Served | None = None,
    trial: Trial | None = None,
) -> Application:
    """The application that uvicorn runs; it closes store and exposures when it ends. For the models see `Service`."""
    log = log or Log()
    service = Service(models, store, options, log, compared, trial)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.queue.start()
        watched: list[tuple[Path, str | None]] = [] if options.watch is None else [(options.watch, None)]
        watched += [] if trial is None else [(folder, arm) for arm, folder in trial.watch.items()]
        watching = [
            asyncio.create_task(service.models.watch(folder, options.watch_seconds, arm)) for folder, arm in watched
        ]
        yield
        for task in watching:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await service.queue.close()
        if trial is not None:
            await asyncio.to_thread(trial.exposures.close)
            if trial.exposures.failure is not None:
                log.say("exposures_not_written", message=trial.exposures.failure)
        await asyncio.to_thread(store.close)
        log.say("stopped")

    app = FastAPI(title="trope", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    posts: dict[str, Handler] = {
        "/events": service.events, "/recommend": service.recommend, "/timeline": service.sweep,
        "/model": service.swap,
    }  # fmt: skip
    for path, handler in posts.items():
        app.add_api_route(path, _documented(handler), methods=["POST"], openapi_extra={"requestBody": _BODY})
    _add_gets(app, service)
    _add_failures(app)
    app.mount(PAGE, PageFiles(), name="page")
    return Gate(app, posts, options.keys, options.rate, options.hosts, options.limits, service.metrics, log)


_BODY = {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}


def _documented(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The post as FastAPI's documentation knows it; the gate answers before it comes to this."""

    async def endpoint(request: Request) -> Response:
        return _json(await handler(await request.body()))

    endpoint.__doc__ = handler.__doc__
    return endpoint


class _Id(Convertor[str]):
    """An id in a path: any text, with slashes and line breaks."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("id", _Id())


def _add_gets(app: FastAPI, service: Service) -> None:
    @app.get("/users")
    async def users(request: Request) -> Response:
        """Users of the dataset: prefix, limit."""
        return _json(await service.users(dict(request.query_params)))

    @app.get("/users/{user_id:id}/timeline")
    async def timeline(user_id: str, request: Request) -> Response:
        """The user's best items over time: from, to, steps, k, filter_seen."""
        return _json(await service.timeline(user_id, dict(request.query_params)))

    @app.get("/items/{item_id:id}/curve")
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
        return _json(orjson.dumps(service.ready()))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def root() -> Response:
        """The page."""
        return Response(status_code=307, headers={"location": f"{PAGE}/"})


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
