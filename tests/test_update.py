"""trope update: the extended dataset by hand, old rows keep their bytes, what is learned, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from data_logs import Event, loose, prepared, unnumbered, write_csv, write_parquet
from test_fit import invoke
from torch import Tensor
from training import one_thread, tiny
from updates import LAST, NEW, ROWS, command, data, run, updated

import trope.train.pulse
import trope.train.update
import trope.train.update_run
from trope.data.extend import extend, read_folder, write_extended
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.data.views import all_training, trained_until, validated_from
from trope.kernels.batch import Source, gather_batch
from trope.models.recommender import SequentialRecommender
from trope.runs import read_lineage, seal, write_json
from trope.serve.recommender import Recommender
from trope.times import DAY, say_minute
from trope.train.distributed import Group
from trope.train.divergence import DivergenceGuard
from trope.train.fit import read_recipe
from trope.train.fused import FusedStep
from trope.train.loop import Trainer, train
from trope.train.optimizer import make_optimizer
from trope.train.pulse import keep_counts, move_pulse
from trope.train.step import Feed
from trope.train.update import grow, retrain, update, usual_steps
from trope.train.update_run import learned_events

__all__ = ["data", "one_thread", "run", "updated"]  # fixtures
GROUP = Group(0, 1, torch.device("cpu"))


def extended(data: Sequences, tmp_path: Path, rows: list[Event]) -> tuple[Sequences, np.ndarray]:
    """The dataset with these rows, and the place of each of its events before."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    new = prepared(
        write_parquet(tmp_path / "new.parquet", rows), tmp_path / "new", loose(protocol=Protocol("loo-paper"))
    )
    found = extend(read_folder(data.path, data.meta), read_folder(new.path, new.meta), "new")
    write_extended(found, data.meta, "new", tmp_path / "extended")
    return Sequences.load(tmp_path / "extended"), found.place_N


def test_the_extended_dataset_has_all_events_and_old_items_keep_their_numbers(data: Sequences, updated: Path) -> None:
    whole = Sequences.of_run(updated)
    by_hand: dict[Any, list[tuple[Any, int]]] = {}
    for user, item, time in sorted(ROWS + NEW, key=lambda row: row[2]):
        by_hand.setdefault(user, []).append((item, time))
    assert unnumbered(whole) == by_hand
    users, items, before = whole.ids("user_ids"), whole.ids("item_ids"), data.ids("item_ids")
    assert users is not None and items is not None and before is not None
    assert users.to_list() == sorted(by_hand)
    assert items.to_list() == [*before.to_list(), 0, 99]
    assert whole.protocol == data.protocol
    assert whole.path == updated / "data" and whole.meta["extended"][0]["events"] == len(NEW)
    assert users.find("2000") is not None


def test_events_that_are_known_are_not_added_twice(data: Sequences, tmp_path: Path) -> None:
    twice = [ROWS[0], ROWS[0]]
    whole, place_N = extended(data, tmp_path / "a", [*ROWS[:50], *twice, *NEW])
    assert (place_N < 0).sum() == len(NEW) + 2  # an event that the longer log has three times is there three times
    assert whole.num_events == len(ROWS) + len(NEW) + 2
    assert sorted(place_N[place_N >= 0].tolist()) == list(range(len(ROWS)))
    whole, _ = extended(data, tmp_path / "b", NEW)
    again, place_N = extended(whole, tmp_path / "c", [*NEW, (1, 1, LAST + 99)])
    assert (place_N < 0).sum() == 1 and len(again.meta["extended"]) == 2


