"""What the figures look at: a run's best model, its T-RoPE modules, and a few histories of its own dataset.

Shape letters: B histories, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from trope.data.folder import Ids
from trope.data.inspect.calendar import tells_phase
from trope.data.printable import printable
from trope.data.sequences import EvalBatch, Sequences
from trope.models.recommender import SequentialRecommender
from trope.rotary import TRoPE
from trope.runs import BEST, check_model_config
from trope.times import DAY

CANDIDATES, USERS, VISITS, SAMPLE, LONGEST_ID, LONGEST_NAME = 2000, 32, 7, 100_000, 24, 26
"""Users looked through for an example, users averaged over, moments of the example that are drawn, events looked at
for times of day, letters of an id, and of an item's name: capitals of that many fill a third of a page."""


@dataclass(frozen=True)
class RunView:
    """A run, opened for drawing.

    ropes: one T-RoPE for each block, empty where the model does not rotate by time; why_no_ropes says so then.
    """

    name: str
    model: SequentialRecommender
    data: Sequences
    ropes: list[TRoPE]
    why_no_ropes: str

    @cached_property
    def has_hours(self) -> bool:
        """Whether the log has times of day; by a sample of its events, evenly over all of them."""
        times = self.data.times.numpy()
        return tells_phase(times[:: len(times) // SAMPLE + 1], DAY, 24)


def open_run(run: Path, data: Path | None = None) -> RunView:
    """The best model on the CPU, and the dataset that it was trained on."""
    store = Sequences.of_run(run, data)
    model = SequentialRecommender.from_pretrained(run / BEST).eval()
    check_model_config(run, model.config)
    ropes = [module for module in model.blocks.modules() if isinstance(module, TRoPE) and module.position == "times"]
    kind = model.config.rotary.kind
    why = {"none": "it has no rotary encoding", "torope": "it uses TO-RoPE", "index": "it rotates by index"}
    reason = why.get(kind, "its T-RoPE rotates by index, not by time")
    return RunView(run.resolve().name, model, store, ropes, f"This model has no T-RoPE over time: {reason}.")


def test_users(view: RunView, most: int) -> Tensor:
    """Up to `most` users of the test split, evenly over all of them."""
    users = view.data.eval_users("test")
    if len(users) == 0:
        raise ValueError(f"{view.data.path} has no test users to draw; prepare it with a protocol that has some")
    return users[torch.linspace(0, len(users) - 1, min(most, len(users))).long()]


def histories(view: RunView, users: Tensor) -> EvalBatch:
    """The users' last events before the test split, as evaluation sees them."""
    return view.data.eval_batch("test", users, view.model.config.model.max_len)


def example(view: RunView) -> EvalBatch:
    """One user's history, [1, L]: of those with the most moments, the one at the upper quartile of burstiness.

    Burstiness is the standard deviation of the gaps between distinct moments over their mean.
    """
    batch = histories(view, test_users(view, CANDIDATES))
    moments = [visits(times[:length]) for times, length in zip(batch.times, batch.lengths.tolist(), strict=True)]
    enough = min(VISITS, max(len(moment) for moment in moments))
    rows = [row for row, moment in enumerate(moments) if len(moment) >= enough]
    rows.sort(key=lambda row: (burstiness(moments[row][-VISITS:]), row))
    return histories(view, batch.users[[rows[(3 * len(rows)) // 4]]])


def unpadded(batch: EvalBatch) -> EvalBatch:
    """One history without the padding behind it."""
    length = int(batch.lengths[0])
    return batch._replace(items=batch.items[:, :length], times=batch.times[:, :length])


def whose(view: RunView, batch: EvalBatch) -> str:
    """The user of a batch of one history, by the log's own id, and the dataset."""
    return f"test user {shown_id(view.data.ids('user_ids'), int(batch.users[0]))} of {view.data.path.name}"


def shown_id(ids: Ids | None, place: int) -> str:
    """The original id at a place from 0, cut where it is long; or its number from 1 where the dataset keeps no ids."""
    return f"number {place + 1}" if ids is None else printable(str(ids[place]))[:LONGEST_ID]


def shown_item(view: RunView, place: int) -> str:
    """The name of the item at a place from 0, cut where it is long; where it has none, "item" and its id."""
    names = view.data.ids("item_names")
    name = "" if names is None else printable(names[place]).strip()
    if not name:
        return f"item {shown_id(view.data.ids('item_ids'), place)}"
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1].rstrip() + "…"


def visits(times: Tensor) -> Tensor:
    """Distinct moments, rising: a basket's events are one."""
    return times.unique()


def burstiness(moments: Tensor) -> float:
    """Standard deviation of gaps over their mean; 0 where all are alike or there is but one."""
    gaps = moments.diff().double()
    return float(gaps.std(unbiased=False) / gaps.mean()) if len(gaps) else 0.0
