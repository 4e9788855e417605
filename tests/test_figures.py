"""Figures of a run: the numbers behind them against formulas, every file drawn, and runs that have nothing to draw."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import json
import math
import re
import warnings
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from data_logs import START, prepared, random_log, write_parquet
from training import one_thread, tiny, tiny_data  # noqa: F401
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.printable import printable
from trope.data.sequences import Sequences
from trope.figures import curve as figure_curve
from trope.figures import frequencies as figure_frequencies
from trope.figures import geometry as figure_geometry
from trope.figures import items as figure_items
from trope.figures import layers as figure_layers
from trope.figures import moment as figure_moment
from trope.figures import movement as figure_movement
from trope.figures import season as figure_season
from trope.figures import stages as figure_stages
from trope.figures import style as figure_style
from trope.figures.draw import DRAWN, write_figures
from trope.figures.numbers import (
    block_sequence,
    block_share,
    causal_correlation,
    coefficients,
    geometry,
    movement,
    nearest_plane,
    periods,
    resonance,
    rms,
    started_at,
    starting_periods,
    strength,
)  # fmt: skip
from trope.figures.page import write_report
from trope.figures.run import RunView, burstiness, example, histories, open_run, test_users, unpadded, whose
from trope.figures.style import balance, content, finish, page
from trope.kernels.attention.reference import attention, time_buckets
from trope.kernels.norm import norm
from trope.kernels.project import project
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.attention_maps import attention_maps, attention_shares, hstu_weights
from trope.models.hstu import HSTUBlock
from trope.models.recommender import SequentialRecommender
from trope.rotary import IndexRoPE, TRoPE, query_times
from trope.runs import open_run as make_run
from trope.times import DAY, MONTH, YEAR, say_short
from trope.train.loop import train

test_users.__test__ = False  # type: ignore[attr-defined]
NAMES = (
    "fig1-geometry", "fig2-layers", "fig3-frequencies", "fig4-moment", "fig5-stages", "fig6-movement", "fig7-items",
)  # fmt: skip
TIMES = torch.tensor([1_600_000_000, 1_600_050_000, 1_603_000_000])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of two blocks."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    train(data, tiny("model.blocks=2", "train.epochs=2"), path, "cpu", progress=False)
    return path


@pytest.fixture(scope="module")
def drawn(run: Path) -> Path:
    """Everything of that run, drawn once by the command."""
    out = run.parent / "figures"
    result = CliRunner().invoke(app, ["figures", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def untrained(data: Sequences, path: Path, model: str, *settings: str) -> Path:
    """A run folder with a model as it was drawn."""
    config = tiny(*settings, model=model)
    make_run(path, data, config, resume=False)
    torch.manual_seed(0)
    SequentialRecommender(config, data.num_items, data.time_span).save_pretrained(path / "best")
    return path


def test_every_figure_is_written_in_both_formats(drawn: Path) -> None:
    for name in (*NAMES, "learning-curve"):
        png = (drawn / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 10_000
        width = int.from_bytes(png[16:20], "big")
        assert width == 2000, "10 inches at 200 dpi"
        assert (drawn / f"{name}.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")
    assert not list(drawn.glob(".*")), "no partial files"


def test_the_report_holds_results_and_figures_and_asks_for_nothing(drawn: Path, run: Path) -> None:
    page = (drawn / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == len(NAMES) + 1
    assert "Results, percent" in page and "HR@10" in page and "hstu" in page.lower() and "width" in page
    for outside in ("http://", "https://", "<script", "<link"):
        assert outside not in page


def test_the_same_run_gives_the_same_bytes(run: Path, drawn: Path, tmp_path: Path) -> None:
    list(write_figures(run, tmp_path))
    for path in sorted(drawn.iterdir()):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_ids_in_an_svg_do_not_depend_on_the_last_bit_of_a_position() -> None:
    svg = '<g clip-path="url(#p{0})"/><use xlink:href="#m{1}"/><g clip-path="url(#p{1})"/><clipPath id="p{0}"/>#c8c8c8'
    texts = [svg.format(*hashes).encode() for hashes in (("3fa101b24e", "0123456789"), ("6bf4bef05d", "abcdef0123"))]
    one, other = map(figure_style._numbered, texts)
    assert one == other
    assert one == b'<g clip-path="url(#p0)"/><use xlink:href="#m1"/><g clip-path="url(#p2)"/><clipPath id="p0"/>#c8c8c8'


@pytest.mark.parametrize("model", ["hstu-time", "hstu-torope", "tisasrec"])
def test_a_model_without_t_rope_says_so(model: str, data: Sequences, tmp_path: Path) -> None:
    settings = ("model.heads=2", "model.head_dim=4")
    view = open_run(untrained(data, tmp_path / "run", model, *settings))
    assert view.ropes == []
    for module in (figure_layers, figure_frequencies, figure_movement):
        assert "not available" in module.draw(view).title
    assert [scores is None for scores in figure_stages.stages(view).values()] == [False, False, False, True]
    for module in (figure_geometry, figure_moment, figure_stages, figure_items):
        assert len(content(module.draw(view).figure, "png")) > 10_000


def test_an_unfinished_run_has_a_report(data: Sequences, tmp_path: Path) -> None:
    run = untrained(data, tmp_path / "run", "hstu-time")
    list(write_figures(run, tmp_path / "out", ["svg"]))
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "has not ended" in page and not list((tmp_path / "out").glob("*.png"))


@pytest.mark.parametrize(
    "settings",
    [
        ("rotary.conditioning=paper",), ("rotary.rotate_key=false",), ("rotary.rotate_query=false",),
        ("rotary.bank=calendar",), ("rotary.share_alpha=true", "rotary.learnable=false"), ("rotary.shifted=false",),
    ],
)  # fmt: skip
def test_every_variant_of_the_encoding_is_drawn(settings: tuple[str, ...], data: Sequences, tmp_path: Path) -> None:
    view = open_run(untrained(data, tmp_path / "run", "hstu-trope", *settings))
    for module in DRAWN:
        assert module.draw(view).title


def _history(view: RunView) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = unpadded(example(view))
    return batch.items, batch.times, batch.t_now


def test_t_rope_in_a_softmax_model_has_attention_that_sums_to_one(data: Sequences, tmp_path: Path) -> None:
    view = open_run(untrained(data, tmp_path / "run", "sasrec-trope", "model.blocks=2"))
    maps = attention_maps(view.model, *_history(view))
    assert len(maps) == 2
    for one in maps:
        torch.testing.assert_close(one.sum(-1), torch.ones(len(one)))
    assert figure_layers.draw(view).title


def test_without_matplotlib_the_command_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"pip install 'trope\[figures\]'"):
        list(write_figures(run, run.parent / "none"))
    assert not (run.parent / "none").exists()


def test_bad_requests_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="png, svg, got pdf"):
        list(write_figures(run, tmp_path / "out", ["pdf"]))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="not a folder"):
        list(write_figures(run, tmp_path / "file"))
    with pytest.raises(FileNotFoundError, match="has no data"):
        list(write_figures(tmp_path / "nothing", tmp_path / "out"))


def test_attention_maps_are_what_the_model_computes(run: Path) -> None:
    """The map times v is the reference's output, and the map of a later query knows no later key."""
    view = open_run(run)
    batch = unpadded(example(view))
    seen: list[tuple[HSTUBlock, Any]] = []
    for block in view.model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs)))
    maps = attention_maps(view.model, *_history(view))
    looking_from = query_times(batch.times, t_now=batch.t_now)
    assert len(maps) == len(seen) == 2
    for (block, (stream, context)), one in zip(seen, maps, strict=True):
        with torch.no_grad():
            weights, _ = hstu_weights(block, stream, context)
            _, normed = norm(stream.x_TE, stream.delta_TE, out_dtype=context.dtype)
            _, v, q, k = block.split(project(normed, block.uvqk), context)
            buckets = time_buckets(looking_from, batch.times, len(block.bias.time) - 1)
            bounds = SequenceBounds.padded(batch.lengths, len(q))
            expected = attention(q, k, v, bounds, block.max_len, block.bias.position, block.bias.time, buckets)
        torch.testing.assert_close(torch.einsum("hmn,nhd->mhd", weights, v), expected)
        torch.testing.assert_close(one, weights.mean(0))
        assert not one.triu(1).any()
    shares = attention_shares(view.model, *_history(view))
    each = [weights[:, -1].abs().mean(0) for weights in (hstu_weights(block, *inputs)[0] for block, inputs in seen)]
    expected_L = sum(one / one.sum() for one in each) / len(each)
    torch.testing.assert_close(shares, expected_L)
    assert float(shares.sum()) == pytest.approx(1)