def test_baskets_and_names_go_on(tmp_path: Path) -> None:
    rows = [(u, i, 1_600_000_000 + 100 * b) for u in (1, 2, 3) for b in range(4) for i in (1, 2)]
    ids = [f"b{u}-{b}" for u in (1, 2, 3) for b in range(4) for _ in (1, 2)]
    log = write_parquet(tmp_path / "log.parquet", rows, basket=ids)
    data = prepared(log, tmp_path / "data", loose(protocol=Protocol("next-basket")), basket_col="basket")
    last = 1_600_000_400
    more = write_parquet(
        tmp_path / "more.parquet", [(2, 9, last), (2, 1, last), (2, 9, last + 1)], basket=["x", "x", "y"]
    )
    new = prepared(more, tmp_path / "new", loose(protocol=Protocol("loo-paper")), basket_col="basket")
    old_log, new_log = (read_folder(each.path, each.meta) for each in (data, new))
    found = extend(old_log, new_log, "more")
    write_extended(found, data.meta, "more", tmp_path / "extended")
    whole = Sequences.load(tmp_path / "extended")
    baskets = whole.ids("basket_ids")
    assert baskets is not None and whole.baskets is not None
    by_event = [baskets[number] for number in whole.baskets.tolist()]
    assert by_event == [*ids[:16], "x", "x", "y", *ids[16:]]
    with pytest.raises(ValueError, match="--basket-col"):
        extend(old_log, new_log._replace(baskets_N=None, baskets=None), "more")
    named = extend(old_log._replace(names=["one", "two"]), new_log, "more")
    assert named.log.names == ["one", "two", ""]


def test_old_rows_keep_their_bytes_and_new_ones_are_fresh(run: Path) -> None:
    model = SequentialRecommender.from_pretrained(run / "best")
    grown = grow(model, model.num_items + 3, (model.time_span[0], LAST + 99), seed=1)
    table, before = grown.items.weight.detach(), model.items.weight.detach()
    assert torch.equal(table[: len(before)], before)
    fresh = table[len(before) :]
    assert len(fresh) == 3 and bool((fresh != 0).any(1).all()) and float(fresh.abs().max()) < 0.2
    assert torch.equal(grow(model, model.num_items + 3, (1, 2), seed=1).items.weight, table)
    for name, value in model.state_dict().items():
        if name not in ("items.weight", "pulse.counts", "pulse.seasons", "pulse.counted_until"):
            assert torch.equal(grown.state_dict()[name], value), name
    # It grows no younger: the pulse trusts it by the age of its training.
    assert grown.pulse is not None and model.pulse is not None
    assert grown.time_span == grown.pulse.time_span == (model.time_span[0], LAST + 99)
    later = torch.tensor([LAST + 99])
    assert torch.equal(grown.pulse.age(later), model.pulse.age(later))
    # Vectors do not change by growing, until the end of the training: the coordinates of times stay.
    end = model.time_span[1]
    torch.testing.assert_close(_asked(grown, end), _asked(model, end), rtol=0, atol=0)


def _asked(model: SequentialRecommender, *moments: int) -> Tensor:
    """One history's vector at some moments, [M, E]."""
    M, last = len(moments), ROWS[0][2]
    items, times = torch.tensor([[1, 2, 3]]).expand(M, 3), torch.tensor([[last - 30, last - 20, last]]).expand(M, 3)
    with torch.no_grad():
        return model.eval().encode_last(items, times, torch.full((M,), 3), torch.tensor(moments))


