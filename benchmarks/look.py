"""Many moments of one user: `remember` and `look` against `encode_last`, and `append` against encoding anew.

    python benchmarks/look.py                                        # 365 moments, L 200, width 512, one CPU thread
    python benchmarks/look.py --device cuda --length 1024            # synchronised wall time on a GPU

On a CPU the time is that of the process (`time.process_time`) with one thread, so other work on the machine hardly
moves it. Each number is taken after warm-up calls. The scores of both ways are compared before anything is timed.

Shape letters: B batch, L events, M moments, E width.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trope.environment import commit
from trope.models.recommender import SequentialRecommender
from trope.settings import preset
from trope.times import DAY

SPAN = (1_480_000_000, 1_512_000_000)
ITEMS = 10_000


class Time(NamedTuple):
    """Seconds of a call: the median, and the fastest fifth, which other work on the machine moves less."""

    p50: float
    p20: float

    @classmethod
    def of(cls, seconds: list[float]) -> Time:
        ordered = sorted(seconds)
        return cls(ordered[len(ordered) // 2], ordered[len(ordered) // 5])


def measure(call: Callable[[], object], device: str, repeats: int, warm_up: int = 2) -> Time:
    """Process time on a CPU, synchronised wall time on a GPU."""
    return Time.of([seconds_of(call, device) for _ in range(warm_up + repeats)][warm_up:])


def seconds_of(call: Callable[[], object], device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def history(length: int, ties: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A history in baskets of `ties` events, with rising times: items [1, L], times [1, L] and its length [1]."""
    basket = torch.arange(length) // ties
    times = SPAN[0] + (basket * (SPAN[1] - SPAN[0]) // (int(basket[-1]) + 1))
    items = torch.randint(1, ITEMS + 1, (length,), generator=torch.Generator().manual_seed(1))
    return items[None].to(device), times[None].to(device), torch.tensor([length], device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hstu-trope", help="a preset")
    parser.add_argument("--predicts", default="next-event", choices=("next-event", "next-moment"))
    parser.add_argument("--ties", type=int, default=1, help="events that share a time")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--moments", type=int, default=365)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--batch", type=int, default=0, help="moments of a batched encode_last; 0: all of them at once")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = {
        "width": args.width, "heads": args.heads, "head_dim": args.width // args.heads, "blocks": args.blocks,
        "max_len": args.length, "predicts": args.predicts,
    }  # fmt: skip
    config = preset(args.model, [f"model.{name}={value}" for name, value in sizes.items()])
    model = SequentialRecommender(config, ITEMS, SPAN).to(args.device).eval()
    with torch.inference_mode():
        table(model, args)


def table(model: SequentialRecommender, args: argparse.Namespace) -> None:
    device, M = args.device, args.moments
    items, times, lengths = history(args.length, args.ties, device)
    moments_M = SPAN[1] + DAY * torch.arange(1, M + 1, device=device)
    batch = args.batch or M

    def one_by_one() -> Tensor:
        return torch.cat([model.encode_last(items, times, lengths, t[None]) for t in moments_M])

    def batched() -> Tensor:
        parts = moments_M.split(batch)
        rows = [[x.expand(len(part), *x.shape[1:]) for x in (items, times, lengths)] for part in parts]
        return torch.cat([model.encode_last(*row, part) for row, part in zip(rows, parts, strict=True)])

    def remember_and_look() -> Tensor:
        return model.look(model.remember(items, times, lengths), moments_M)[0]

    wanted_ME, got_ME = batched(), remember_and_look()
    items_VE = model.item_vectors()
    apart = float(((wanted_ME - got_ME) @ items_VE.T).abs().max())
    same = float(((wanted_ME @ items_VE.T).topk(100).indices == (got_ME @ items_VE.T).topk(100).indices).float().mean())

    memory = model.remember(items, times, lengths)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {args.threads} thread(s)"
    print(
        f"{args.model}, {args.predicts}, L {args.length}, width {args.width}, {args.heads} heads, {args.blocks} blocks,"
        f" {M} moments, {where}, torch {torch.__version__}, commit {commit()}"
    )
    print(f"scores differ by at most {apart:.1e}; {100 * same:.2f} % of the places of the top 100 agree\n")
    repeats, one = args.repeats, moments_M[:1]
    # So many encodes are their own repetition; on a GPU they take milliseconds and are repeated too.
    slow = (1, 0) if device == "cpu" else (repeats, 1)
    whole = measure(one_by_one, device, *slow)
    at_once = measure(batched, device, *slow)
    both = measure(remember_and_look, device, repeats)
    first = measure(lambda: model.remember(items, times, lengths), device, repeats)
    looks = measure(lambda: model.look(memory, moments_M), device, repeats)
    one_look = measure(lambda: model.look(memory, one), device, 4 * repeats)
    anew = measure(lambda: model.encode_last(items, times, lengths, one), device, 4 * repeats)
    rows = [
        (f"{M} encode_last, one at a time", whole, whole),
        (f"{M} encode_last, {batch} a batch", at_once, whole),
        ("remember + look", both, whole),
        ("  remember", first, whole),
        (f"  look at {M} moments", looks, whole),
        ("one encode_last", anew, anew),
        ("look at one moment", one_look, anew),
        ("append", append_time(model, (items, times, lengths), device, 1, 8 * repeats), anew),
        ("append to 16 histories, each", append_time(model, (items, times, lengths), device, 16, 2 * repeats), anew),
    ]
    print("| what | ms, p50 | times faster | ms, p20 | times faster |")
    print("|---|---|---|---|---|")
    for name, found, against in rows:
        ratios = [f"{1e3 * mine:.2f} | {other / mine:.1f}" for mine, other in zip(found, against, strict=True)]
        print(f"| {name} | {' | '.join(ratios)} |")
    print(f"\nremember + look against batched encode_last: {at_once.p50 / both.p50:.1f} times faster")


def append_time(
    model: SequentialRecommender, history: tuple[Tensor, Tensor, Tensor], device: str, copies: int, appends: int
) -> Time:
    """An `append` of the history's last events to so many copies of it, per copy.

    The memory begins early enough that the window never shifts.
    """
    items, times, lengths = (x.expand(copies, *x.shape[1:]) for x in history)
    begin = items.shape[1] - appends - 2
    if begin < 1:
        raise ValueError(f"--length must be more than {appends + 2}: 8 appends for each of --repeats, and 2 to warm up")
    memory = model.remember(items[:, :begin], times[:, :begin], torch.full_like(lengths, begin))
    found = []
    for place in range(begin, items.shape[1]):
        event = items[:, place], times[:, place]
        found.append(seconds_of(lambda event=event: memory.append(*event), device) / copies)
    return Time.of(found[2:])


if __name__ == "__main__":
    main()
