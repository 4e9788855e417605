"""Rows over two gloo ranks: our lookup and update, and TorchRec's row-wise sharding.

    python benchmarks/sharded_lookup.py [--items 200000] [--width 64] [--draws 40000] [--rounds 30] [--out FILE]

TorchRec is measured where it is installed (torchrec 1.8.0 and fbgemm-gpu-cpu 1.8.0, both with --no-deps, torch 2.13).
Both look the same items up and send gradients back. TorchRec's search for repeated items has no CPU version, so it is
measured with the items as they come, and with repeats found by torch as we do. The updates are not the same: ours is
AdamW over every row, TorchRec's is row-wise Adagrad over the rows asked for, since its fused Adam does not run on a
CPU. So our lookup and the way back are given apart from our update.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

from trope.environment import describe
from trope.kernels.adamw import factors_of
from trope.models.sharded_items import ShardedItemTable

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--draws", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("results/sharded-lookup-cpu.json"))
    asked = vars(parser.parse_args())
    out = asked.pop("out")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        multiprocessing.spawn(measure, (port, asked, Path(folder) / "found"), nprocs=RANKS)
        found = json.loads((Path(folder) / "found").read_text())
    shown = {"environment": describe(), "ranks": RANKS, **asked, **found}
    out.write_text(json.dumps(shown, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def measure(rank: int, port: int, asked: dict[str, int], out: Path) -> None:
    """One rank; the first writes."""
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, rank, RANKS, RANKS, "127.0.0.1", port)), strict=True))
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(rank)
    items_T = torch.randint(1, asked["items"] + 1, (asked["draws"],), generator=generator)
    grad_TE = torch.randn(asked["draws"], asked["width"], generator=generator) / 100
    found: dict[str, Any] = {"ours": _ours(asked, items_T, grad_TE, rank)}
    if importlib.util.find_spec("torchrec"):
        found["torchrec"] = _torchrec(asked, items_T, grad_TE)
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def _ours(asked: dict[str, int], items_T: Tensor, grad_TE: Tensor, rank: int) -> dict[str, float]:
    table = ShardedItemTable(asked["items"], asked["width"], rank, RANKS)
    moments = torch.zeros_like(table.weight.data), torch.zeros(len(table.weight))
    unit_VE = table.unit_copy(torch.bfloat16)
    factors = factors_of(torch.tensor([1e-3, 0.9, 0.98, 1e-8, 1e-3, 1.0], dtype=torch.float64))

    def there_and_back() -> Any:
        fetched = table.fetch(items_T)
        fetched.table.embed(fetched.items[0]).backward(grad_TE)
        return table.give_back(fetched)

    entries = there_and_back()
    return {
        "lookup_and_gradients_ms": _time(there_and_back, asked["rounds"]),
        "adamw_of_all_rows_ms": _time(lambda: table.update(moments, unit_VE, *entries, factors), asked["rounds"]),
    }


def _torchrec(asked: dict[str, int], items_T: Tensor, grad_TE: Tensor) -> dict[str, float]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    config = EmbeddingConfig(
        name="item_table", embedding_dim=asked["width"], num_embeddings=asked["items"] + 1, feature_names=["item"]
    )
    module = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    sharder: Any = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 1e-3}
    )
    parts = {"item_table": row_wise(compute_kernel="fused")}
    plan = construct_module_sharding_plan(
        module, parts, sharder=sharder, local_size=RANKS, world_size=RANKS, device_type="cpu"
    )
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )

    def look_up(items: Tensor) -> Tensor:
        lengths = torch.tensor([len(items)], dtype=torch.int64)
        found: Tensor = model(KeyedJaggedTensor(keys=["item"], values=items, lengths=lengths))["item"].values()
        return found

    def each_once() -> None:
        ids, places_T = torch.unique(items_T, return_inverse=True)
        torch.nn.functional.embedding(places_T, look_up(ids)).backward(grad_TE)

    return {
        "lookup_gradients_and_adagrad_ms": _time(lambda: look_up(items_T).backward(grad_TE), asked["rounds"]),
        "the_same_with_each_item_once_ms": _time(each_once, asked["rounds"]),
    }


def _time(work: Callable[[], Any], rounds: int) -> float:
    """Median milliseconds, after three rounds that do not count; the ranks begin together."""
    seconds = []
    for _ in range(3 + rounds):
        dist.barrier()
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return round(1e3 * statistics.median(seconds[3:]), 3)


if __name__ == "__main__":
    main()
