"""LitServe around `Recommender`, for benchmarks/serve_http.py: python serve_litserve.py RUN PORT TIMEOUT WORKERS.

LitServe reads the annotations of `decode_request`, so they must be types and not text.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import litserve as ls
import numpy as np
import torch

from trope.data.sequences import Sequences
from trope.serve.recommender import Histories, Recommender


class Api(ls.LitAPI):
    def __init__(self, run: str, **options: Any) -> None:
        super().__init__(**options)
        self.run = run

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.recommender = Recommender.from_pretrained(self.run, "cpu")
        self.data = Sequences.of_run(Path(self.run))
        self.ids = self.data.ids("user_ids")
        assert self.ids is not None

    def decode_request(self, request: dict) -> tuple[int, int, int]:
        assert self.ids is not None
        row = self.ids.find(str(request["user_id"]))
        assert row is not None
        return row, request["moment"], request["k"]

    def predict(self, batch: list[tuple[int, int, int]]) -> list[Any]:
        users, moments, ks = (torch.tensor(column) for column in zip(*batch, strict=True))
        history = Histories.of(self.data, users, self.data.count_before(users, moments + 1))
        found = self.recommender.rank(history, moments.numpy(), int(ks.max()))
        items = self.recommender.catalogue.originals(found.items)
        ends = np.searchsorted(found.rows, np.arange(len(batch) + 1)).tolist()
        scores = found.scores.tolist()
        return [list(zip(items[a:b], scores[a:b], strict=True)) for a, b in pairwise(ends)]

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: list[Any]) -> dict[str, Any]:
        return {"items": [{"item_id": item, "score": score} for item, score in output]}


if __name__ == "__main__":
    run, port, timeout, workers = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    api = Api(run, max_batch_size=64, batch_timeout=timeout)
    print(f"running on http://127.0.0.1:{port}", file=sys.stderr, flush=True)
    ls.LitServer(api, accelerator="cpu", workers_per_device=workers).run(
        host="127.0.0.1", port=port, generate_client_file=False, log_level="warning"
    )
