"""Preparation turns an event log into a prepared folder. The same log gives the same bytes.

The steps: read -> check -> filter -> k-core -> dense ids -> sort -> arrays -> split. They are written once, as Ibis
expressions, which run on DuckDB, on Spark, or in the database that holds the table; only `Engine.read` differs. Dense
ids follow the order of the original ids (integers by value, text by UTF-8 bytes). Events are sorted by user, time and
place in the source. They leave the engine one range of users at a time, so the whole log is never sorted in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir

from trope.data.arrays import Coded, code, number, write_events, write_items
from trope.data.core import Sizes, k_core
from trope.data.engines.base import Engine
from trope.data.engines.failure import explain
from trope.data.engines.open import open_engine
from trope.data.events import Events, clean
from trope.data.folder import FORMAT
from trope.data.item_names import ItemNames, read_names
from trope.data.progress import StageReport, Stages
from trope.data.protocols import Protocol
from trope.data.sharded import write_shards
from trope.data.sources.description import Lookup, Source
from trope.data.sources.urls import local_file
from trope.data.splits import write_splits
from trope.data.writer import staging, write_meta
from trope.environment import __version__
from trope.times import say_iso, say_moment

ON_BAD = ("fail", "skip")
MOST_EVENTS = 2**62


@dataclass(frozen=True)
class Options:
    """Which events to keep and how to split them; recorded in `meta.json`.

    min_user, min_item: thresholds of the k-core; None means the source's own. once: filter in one pass.
    event_types: keep only these values of the event column. since, until: keep times in [since, until), Unix seconds.
    on_bad: `fail` at a bad row, or `skip` and count it.
    shard_users: users of a shard, all of them where there are fewer; None for a dataset without shards.
    """

    protocol: Protocol = field(default_factory=Protocol)
    min_user: int | None = None
    min_item: int | None = None
    once: bool = False
    event_types: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    on_bad: str = "fail"
    shard_users: int | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in ON_BAD:
            raise ValueError(f"--on-bad must be one of {', '.join(ON_BAD)}, got {self.on_bad!r}")
        if self.shard_users is not None and self.shard_users < 1:
            raise ValueError(f"--shard-users must be at least 1, got {self.shard_users}")
        for flag, least in (("--min-user", self.min_user), ("--min-item", self.min_item)):
            if least is not None and least > MOST_EVENTS:
                raise ValueError(f"{flag} {least} is more events than a log can have; pass {MOST_EVENTS} or fewer")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError(
                f"--since {say_moment(self.since)} is not before --until {say_moment(self.until)}; "
                "no event would be left"
            )


def prepare(
    source: Source,
    out: Path,
    options: Options | None = None,
    *,
    engine: str = "duckdb",
    threads: int | None = None,
    memory: str | None = None,
    master: str | None = None,
    overwrite: bool = False,
    progress: StageReport | None = None,
) -> dict[str, Any]:
    """Prepare `source` into folder `out`, which appears only when whole; returns its `meta.json`.

    engine, threads, memory, master: see `open_engine`.
    overwrite: replace an existing dataset, at the very end. A folder that holds anything else is refused.
    progress: called with a stage's name and how far it is; see `trope.data.progress`.
    """
    options = options or Options()
    _check_apart(source, out)
    with staging(out, overwrite) as folder:
        work = folder / "work"
        work.mkdir()
        with open_engine(engine, source, work, threads, memory, master) as running:
            try:
                with Stages(progress, running.share_done) as stages:
                    meta = _prepare(source, folder, options, running, stages)
            except running.errors() as error:
                raise explain(error, source) from (None if source.url else error)  # it may quote the URL
        shutil.rmtree(work)
        return write_meta(folder, meta)


def read_log(source: Source, folder: Path, options: Options) -> dict[str, Any]:
    """Write the events of a log into `folder` as `prepare` would, without a k-core or a split; DuckDB reads files.

    Returns the entry of every array in `meta.json`. options: event types and what to do about bad rows.
    """
    with open_engine("duckdb", source, folder, None, None, None) as engine:
        try:
            with Stages(None, engine.share_done) as stages:
                source = engine.settle(source)
                _, events, table, _ = _read(source, options, engine)
                numbered = number(code(table, engine))
                if numbered.num_events == 0:
                    used = ", ".join(options.event_types)
                    raise ValueError(f"{source.name} has no event of type {used}; there is nothing to learn")
                return write_events(numbered, folder, events.ticks, source.names, stages)
        except engine.errors() as error:
            raise explain(error, source) from (None if source.url else error)  # it may quote the URL


def _read(source: Source, options: Options, engine: Engine) -> tuple[int, Events, ir.Table, dict[str, int]]:
    """Events without a group, all valid events, those that are wanted, and how many are not, by reason."""
    raw = engine.read(source)
    without_group = 0
    if source.lookup is not None:
        table, without_group = _regrouped(raw.table, engine.read_lookup(source.lookup), source.lookup)
        raw = replace(raw, table=table)
    events = clean(raw, source, options.on_bad == "skip")
    table, unwanted = _chosen(events, source, options)
    if source.is_text:  # parse the text once, not at every pass
        table = engine.keep(table)
    return without_group, events, table, unwanted


def _check_apart(source: Source, out: Path) -> None:
    """Refuse a source inside `out`, which would be deleted with it, and an `out` inside the source's folder."""
    there = Path(os.path.realpath(out))
    lookup = source.lookup.path if source.lookup else None
    inputs = [*source.files, lookup, source.items_file, local_file(source.url)]
    for file in inputs:
        if file is not None and Path(os.path.realpath(file)).is_relative_to(there):
            raise ValueError(f"the source {file} lies inside --out {out}; choose another folder for --out")
    if source.folder is not None and there.is_relative_to(os.path.realpath(source.folder)):
        raise ValueError(f"--out {out} lies inside the source {source.folder}; choose a folder outside of it")