def test_geometry_is_the_mean_cosine_of_the_phase_sum() -> None:
    """Eq. attention for q = k of unit planes: (alpha_q t_query + alpha_k t_key) / beta, about the origin."""
    rope = TRoPE(8, time_span=(1_500_000_000, 1_700_000_000))
    looking_from = query_times(TIMES[None], t_now=TIMES[-1:] + DAY)[0]
    found = geometry(rope, TIMES, looking_from)
    a_q, a_k, beta = coefficients(rope, "q"), coefficients(rope, "k"), rope.betas.numpy()
    for m in range(3):
        for n in range(3):
            t_q, t_k = (float(t) - 1_600_000_000 for t in (looking_from[m], TIMES[n]))
            assert found[m, n] == pytest.approx(np.cos((a_q * t_q + a_k * t_k) / beta).mean(), abs=1e-6)


def test_stages_without_coefficients_are_their_formulas(run: Path) -> None:
    view = open_run(run)
    index, plain, shifted, ours = (scores for scores in figure_stages.stages(view).values())
    times, looking_from = block_sequence(view.data.time_span[1])
    beta = TRoPE(4).betas.numpy()
    gap = float(times[20] - times[3])
    assert plain is not None and plain[20, 3] == pytest.approx(np.cos(gap / beta).mean(), abs=1e-6)
    gap = float(looking_from[20] - times[3])
    assert shifted is not None and shifted[20, 3] == pytest.approx(np.cos(gap / beta).mean(), abs=1e-6)
    assert index is not None and index[20, 3] == pytest.approx(np.cos(17 * np.array([1.0, 1e-2])).mean())
    assert ours is not None and ours.shape == (32, 32)


