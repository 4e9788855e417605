"""Shared by the serving benchmarks: a run of the demo's size.

The model has the demo's shape and random weights: how fast it answers does not depend on what it has learned. The
servers and the load are those of `trope bench serve`. All traffic stays on the loopback interface.
"""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np

USERS, ITEMS, EVENTS = 2_469, 1_500, 1_469_307
"""Of The Complete Journey by product type, as the demo prepares it; items are those with five events or more."""
START, END = 1_483_228_800, 1_514_764_800  # the year 2017


def make_run(folder: Path, preset_name: str = "trope", seed: int = 0) -> Path:
    """A dataset and a run of the demo's size, made once; returns the run's folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from trope.cli.demo import SETTINGS
    from trope.data.prepare import Options, prepare
    from trope.data.sequences import Sequences
    from trope.data.sources.resolve import Request, resolve
    from trope.models.recommender import SequentialRecommender
    from trope.runs import open_run
    from trope.settings import preset

    data, run = folder / "data", folder / f"run-{preset_name}-{seed}"
    if not (data / "meta.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        items = np.minimum(random.zipf(1.3, EVENTS), ITEMS)  # some items are chosen by all, most by few
        items[:ITEMS] = np.arange(1, ITEMS + 1)
        columns = {"user": random.integers(1, USERS + 1, EVENTS), "item": items}
        log = folder / "log.parquet"
        pq.write_table(pa.table({**columns, "timestamp": random.integers(START, END, EVENTS)}), log)
        prepare(resolve(Request(str(log))), data, Options(min_user=1, min_item=1))
    if not (run / "best").is_dir():
        torch.manual_seed(seed)
        store = Sequences.load(data)
        sizes = [f"{name}={value}" for name, value in SETTINGS.items() if name.startswith("model.")]
        config = preset(preset_name, sizes)
        open_run(run, store, config, resume=False)
        model = SequentialRecommender(config, store.num_items, store.time_span)
        if model.pulse is not None:
            for name in ("everybody", "own"):
                model.pulse.get_buffer(name).normal_(std=0.05)
            stream = model.pulse.count(store.items, store.times)
            list(stream.at(torch.tensor([END])))
            model.pulse.keep(stream)
        model.save_pretrained(run / "best")
    return run


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