def test_the_readout_turns_until_the_last_learned_event(run: Path, tmp_path: Path) -> None:
    """Of a grown model, of one that was saved and read, and of what it remembers; the age begins where it did."""
    model = SequentialRecommender.from_pretrained(run / "best")
    start, end, late = *model.time_span, model.time_span[1] + 10 * DAY
    grown = grow(model, model.num_items, (start, late))
    # What does not turn is asked at the same moment after both ends: only the readout is held.
    assert model.readout is not None and grown.readout is not None
    out = torch.randn(3, model.config.model.width)
    moments = torch.tensor([end, late, late + DAY])
    held, turned = model.readout(out[:1].expand(3, -1), moments), grown.readout(out[:1].expand(3, -1), moments)
    assert torch.equal(held[0], held[1]) and torch.equal(held[0], turned[0])
    assert not torch.allclose(turned[0], turned[1], atol=1e-3) and torch.equal(turned[1], turned[2])
    grown.save_pretrained(tmp_path / "grown")
    read = SequentialRecommender.from_pretrained(tmp_path / "grown").eval()
    assert read.time_span == (start, late) and read.age_from == grown.age_from == model.age_from == end
    assert torch.equal(_asked(read, end, late), _asked(grown, end, late))
    assert not torch.allclose(_asked(read, late), _asked(model, late), atol=1e-3)
    last = ROWS[0][2]
    memory = read.remember(torch.tensor([[1, 2, 3]]), torch.tensor([[last - 30, last - 20, last]]), torch.tensor([3]))
    torch.testing.assert_close(read.look(memory, torch.tensor([end, late]))[0], _asked(grown, end, late))
    again = grow(read, model.num_items, (start, late + DAY))  # the next update
    assert again.age_from == end and again.time_span[1] == late + DAY


def test_a_model_of_an_earlier_version_ages_from_the_end_of_its_time_span(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    shutil.copytree(run / "best", folder)
    described = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "sha256"}
    del described["age_from"]
    write_json(folder / "config.json", seal(described))
    model = SequentialRecommender.from_pretrained(folder)
    assert model.age_from == model.time_span[1]
    write_json(folder / "config.json", seal({**described, "age_from": "noon"}))
    with pytest.raises(ValueError, match="damaged: age_from 'noon'"):
        SequentialRecommender.from_pretrained(folder)


def test_no_step_means_the_model_of_before(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the learning switched off, the run that is written has the parent's rows, byte for byte."""
    spent = trope.train.update_run.update
    monkeypatch.setattr(
        trope.train.update_run,
        "update",
        lambda *a: spent(*a[:4], [0.0], *a[5:]),  # a learning rate of 0
    )
    out = tmp_path / "out"
    code, said = invoke(*command(run, write_parquet(tmp_path / "new.parquet", NEW), out))
    assert code == 0, said
    before, after = (SequentialRecommender.from_pretrained(each / "best") for each in (run, out))
    assert torch.equal(after.items.weight[: before.num_items + 1], before.items.weight)


def test_windows_end_in_new_events_and_as_many_are_old(data: Sequences) -> None:
    config, every = tiny("model.max_len=4"), all_training(data)
    moment = sorted(data.times.tolist())[-12]
    fresh = data.times >= moment
    feed = Feed(every, config, GROUP, fresh)
    users = torch.searchsorted(data.offsets, torch.nonzero(fresh).flatten(), right=True).unique()
    new_windows = {
        (int(s), int(e)) for s, e in zip(*feed.windows, strict=True) if bool(fresh[int(s) + 1 : int(e)].any())
    }
    assert len(new_windows) >= len(users) and feed.size == 2 * len(new_windows)
    drawn = [set(), set()]
    for epoch in range(2):
        order = feed.order(epoch)
        assert len(order) == len(set(order.tolist())) == feed.size
        windows = {(int(s), int(e)) for s, e in zip(*feed.windows.take(order), strict=True)}
        assert new_windows <= windows
        drawn[epoch] = windows - new_windows
    assert drawn[0] != drawn[1]  # other old windows in another pass
    targets = torch.cat([torch.arange(s + 1, e) for s, e in new_windows])
    learnable = fresh.clone()
    learnable[data.offsets[:-1]] = False  # a user's first event is no target
    assert torch.isin(torch.nonzero(learnable).flatten(), targets).all() and len(targets.unique()) == len(targets)


def test_moments_of_baskets_are_new_where_their_targets_may_be(tmp_path: Path) -> None:
    rows = [(u, i, 1_600_000_000 + 100 * b) for u in range(1, 9) for b in range(4) for i in (1, 2, 3)]
    data = all_training(prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "data", loose()))
    fresh = torch.zeros(data.num_events, dtype=torch.bool)
    fresh[int(data.offsets[1]) - 1] = True  # one line of the first user's last basket
    feed = Feed(data, tiny("model.predicts=next-moment", "model.max_len=20"), GROUP, fresh)
    assert feed.size == 2 and int(feed._has_target(fresh).sum()) == 1
    assert int(feed._has_target(fresh).nonzero()[0]) == int((feed.windows.starts == 0).nonzero()[0])


