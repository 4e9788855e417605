"""Figures of a model with a pulse: what is drawn is what is served, or says that it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_figures import untrained
from training import one_thread, tiny_data

from trope.data.sequences import Sequences
from trope.figures import items as figure_items
from trope.figures import moment as figure_moment
from trope.figures.run import histories, open_run
from trope.figures.run import test_users as users_of
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Histories, Recommender
from trope.times import DAY
from trope.train.pulse import keep_counts

__all__ = ["one_thread"]  # a fixture for every test in here


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("data"))


def with_pulse(data: Sequences, path: Path) -> Path:
    """A run folder of the preset `trope`, its network as it was drawn, its pulse with weights and counts."""
    run = untrained(data, path, "trope")
    model = SequentialRecommender.from_pretrained(run / "best")
    assert model.pulse is not None
    for part in ("everybody", "own"):
        model.pulse.get_buffer(part).normal_()
    model.pulse.get_buffer("age_unit").fill_(DAY)
    keep_counts(model, data)
    model.save_pretrained(run / "best")
    return run


def test_figure_4_shows_the_lists_that_are_served(data: Sequences, tmp_path: Path) -> None:
    run = with_pulse(data, tmp_path / "run")
    view, recommender = open_run(run), Recommender.from_pretrained(run, "cpu")
    users, offsets = users_of(view, 8), torch.tensor([0, DAY, 400 * DAY])
    found = figure_moment.served(view, users, offsets)
    assert found.shape == (8, 3, 10)
    whole = Histories.of(data, users, data.split_range("test")[0][users].long())
    assert int(np.diff(whole.offsets).max()) > view.model.config.model.max_len, "the pulse sees the whole history"
    t_now = histories(view, users).t_now
    for place, offset in enumerate(offsets):
        wanted = recommender.rank(whole, (t_now + offset).numpy(), 10)
        np.testing.assert_array_equal(found[:, place].ravel(), wanted.items)
    assert "ranked with the pulse" in figure_moment.draw(view).caption
    bare = open_run(untrained(data, tmp_path / "bare", "hstu-trope"))
    assert "pulse" not in figure_moment.draw(bare).caption


def test_figure_7_says_that_it_leaves_the_pulse_out(data: Sequences, tmp_path: Path) -> None:
    with_counts = figure_items.draw(open_run(with_pulse(data, tmp_path / "run")))
    assert "what the network alone, without counts, expects of an item" in with_counts.title
    assert "without the pulse" in with_counts.caption
    assert "network" in {text.get_text() for text in with_counts.figure.axes[0].texts}
    bare = figure_items.draw(open_run(untrained(data, tmp_path / "bare", "trope")))  # its pulse is not fitted
    assert "what the model expects of an item" in bare.title and "pulse" not in bare.caption