def _prepare(source: Source, folder: Path, options: Options, engine: Engine, stages: Stages) -> dict[str, Any]:
    """Write every array into `folder`; returns `meta.json` without its checksum."""
    source = engine.settle(source)
    min_user = source.min_user if options.min_user is None else options.min_user
    min_item = source.min_item if options.min_item is None else options.min_item
    file = source.items_file
    given = None if file is None else read_names(file, source.columns.item, source.name_col)
    stages.begin("read and check")
    without_group, events, table, unwanted = _read(source, options, engine)
    core, before = k_core(table, min_user, min_item, options.once, engine, stages)
    stages.begin("number")
    coded = code(core, engine)
    filters = {
        "min_user": min_user,
        "min_item": min_item,
        "core": "once" if options.once else "fixed point",
        "event_types": list(options.event_types),
        "since": options.since,
        "until": options.until,
    }
    users = int(coded.users.count().to_pyarrow().as_py())
    if users == 0:
        raise ValueError(f"no events of {source.name} are left after filtering{_flags(filters, events.bad.count)}")
    names = _names(source, given)
    if options.shard_users is not None:
        stages.begin("sort")
        size = min(options.shard_users, users)
        after, written = write_shards(coded, size, folder, events.ticks, options.protocol, source.name, engine, stages)
        written["arrays"] = write_items(coded.item_ids(), folder, names)
    else:
        after, written = _write_whole(coded, folder, events.ticks, options.protocol, source.name, names, stages)
    counts = {**after._asdict(), **written.pop("counts")}
    return {
        "format": written.pop("format"),
        "source": _described(source, events.rows),
        "filters": filters,
        "counts": counts,
        **{name: written[name] for name in ("protocol", "time_span")},
        **({"names": given.described(coded.item_ids().to_pylist())} if given else {}),
        "bad_rows": asdict(events.bad),
        "dropped": {
            "rows": {
                "without_group": without_group,
                "bad": events.bad.count,
                **unwanted,
                "core": before.events - after.events if before else 0,
            },
            "core": {name: [getattr(before, name), size] for name, size in after._asdict().items()} if before else None,
        },
        "paper": _compared(source, counts),
        "arrays": written["arrays"],
        **{name: written[name] for name in ("shard_users", "shards") if name in written},
        "made_by": {"trope": __version__, "engine": engine.label},
    }


def _flags(filters: dict[str, Any], bad: int) -> str:
    """The filters in use, as they are written on the command line. bad: rows that were skipped."""
    used = [f"--{name.replace('_', '-')} {filters[name]}" for name in ("min_user", "min_item") if filters[name] > 1]
    used += [f"--event {kind}" for kind in filters["event_types"]]
    used += [f"--{name} {say_iso(filters[name])}" for name in ("since", "until") if filters[name] is not None]
    used += ["--on-bad skip"] if bad else []
    return f" with {', '.join(used)}; loosen one of them" if used else ""


