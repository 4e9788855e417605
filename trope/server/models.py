"""A new model while serving: loaded beside the old one in a thread, put in its place between two batches."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Any

import torch

from trope.server.logs import Log
from trope.server.metrics import Metrics
from trope.server.queue import BatchQueue
from trope.server.refusal import Refused
from trope.server.served import Served, fingerprint
from trope.server.worker import Call, Worker

# What a folder raises that is not a whole model: damaged, half copied, foreign, or of another size.
_NO_MODEL = (ValueError, OSError, RuntimeError)


class Models:
    """Swaps the worker's models, each alone.

    Args:
        data: the dataset given on the command line; without one each run's own is looked for.
    """

    def __init__(self, queue: BatchQueue, data: Path | None, device: str, metrics: Metrics, log: Log) -> None:
        self.queue, self.data, self.device, self.metrics, self.log = queue, data, device, metrics, log
        self._loading = asyncio.Lock()

    async def swap(self, folder: Path, arm: str | None = None) -> dict[str, Any]:
        """Load the model of a folder and serve it; returns its description. arm: whose model is replaced."""
        if self._loading.locked():
            raise Refused("another model is being loaded; try again when it is served", 409)
        async with self._loading:
            models = self.queue.worker.models
            place = next(iter(models)) if arm is None else arm
            old = models[place]
            try:
                new = await asyncio.to_thread(self._load, folder, old)
            except _NO_MODEL as error:
                raise Refused(f"the model is not loaded, the old one stays: {' '.join(str(error).split())}") from None
            if new.catalogue.is_text != old.catalogue.is_text:
                raise Refused("the model's item ids are of another type than those of the stored events")
            said: dict[str, Any] = await self.queue.do(Call(lambda worker: _replace(worker, place, new)))
        self.metrics.swaps.inc()
        self.metrics.serve(served.version for served in models.values())
        self.log.say("model", version=new.version, before=old.version, **({} if arm is None else {"arm": arm}))
        return said

    async def watch(self, folder: Path, seconds: float, arm: str | None = None) -> None:
        """Look at a folder again and again, and swap when another model is in it than the one that was loaded first."""
        models = self.queue.worker.models
        seen = models[next(iter(models)) if arm is None else arm].fingerprint
        while True:
            await asyncio.sleep(seconds)
            found = await asyncio.to_thread(fingerprint, folder)
            if found is None or found == seen:
                continue
            try:
                await self.swap(folder, arm)
                seen = found
            except Refused as refused:
                # A copy under way, perhaps: it is tried again when the files have changed once more, or soon.
                self.log.say("model_refused", message=str(refused))
            except Exception as error:  # our own mistake must not end the watch
                self.log.say("error", kind=type(error).__name__, trace=traceback.format_exc())

    def _load(self, folder: Path, old: Served) -> Served:
        with torch.inference_mode():
            return Served.open(folder, self.data, old.store, old.history, self.device)


def _replace(worker: Worker, place: str, new: Served) -> dict[str, Any]:
    new.follow()  # what was stored while it was loaded
    worker.models[place] = new
    return new.describe()