def test_an_update_learns_the_new_events(data: Sequences, run: Path) -> None:
    """After one pass many times over, a user who always goes from 1 to 2 is told 2."""
    recipe = read_recipe(run)
    model = SequentialRecommender.from_pretrained(run / "best")
    every = all_training(data)
    fresh = torch.zeros(data.num_events, dtype=torch.bool)
    fresh[int(data.offsets[1]) - 4 : int(data.offsets[1])] = True
    before = {name: value.clone() for name, value in model.named_parameters()}
    updated, spent, fitted = update(model, every, recipe.config, fresh, [1.0], GROUP, steps=30)
    assert spent.steps == 30 and not updated.training and fitted is None
    assert any(not torch.equal(before[name], value) for name, value in updated.named_parameters())
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    # Events of one user are too few to fit the pulse to.
    assert updated.pulse is not None and model.pulse is not None
    assert updated.pulse.weights() == model.pulse.weights()
    windows = every.train_windows(8, 8).take(torch.tensor([0]))
    batch = every.training_batch(windows, 8)

    def loss(network: SequentialRecommender) -> float:
        with torch.no_grad():
            out = network.encode(batch.items, batch.times, batch.lengths)[0, : int(batch.lengths[0])]
            scores = 20 * out @ network.item_vectors()[1:].T
            return float(torch.nn.functional.cross_entropy(scores, batch.targets[0, : len(scores)] - 1))

    assert loss(updated) < loss(SequentialRecommender.from_pretrained(run / "best").eval())
    with pytest.raises(ValueError, match="nothing to learn"):
        update(model, every, recipe.config, torch.zeros_like(fresh), [1.0], GROUP)