def test_the_block_sequence_is_the_papers() -> None:
    times, looking_from = block_sequence(1_600_000_000)
    gaps = times.diff().tolist()
    assert gaps == [DAY] * 7 + [7 * DAY] * 8 + [round(MONTH)] * 8 + [round(YEAR)] * 8
    assert int(times[-1]) == 1_600_000_000
    assert looking_from.tolist() == [*times[1:].tolist(), 1_600_000_000 + round(YEAR)]


def test_block_share_is_none_by_position_and_all_by_blocks() -> None:
    times, looking_from = block_sequence(1_600_000_000)
    by_index, chance = block_share(geometry(IndexRoPE(16), times, looking_from))
    assert by_index == 0.0 and 0 < chance < 0.05
    noise = np.random.default_rng(0).normal(size=(32, 32))
    assert block_share(noise)[0] < 3 * chance
    blocks = np.arange(32) // 8
    assert block_share(10.0 * (blocks[:, None] == 3) + 0.0 * noise)[0] > 0.5


def test_periods_and_the_nearest_plane() -> None:
    rope = TRoPE(8, alpha_init="ones")
    np.testing.assert_allclose(periods(rope, "q"), 2 * math.pi * np.array([1e2, 1e4, 1e6, 1e8]))
    layer, plane, period = nearest_plane([TRoPE(8, rotate_query=False), rope], 5e6)
    assert (layer, plane) == (1, 2) and period == pytest.approx(2 * math.pi * 1e6)
    np.testing.assert_allclose(resonance(np.array([0.0, 3.5, 7.0]), 7.0), [1, -1, 1])


