"""Numbers for Prometheus; each server has its own registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """What the server counts and measures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "trope_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "trope_request_seconds", "Time to answer.", ("route",), registry=self.registry, buckets=_SECONDS
        )
        self.events = Counter("trope_events", "New events that were stored.", registry=self.registry)
        self.answers = Counter("trope_answers", "Lists by what they come from.", ("source",), registry=self.registry)
        self.batches = Histogram(
            "trope_batch_size", "Requests that were answered together.", registry=self.registry, buckets=_SIZES
        )
        self.batch_seconds = Histogram(
            "trope_batch_seconds", "Time that the worker takes for a batch.", registry=self.registry, buckets=_SECONDS
        )
        self.waiting = Gauge("trope_queue_depth", "Requests that wait for the worker.", registry=self.registry)
        self.swaps = Counter("trope_model_swaps", "Models that were loaded while serving.", registry=self.registry)
        self.model = Gauge("trope_model", "The served model, always 1.", ("version",), registry=self.registry)
        self.arms = Counter("trope_arm_answers", "Answers by arm of the experiment.", ("arm",), registry=self.registry)
        self.exposures = Counter("trope_exposures", "Exposures that were kept.", registry=self.registry)
        self.exposures_lost = Counter(
            "trope_exposures_lost", "Exposures that the disk did not take.", registry=self.registry
        )
        self.exposures_failing = Gauge(
            "trope_exposures_failing", "1 while exposures cannot be written.", registry=self.registry
        )
        # Finding a label's child takes longer than counting with it.
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def watch_queue(self, depth: Callable[[], int]) -> None:
        """Ask `depth` for the queue's depth whenever the numbers are read."""
        self.waiting.set_function(depth)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        found = self._children.get((route, status))
        if found is None:
            found = self.requests.labels(route, str(status)), self.seconds.labels(route)
            self._children[route, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def count_answers(self, answers: Iterable[dict[str, Any]]) -> None:
        """Count answers by arm, and their lists by what they come from."""
        arms: dict[str, int] = {}
        sources: dict[str, int] = {}
        for answer in answers:
            arm = answer.get("arm")
            if arm is not None:
                arms[arm] = arms.get(arm, 0) + 1
            for part in answer.get("moments", (answer,)):
                source = part["from"]
                sources[source] = sources.get(source, 0) + 1
        for arm, count in arms.items():
            self.arms.labels(arm).inc(count)
        for source, count in sources.items():
            self.answers.labels(source).inc(count)

    def serve(self, versions: Iterable[str]) -> None:
        """Say which models are served from now on."""
        self.model.clear()
        for version in versions:
            self.model.labels(version).set(1)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)