def _write_whole(
    coded: Coded,
    folder: Path,
    ticks: int,
    protocol: Protocol,
    name: str,
    names: Callable[[], Mapping[str, str]] | None,
    stages: Stages,
) -> tuple[Sizes, dict[str, Any]]:
    """Write a dataset that is not sharded; returns its sizes, and its entries of `meta.json`, as `write_shards`."""
    numbered = number(coded)
    entries = write_events(numbered, folder, ticks, names, stages)
    stages.begin("split")
    split = write_splits(folder, protocol, name)
    entries["splits"] = split.pop("entry")
    after = Sizes(numbered.num_users, numbered.num_items, numbered.num_events)
    return after, {"format": FORMAT, "arrays": entries, **split}


def _names(source: Source, given: ItemNames | None) -> Callable[[], Mapping[str, str]] | None:
    """Names by original id: those of a file that was given, before the source's own."""
    if given is None:
        return source.names
    own = source.names
    return lambda: {**(own() if own is not None else {}), **given.by_id}


def _regrouped(table: ir.Table, groups: ir.Table, lookup: Lookup) -> tuple[ir.Table, int]:
    """The events by coarser items; those whose item has no value are left out, and counted."""
    groups = groups.select(item=groups[lookup.key], group=groups[lookup.value])
    groups = groups.filter(groups.group.notnull())
    left_out = table.anti_join(groups, "item").count().to_pyarrow().as_py()
    return table.inner_join(groups, "item").drop("item").rename(item="group"), left_out


def _chosen(events: Events, source: Source, options: Options) -> tuple[ir.Table, dict[str, int]]:
    """The events in the time range and of the wanted types, and how many are not."""
    table = events.table
    unwanted = {"other_event": 0, "before_since": 0, "from_until": 0}
    if options.since is not None:
        table = table.filter(table.tick >= options.since * events.ticks)
    if options.until is not None:
        table = table.filter(table.tick < options.until * events.ticks)
    if options.event_types:
        if "event" not in table.columns:
            raise ValueError(
                f"--event needs to know the column of {source.name} that holds it; name it with --event-col"
            )
        table = table.filter(table.event.cast("string").isin(options.event_types))
    if table is not events.table:
        unwanted |= _count_unwanted(events, options)
    return table.drop("event") if "event" in table.columns else table, unwanted


def _count_unwanted(events: Events, options: Options) -> dict[str, int]:
    """The events that `_chosen` leaves out, by the first reason that holds, in one pass."""
    table = events.table
    cases = []
    if options.event_types:
        wanted = table.event.cast("string").isin(options.event_types)
        cases.append((~wanted.fill_null(False), "other_event"))
    if options.since is not None:
        cases.append((table.tick < options.since * events.ticks, "before_since"))
    if options.until is not None:
        cases.append((table.tick >= options.until * events.ticks, "from_until"))
    table = table.select(reason=ibis.cases(*cases, else_=ibis.null("string")))
    sums = {reason: (table.reason == reason).sum() for _, reason in cases}
    return {reason: int(count or 0) for reason, count in table.aggregate(**sums).to_pyarrow().to_pylist()[0].items()}


def _described(source: Source, rows: int) -> dict[str, Any]:
    """The source as `meta.json` records it: names and sizes, but no paths of this machine."""
    return {
        "name": source.name,
        "rows": rows,
        "kind": source.kind,
        "columns": source.columns.used(),
        "time_unit": source.time_unit,
        **({"time_format": source.time_format} if source.time_format else {}),
        "files": [{"name": file.name, "bytes": file.stat().st_size} for file in source.files],
        **({"table": source.table} if source.table else {}),
        **({"items_by": source.lookup.value} if source.lookup else {}),
    }


def _compared(source: Source, counts: dict[str, int]) -> dict[str, Any] | None:
    """Our counts beside the paper's; None where the paper has none for this dataset."""
    if source.paper is None:
        return None
    printed = asdict(source.paper)
    return {row: {"ours": counts[row], "paper": printed[row], "equal": counts[row] == printed[row]} for row in printed}