def test_movement_is_the_phase_gained_over_the_span() -> None:
    first, last = 1_500_000_000, 1_600_000_000
    rope = TRoPE(8, time_span=(first, last))
    with torch.no_grad():
        rope.get_parameter("delta_q").copy_(torch.tensor([0.0, 0.5, -1.0, 2.0]))
    moved, start = movement(rope, "q"), started_at(rope, "q")
    assert moved is not None and start is not None
    gained = (coefficients(rope, "q") - start) * (last - first) / rope.betas.numpy()
    np.testing.assert_allclose(moved, gained, atol=1e-6)
    assert figure_movement.summary(moved) == (pytest.approx(6.0), 3)
    assert movement(TRoPE(8, conditioning="paper"), "q") is None
    began = starting_periods(rope)
    assert began is not None and began[0] == pytest.approx(periods(rope, "q")[0])
    assert not np.isclose(began[3], periods(rope, "q")[3])
    assert starting_periods(TRoPE(8, conditioning="paper")) is None


def test_cycles_with_a_plane_are_counted_and_the_start_is_told(run: Path, tmp_path: Path, data: Sequences) -> None:
    turns = [np.array([1.04 * DAY, 5.0]), np.array([YEAR, 8 * DAY])]
    assert figure_frequencies.tuned_cycles(turns, figure_frequencies.CYCLES) == 2
    assert "before training" in figure_frequencies.draw(open_run(run)).title
    shared = open_run(untrained(data, tmp_path / "run", "hstu-trope", "rotary.bank=calendar"))
    assert "share their coefficients" in figure_frequencies.draw(shared).title
    half = shared.ropes[0].learned
    assert strength(shared.ropes[0]) == pytest.approx(rms(coefficients(shared.ropes[0], "q")[:half]))


def test_a_plane_is_chosen_on_which_the_history_is_less_than_a_turn(run: Path) -> None:
    view = open_run(run)
    for span in (1e4, 1e6, 3e7):
        period, where = figure_geometry.choose_plane(view, span)
        assert span < period and ("as trained" in where or "bank" in where)
    bare = dataclasses.replace(view, ropes=[])
    assert "no T-RoPE" in figure_geometry.choose_plane(bare, 1e6)[1]


def test_titles_break_evenly_and_never_before_a_percent_sign() -> None:
    assert balance("one two three four five six", 24) == "one two three\nfour five six"
    assert balance("short", 24) == "short"
    figure = page(2)
    assert "\n%" not in finish("x", figure, "a " * 43 + "5 % of all", "").figure.get_suptitle()


def test_small_numbers() -> None:
    assert rms(np.array([3.0, -4.0])) == pytest.approx(math.sqrt(12.5))
    assert figure_layers.select([1.0, 0.2]) == [0, 1]
    assert figure_layers.select([1.0, 0.2, 3.0, 0.5, 2.0]) == [0, 1, 2]
    assert figure_geometry.longest_share(np.array([0.0, 1.0, 4.0])) == 0.75
    assert burstiness(torch.tensor([0, 10, 20])) == 0.0
    assert burstiness(torch.tensor([5])) == 0.0
    one = np.arange(9.0).reshape(3, 3)
    assert causal_correlation(one, -one) == pytest.approx(-1)
    assert causal_correlation(one, np.ones((3, 3))) == 0.0
    rope = TRoPE(8, alpha_init="ones")
    assert figure_frequencies.same_sign([rope, TRoPE(8, rotate_key=False)]) == (4, 4)
    told = {
        45: "45 s",
        3600: "1 h",
        5400: "1.5 h",
        90 * DAY: "90 d",
        200 * DAY: "6.6 mo",
        YEAR: "1 y",
        1e12: "over 1000 y",
    }
    assert {seconds: say_short(seconds) for seconds in told} == told


