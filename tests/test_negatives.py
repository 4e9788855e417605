"""Negatives of a batch over several processes: those of one process, drawn by whoever needs them."""

from __future__ import annotations

import pytest
import torch
from ranks import ALONE, CPU
from training import one_thread, tiny, tiny_data  # noqa: F401, an automatic fixture

from trope.data.sequences import Sequences
from trope.train import step as train_step
from trope.train.distributed import Group
from trope.train.step import Feed

PIECE = 7


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("negatives"), items=41)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many tokens each draw was, in pieces that are smaller than a batch."""
    counts: list[int] = []
    draw = train_step.draw_negatives

    def noted(*given: object) -> object:
        found = draw(*given)
        counts.append(len(found))
        return found

    monkeypatch.setattr(train_step, "draw_negatives", noted)
    monkeypatch.setattr(train_step, "PIECE", PIECE)
    return counts


@pytest.mark.parametrize("source", ["uniform", "batch"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_process_draws_its_own_tokens_negatives_and_few_others(
    data: Sequences, drawn: list[int], source: str, size: int
) -> None:
    config = tiny(f"train.negative_source={source}", "train.batch=12")
    alone, feeds = Feed(data, config, ALONE), [Feed(data, config, Group(rank, size, CPU)) for rank in range(size)]
    for index in range(alone.steps):
        whole = alone(0, index, index)
        assert whole.negatives is not None and len(whole.negatives) == len(whole.places_T)
        works = []
        for feed in feeds:
            drawn.clear()
            works.append(feed(0, index, index))
            assert sum(drawn) < len(works[-1].places_T) + 2 * PIECE
        # A part without a row of this batch computes some row that counts nothing.
        assert torch.equal(torch.cat([work.negatives for work in works if work.share]), whole.negatives)


def test_pieces_are_drawn_independently(data: Sequences, drawn: list[int]) -> None:
    negatives = Feed(data, tiny("train.batch=12", "train.negatives=50"), ALONE)(0, 0, 0).negatives
    assert negatives is not None and len(drawn) > 2
    pieces = [piece for piece in negatives.split(PIECE) if len(piece) == PIECE]
    same = (torch.stack(pieces[1:]) == pieces[0]).double().mean()
    assert same < 0.05, "of 41 items two agree by chance one time in 41"


def test_a_batch_of_one_piece_is_drawn_at_once(data: Sequences) -> None:
    """So a training of before there were pieces has the same negatives."""
    config = tiny("train.batch=12")
    work = Feed(data, config, ALONE)(0, 1, 5)
    targets_T = work.batch.targets.flatten()[work.places_T]
    rng = torch.Generator().manual_seed(train_step.seed_for(config.train.seed, "negatives", 5))
    wanted = train_step.draw_negatives(targets_T, data.num_items, config.train, rng)
    assert work.negatives is not None and wanted is not None and torch.equal(work.negatives, wanted)