def test_an_update_begins_at_the_rate_that_the_training_began_with_and_it_falls(
    data: Sequences, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rate is a tenth or less after plateaus: rows of new items would hardly move."""
    recipe, model = read_recipe(run), SequentialRecommender.from_pretrained(run / "best")
    rates: list[list[float]] = []
    monkeypatch.setattr(trope.train.update, "set_learning_rates", lambda _, found: rates.append(found))
    every, fresh = all_training(data), ~until_test(data)
    steps = 4 * Feed(every, recipe.config, GROUP, fresh).steps
    update(model, every, recipe.config, fresh, [1.0, 0.1], GROUP, steps)
    lr = recipe.config.train.lr
    assert [found[0] for found in rates] == pytest.approx([lr, 0.75 * lr, 0.5 * lr, 0.25 * lr])


def test_an_update_makes_some_passes_and_stays_a_fraction_of_a_training() -> None:
    assert usual_steps(a_pass=22, a_training=2_023) == 101  # a twentieth
    assert usual_steps(a_pass=3, a_training=2_023) == 15  # two events are not learned a hundred times
    assert usual_steps(a_pass=300, a_training=2_023) == 300  # everything new is seen once


def test_two_updates_draw_different_numbers_and_one_twice_the_same(data: Sequences, run: Path) -> None:
    config, fresh = read_recipe(run).config, torch.ones(data.num_events, dtype=torch.bool)
    models = [SequentialRecommender.from_pretrained(run / "best") for _ in range(3)]
    views = [all_training(data), all_training(data), trained_until(data, LAST - 1)]
    after = [
        update(model, view, config, fresh, [1.0], GROUP, steps=2).model
        for model, view in zip(models, views, strict=True)
    ]
    first, second, third = (model.items.weight for model in after)
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_retraining_in_memory_is_the_trainers_training(data: Sequences, tmp_path: Path) -> None:
    config, factors, both = tiny(), [1.0, 0.5], data.with_validation()
    model, spent = retrain(both, config, factors, GROUP)
    trainer = Trainer(both, config, tmp_path / "run", GROUP, True, factors)
    for epoch in range(2):
        for _ in range(trainer.feed.steps):
            trainer.step()
        trainer.state.epoch, trainer.state.index = epoch + 1, 0
        trainer._follow_factors()
    assert spent.steps == trainer.total_steps
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=0, msg=name)


def test_what_the_parent_has_not_learned_is_learned_too(data: Sequences, run: Path, updated: Path) -> None:
    recipe = read_recipe(run)
    learned = learned_events(run, data, recipe)
    assert int(learned.sum()) == int(data.valid_end.sum()) < data.num_events  # a refit, and a test window
    assert learned_events(updated, Sequences.of_run(updated), read_recipe(updated)).all()


@pytest.mark.parametrize(("refit", "held_back"), [("false", 1), ("true", 0)])
def test_what_was_held_back_for_the_pulse_is_not_learned(tmp_path: Path, refit: str, held_back: int) -> None:
    """loo-paper with a pulse: the last training event becomes validation, which only a refit learns."""
    log = write_parquet(tmp_path / "log.parquet", ROWS)
    data = prepared(log, tmp_path / "data", loose(protocol=Protocol("loo-paper")))
    run, config = tmp_path / "run", tiny("train.epochs=1", f"train.refit={refit}", model="trope")
    train(data, config, run, "cpu", progress=False)
    learned = learned_events(run, data, read_recipe(run))
    by_user = [int(part.sum()) for part in learned.split(data.offsets.diff().tolist())]
    expected = (data.train_end - held_back).clamp(min=0)
    assert by_user == expected.tolist()


def test_the_counts_are_those_of_all_events(updated: Path) -> None:
    whole = all_training(Sequences.of_run(updated))
    model = SequentialRecommender.from_pretrained(updated / "best")
    assert model.pulse is not None
    kept = model.pulse.get_buffer("counts").clone()
    assert whole.time_span[1] == LAST + 31
    assert int(model.pulse.get_buffer("counted_until")) == LAST + 32
    keep_counts(model, whole)
    torch.testing.assert_close(model.pulse.get_buffer("counts"), kept)
    assert float(kept[0, -1]) > 1.9  # item 99 was chosen twice in the last minute, and once before


def test_it_serves_new_users_and_items_and_knows_its_ancestors(run: Path, updated: Path, tmp_path: Path) -> None:
    served = Recommender.from_pretrained(updated, "cpu")
    history = pd.DataFrame({"user_id": ["u"], "item_id": [99], "timestamp": [LAST + 40]})
    found = served.recommend(history, LAST + 50, k=22)
    assert {0, 99} <= set(found["item_id"])
    assert invoke("recommend", updated, "--user", 2_000, "--at", LAST + 50)[0] == 0
    code, said = invoke("evaluate", updated)
    assert code == 2 and "trope update" in said
    second = tmp_path / "second"
    more = write_csv(tmp_path / "more.csv", [(2_000, 0, LAST + 60), (77, 5, LAST + 61)])
    code, said = invoke(*command(updated, more, second, "--steps", 1, "--data-out", tmp_path / "whole"))
    assert code == 0, said
    lineage = read_lineage(second)
    assert lineage is not None
    assert (lineage["kind"], lineage["steps"], lineage["events_added"]) == ("update", 1, 2)
    assert lineage["parent"]["path"] == str(updated) and lineage["parent"]["kind"] == "update"
    assert [each["path"] for each in lineage["ancestors"]] == [str(run)]
    assert Sequences.of_run(second).path == tmp_path / "whole" and not (second / "data").exists()


def test_what_was_learned_is_counted_and_the_moment_is_not_long_after_it(run: Path, tmp_path: Path) -> None:
    late, out = LAST + 365 * DAY, tmp_path / "late"
    new = write_parquet(tmp_path / "new.parquet", [(3, 0, late)])
    code, said = invoke("update", run, "--events", new, "--out", out, "--steps", 1, "--device", "cpu", "--no-progress")
    assert code == 0 and "1 new event (0 more known already), 0 new users, 1 new item" in said, said
    assert "1 step from" in said
    code, said = invoke("recommend", out, "--user", 3, "--at", late + 60)
    assert code == 0 and "after the last training event" not in said, said
    code, said = invoke("recommend", out, "--user", 3, "--at", late + 365 * DAY)
    assert code == 0 and f"after the last training event ({say_minute(late)})" in said, said


def test_a_prepared_dataset_of_the_longer_log_gives_the_same(run: Path, updated: Path, tmp_path: Path) -> None:
    longer = prepared(write_parquet(tmp_path / "log.parquet", ROWS + NEW), tmp_path / "longer", loose())
    code, said = invoke(*command(run, longer.path, tmp_path / "out"))
    assert code == 0 and f"7 new events ({len(ROWS)} more known already)" in said
    ours, theirs = (SequentialRecommender.from_pretrained(each / "best") for each in (tmp_path / "out", updated))
    assert torch.equal(ours.items.weight, theirs.items.weight)


def test_the_fused_step_takes_an_updates_batches(data: Sequences) -> None:
    """On a GPU an update is fused: the same batches, of the new windows and the drawn ones."""
    config = tiny("model.dropout=0", "model.max_len=4", "train.batch=4")
    every, fresh = all_training(data), data.times >= sorted(data.times.tolist())[-12]
    feed = Feed(every, config, GROUP, fresh)
    source = Source(
        every.items, every.times, feed.windows.starts, feed.windows.ends, torch.zeros(feed.size, dtype=torch.int64)
    )
    assert feed.size < len(feed.windows.starts)
    torch.manual_seed(0)
    model = SequentialRecommender(config, data.num_items, every.time_span)
    optimizer, guard = make_optimizer(model, config), DivergenceGuard(model, torch.device("cpu"))
    loss_sum = torch.zeros((), dtype=torch.float64)
    fused = FusedStep(model, every, config, feed, optimizer, guard, loss_sum, 0, False)
    assert len(fused.source.order_W) == len(source.order_W)
    fused.source.order_W.copy_(feed.order(0))
    for index in range(feed.steps):
        tokens = gather_batch(fused.source, fused._plan(feed.tokens(0, index)), fused.cursor, "auto")
        batch = feed(0, index, index).batch
        valid = torch.arange(4) < batch.lengths[:, None]
        assert tokens.items_T[tokens.items_T != 0].tolist() == batch.items[valid].tolist()
    for step in range(feed.steps):
        assert bool(fused(0, step, step).loss.isfinite())


def until_test(data: Sequences) -> Tensor:
    """Which events come before the test, [N]."""
    known, learned = data.with_validation(), torch.zeros(data.num_events, dtype=torch.bool)
    learned[known.first_events(known.train_end)] = True
    return learned


def test_the_pulse_moves_to_the_new_events_before_they_are_learned(
    data: Sequences, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, model = read_recipe(run), SequentialRecommender.from_pretrained(run / "best")
    learned = until_test(data)
    asked: list[tuple[Sequences, Tensor, tuple[int, int]]] = []

    def move(network: SequentialRecommender, view: Sequences, *rest: Any) -> dict[str, Any]:
        asked.append((view, network.items.weight.detach().clone(), network.time_span))
        return move_pulse(network, view, *rest)

    monkeypatch.setattr(trope.train.update, "move_pulse", move)
    monkeypatch.setattr(trope.train.update, "LEAST_USERS", 10)
    updated, _, moved = update(model, all_training(data), recipe.config, ~learned, [1.0], GROUP, steps=2)
    assert moved is not None and moved["users"] >= 10
    ((view, rows, span),) = asked
    # Everything before the window was learned, nothing in it was, and the network had not seen it yet.
    start, end = view.protocol.t_now("valid"), view.protocol.t_now("test")
    assert (start, end) == (int(data.times[learned].max()) + 1, int(data.times.max()) + 1)
    assert torch.equal(rows, model.items.weight) and span == model.time_span
    # Its age goes on in the units of the training; the readout turns on.
    assert updated.pulse is not None and model.pulse is not None
    assert updated.pulse.age_from == model.pulse.age_from == model.time_span[1]
    assert updated.time_span == all_training(data).time_span != model.time_span
    before, after = model.pulse.weights(), updated.pulse.weights()
    assert after == moved["weights"] != before and after["age_unit"] == before["age_unit"]


def test_weights_move_the_less_the_more_they_are_held(
    data: Sequences, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towards weights that explain the new events better; those that the training had nothing to say about stay 0."""
    recipe, network = read_recipe(run), SequentialRecommender.from_pretrained(run / "best")
    assert network.pulse is not None
    view = validated_from(data, int(data.times[until_test(data)].max()) + 1, int(data.times.max()) + 1)
    temperature = recipe.config.train.temperature
    start_W, held = trope.train.pulse._weights(network.pulse, temperature), {}
    for hold in (0.01, 1.0, 100.0, 1e9):
        moved = SequentialRecommender.from_pretrained(run / "best")
        assert moved.pulse is not None
        monkeypatch.setattr(trope.train.pulse, "HOLD", hold)
        move_pulse(moved, view, recipe.config, 0)
        weights_W = trope.train.pulse._weights(moved.pulse, temperature)
        assert not weights_W[start_W == 0].any()
        asked = list(trope.train.pulse._ask(network, view, recipe.config, 0))
        loss = sum(float(trope.train.pulse._loss(part, weights_W, 0.0)) for part in asked)
        held[hold] = (float((weights_W - start_W).norm()), loss)
    distances, losses = zip(*held.values(), strict=True)
    assert sorted(distances, reverse=True) == list(distances) and distances[0] > 0.1 and distances[-1] < 1e-4
    assert sorted(losses) == list(losses) and losses[0] < losses[-1]


def test_the_weights_that_were_fitted_are_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trope.train.update, "LEAST_USERS", 10)
    out, random = tmp_path / "out", np.random.default_rng(0)
    new = [(user, int(random.integers(1, 20)), LAST + 60 * place) for place in range(8) for user in range(40)]
    code, said = invoke(*command(run, write_parquet(tmp_path / "new.parquet", new), out, "--steps", 1))
    assert code == 0 and "requests of the new events before they were learned" in said, said
    model, recipe = SequentialRecommender.from_pretrained(out / "best"), read_recipe(out)
    assert model.pulse is not None and recipe.pulse is not None
    assert recipe.pulse["weights"] == model.pulse.weights() != read_recipe(run).pulse["weights"]  # type: ignore[index]
    assert model.age_from == SequentialRecommender.from_pretrained(run / "best").age_from < model.time_span[1]
    # A fit like the update is a young network again: it has the weights of the training, also after two updates.
    again = tmp_path / "again"
    newer = [(user, item, time + 600) for user, item, time in new]
    assert invoke(*command(out, write_parquet(tmp_path / "newer.parquet", newer), again, "--steps", 1))[0] == 0
    assert read_recipe(again).pulse != recipe.pulse
    code, said = invoke("fit", again / "data", "--like", again, "--out", tmp_path / "fitted", "--device", "cpu")
    trained = read_recipe(run).pulse
    assert trained is not None and trained["users"] != read_recipe(again).pulse["users"]  # type: ignore[index]
    assert code == 0 and f"on the {trained['users']:,} validation requests it was fitted to" in said, said
    assert read_recipe(tmp_path / "fitted").pulse == trained