def test_top_items_at_the_same_moment_are_the_same(run: Path) -> None:
    view: RunView = open_run(run)
    users = test_users(view, 5)
    kept = figure_moment.overlaps(figure_moment.served(view, users, torch.tensor([0, 0, 400 * DAY])))
    assert kept.shape == (5, 3)
    assert (kept[:, :2] == 10).all() and (kept[:, 2] <= 10).all()
    batch = histories(view, users)
    assert batch.users.tolist() == users.tolist() and figure_moment.horizon(view) <= YEAR


def test_what_another_moment_changes_is_said() -> None:
    offsets = torch.tensor([0, 30 * DAY, 60 * DAY])
    assert "Asking later, up to 60 d, changes nothing in the top 10" in figure_moment._finding(
        np.full(3, 10.0), offsets, 10, 5
    )
    assert "30 d later changes the most: 2.0 of" in figure_moment._finding(np.array([10.0, 8, 9]), offsets, 10, 5)
    assert "less than 0.1 of" in figure_moment._finding(np.array([10.0, 9.97, 10]), offsets, 10, 5)


@pytest.mark.parametrize("quality", [[0.3, 0.2, 0.1], [0.1, 0.2, 0.3], [0.3]], ids=["first", "last", "only"])
def test_the_best_epochs_label_stays_inside_its_axes(run: Path, tmp_path: Path, quality: list[float]) -> None:
    metric = "HR@10"
    text = (run / "config.toml").read_text()
    assert f'criterion = "{metric}"' in text
    (tmp_path / "config.toml").write_text(text)
    rows = [{"epoch": n, "epoch_loss": 5.0 - n, metric: value} for n, value in enumerate(quality, start=1)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with figure_style.style():
        figure = figure_curve.draw(tmp_path).figure
        figure.draw_without_rendering()
        axes = figure.axes[1]
        (label,) = axes.texts
        inside, frame = label.get_window_extent(), axes.get_window_extent()
    assert frame.x0 <= inside.x0 and inside.x1 <= frame.x1 and inside.y1 <= frame.y1
    assert all(float(tick.get_text()).is_integer() for tick in axes.get_xticklabels() if tick.get_text())


HOSTILE = ("$\\frac{1$", "$", "\x1b[31m", "<svg>&", "\\$x$", "[/bold]", "a\nb", "\u202eevil", "$_$", "日本")


def hostile_data(path: Path) -> Sequences:
    """A log whose ids mean something to a typesetter, a terminal or a page, in a folder of that kind."""
    names = {number: f"{HOSTILE[number % len(HOSTILE)]}{number}" for number in range(31)}
    rows = [(names[user], names[item], time) for user, item, time in random_log(rows=400, users=30, items=20)]
    return prepared(write_parquet(path / "log.parquet", rows), path / "$\\frac{1$ <b>")


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_ids_are_drawn_as_they_are(tmp_path: Path) -> None:
    """No id is typeset, breaks the SVG or acts on the page; the user of a caption is named by the log's id."""
    hostile = hostile_data(tmp_path)
    run = untrained(hostile, tmp_path / "[bold]\x1b[31m$\\frac{1$", "hstu-trope")
    view = open_run(run)
    with figure_style.style():
        *captions, items = (m.draw(view) for m in (figure_geometry, figure_layers, figure_moment, figure_items))
    ids, known = hostile.ids("user_ids"), hostile.ids("item_ids")
    assert ids is not None and known is not None
    name = printable(str(ids[int(example(view).users[0])]))
    for drawn in captions:
        assert f"test user {name} of $\\frac{{1$ <b>" in drawn.caption
    titles = {axes.get_title(loc="left") for axes in items.figure.axes}
    assert len(titles) == 6 and titles <= {f"item {printable(str(each))}" for each in known.to_list()}
    svg = content(items.figure, "svg")
    ElementTree.fromstring(svg)
    page = write_report(run, [(items, svg), (captions[0], b"<svg/>")], tmp_path / "report.html").read_text()
    assert not {"\x1b", "\u202e"} & set(page) and "<b>" not in page and f"test user {escape(name)} of $" in page


def test_letters_that_the_font_lacks_are_no_warning() -> None:
    drawn = figure_style.unavailable("x", "日本", "日本")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        content(drawn.figure, "png")


def test_a_log_of_one_moment_has_no_geometry(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", [(user, item, START) for user in range(6) for item in range(6)])
    view = open_run(untrained(prepared(log, tmp_path / "data"), tmp_path / "run", "sasrec"))
    with figure_style.style():
        assert "not available" in figure_geometry.draw(view).title


def test_a_season_may_have_any_name(tmp_path: Path) -> None:
    curve = np.ones(3)
    panels = [figure_season.Panel("Q1", ["$\\frac{1$", "\x1b[31m"], curve, {"a": curve, "$\\b$": curve})] * 4
    for path in figure_season.draw(panels, TIMES.numpy(), "$\\frac{1$", tmp_path / "season.png"):
        assert path.stat().st_size > 10_000
    ElementTree.fromstring((tmp_path / "season.svg").read_bytes())


def test_users_are_named_by_their_own_ids_or_else_by_number(run: Path) -> None:
    view = open_run(run)
    ids = view.data.ids("user_ids")
    user = int(example(view).users[0])
    assert ids is not None and ids[user] != user, "the log's ids begin at 1"
    assert f"test user {ids[user]} of " in figure_geometry.draw(view).caption
    bare = copy.copy(view.data)
    bare.ids = lambda name: None  # type: ignore[method-assign]
    assert whose(dataclasses.replace(view, data=bare), example(view)) == f"test user number {user + 1} of data"


def test_a_log_of_plain_dates_cannot_tell_the_day(tmp_path: Path) -> None:
    rows = [(user, item, time - time % DAY) for user, item, time in random_log(rows=400, users=30, spread=10**8)]
    dates = prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "data")
    view = open_run(untrained(dates, tmp_path / "run", "hstu-trope"))
    with figure_style.style():
        drawn = figure_frequencies.draw(view)
    panels = [axes.get_title(loc="left") for figure in drawn.figure.subfigs for axes in figure.axes]
    assert "day: cannot tell, the log has plain dates" in panels
    assert " of 5" in drawn.title and " of 6" not in drawn.title
    assert figure_frequencies.tuned_cycles([np.array([DAY])], figure_frequencies.CYCLES[1:]) == 0


def test_the_words_of_figure_7_do_not_cover_its_curves(run: Path) -> None:
    view = open_run(run)
    with figure_style.style():
        figure = figure_items.draw(view).figure
        figure.draw_without_rendering()
    axes = figure.axes[0]
    (line,), (area,) = axes.lines, axes.collections
    highest = max(line.get_ydata().max(), area.get_paths()[0].vertices[:, 1].max())
    lowest = min(text.get_window_extent().y0 for text in axes.texts)
    assert {text.get_text() for text in axes.texts} == {"model", "events"}
    assert axes.transData.transform((0, highest))[1] < lowest


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("7\n", "line 2: it holds 7"), ("{\n", "line 2: "), ("\xff\n", "line 2: "),
        ('{"epoch_loss": 1}\n', "line 2: epoch must be"), ("[" * 100_000 + "\n", "line 2: it is nested too deep"),
        ('{"epoch": 1, "epoch_loss": "x"}\n', "line 2: epoch_loss"),
        ('{"epoch": 2, "epoch_loss": 1, "HR@10": null}\n', "line 2: HR@10"),
        ('{"epoch": 2, "epoch_loss": NaN}\n', "line 2: NaN is not"),
        (f'{{"epoch": 2, "epoch_loss": 1, "seconds": 1{"0" * 400}}}\n', "line 2: a number has 401 digits"),
        ('{"epoch": 2, "epo', None),
    ],
)  # fmt: skip
def test_a_damaged_log_gives_one_line(run: Path, tmp_path: Path, damage: str, words: str | None) -> None:
    """A last line without an end was cut short by a kill; it is no damage."""
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    whole = b'{"epoch": 1, "epoch_loss": 5.0, "HR@10": 0.5}\n'
    (tmp_path / "log.jsonl").write_bytes(whole + damage.encode("latin-1"))
    if words is None:
        assert "best after epoch 1 of 1" in figure_curve.draw(tmp_path).title
        return
    with pytest.raises(ValueError, match=rf"log\.jsonl is damaged or foreign: {re.escape(words)}") as refused:
        figure_curve.draw(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("name", ["metrics.json", "env.json"])
def test_a_damaged_record_of_a_run_gives_one_line(data: Sequences, tmp_path: Path, name: str) -> None:
    run = untrained(data, tmp_path / "run", "hstu-time")
    for damage in ("{", "[1]", '{"test": 3, "date": 3}', "[" * 100_000):
        (run / name).write_text(damage)
        with pytest.raises(ValueError, match=rf"{re.escape(name)} is damaged or foreign: "):
            write_report(run, [], tmp_path / "report.html")
    (run / name).unlink()
    assert write_report(run, [], tmp_path / "report.html").is_file()


def test_items_over_time_count_training_events_and_ask_from_histories_until_then(
    data: Sequences, tmp_path: Path
) -> None:
    """Counts against a loop over the events; histories against the store; asking for one is asking the model."""
    view = open_run(untrained(data, tmp_path / "run", "hstu-trope"))
    events = figure_items.training_events(view)
    assert len(events.items) == int(data.train_end.sum())
    assert events.parts.min() == 0 and events.parts.max() == figure_items.PARTS - 1
    items = np.array([3, 0])
    want = np.zeros((figure_items.PARTS, 2))
    for item, part in zip(events.items, events.parts, strict=True):
        want[part] += item == items
    assert (figure_items.counted(events, items) == want).all()
    beyond = np.array([data.num_items + 5, 3])  # an item that no event has
    assert (figure_items.counted(events, beyond)[:, 1] == want[:, 0]).all()
    assert not figure_items.counted(events, beyond)[:, 0].any()
    places = figure_items.returns(view, events.places)
    starts = set(data.offsets.tolist())
    assert len(places) and all(p not in starts and data.times[p] > data.times[p - 1] for p in places.tolist())
    found, times, lengths, t_now = figure_items.before(view, places[:5])
    for row, place in enumerate(places[:5].tolist()):
        first = max(s for s in starts if s < place)
        history = data.items[max(first, place - view.model.config.model.max_len) : place]
        assert found[row, : lengths[row]].tolist() == history.tolist() and not found[row, lengths[row] :].any()
        assert t_now[row] == data.times[place] and times[row, lengths[row] - 1] == data.times[place - 1]
    part = int(events.parts[np.searchsorted(events.places, places[0])])
    shares = figure_items.expected(view, events, np.arange(data.num_items))
    assert shares[part].sum() == pytest.approx(1.0, abs=1e-5) and np.isfinite(shares[part]).all()


def test_items_that_stand_out_and_how_curves_agree() -> None:
    counts = np.ones((12, 8))
    for stretch in range(6):
        counts[2 * stretch, stretch + 1] = 9
    assert figure_items.standouts(counts) == [1, 2, 3, 4, 5, 6]
    assert len(figure_items.standouts(np.ones((12, 2)))) == 2  # fewer items than panels
    time = np.linspace(0, 2 * math.pi, 20)[:, None]
    agree = figure_items.correlations(np.hstack((time, time, time * 0)), np.hstack((2 * time + 1, -time, time)))
    assert agree.tolist() == pytest.approx([1, -1, 0])
    assert figure_items.relative(np.array([[1.0, 0.0], [3.0, 0.0]])).tolist() == [[0.5, 0.0], [1.5, 0.0]]
