"""Adapters on small files in the exact format each source publishes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import loose, prepared, unnumbered

from trope.data.prepare import Options, prepare
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.data.sources.published import PAPER, amazon_2023, complete_journey, movielens_20m, named, pixelrec

PAPER_RULE = loose(protocol=Protocol("loo-paper"))


def ml_1m(folder: Path) -> None:
    (folder / "ratings.dat").write_text(
        "1::1193::5::978300760\n1::661::3::978302109\n1::914::3::978301968\n2::1193::5::978298413\n2::661::4::978299000\n"
    )
    (folder / "movies.dat").write_bytes(
        "661::James and the Giant Peach (1996)::Animation\n1193::One Flew Over (1975)::Drama\n914::Amélie::X\n".encode(
            "latin-1"
        )
    )


def ml_20m(folder: Path) -> None:
    (folder / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n1,29,3.5,1112484676\n1,32,3.5,1112484819\n"
        "2,3,4.0,974820889\n2,62,5.0,974820598\n"
    )
    (folder / "movies.csv").write_text(
        'movieId,title,genres\n2,Jumanji (1995),Adventure\n29,"City of Lost Children, The (1995)",Drama\n'
    )


AMAZON = [
    ("AGKHLEW2SOWHNMFQIJGBECAF7INQ", "B081TJ8YS3", 4.0, 1588615855070),
    ("AGKHLEW2SOWHNMFQIJGBECAF7INQ", "B097R46CSY", 5.0, 1589665266052),
    ("AE74DYR3QUGVPZJ3P7RFWBGIX7XQ", "B081TJ8YS3", 2.0, 1588615855990),
    ("AE74DYR3QUGVPZJ3P7RFWBGIX7XQ", "B00YQ6X8EO", 5.0, 1588615855071),
]


def amazon_2023_csv(folder: Path) -> None:
    lines = ["user_id,parent_asin,rating,timestamp", *(",".join(map(str, row)) for row in AMAZON)]
    (folder / "Books.csv").write_text("\n".join(lines) + "\n")


def amazon_2023_reviews(folder: Path) -> None:
    with gzip.open(folder / "Books.jsonl.gz", "wt") as file:
        for user, item, rating, time in AMAZON:
            review = {"rating": rating, "title": "a, b", "text": 'x "y"\n', "images": [], "asin": f"V{item}"}
            review |= {"parent_asin": item, "user_id": user, "timestamp": time, "helpful_vote": 0}
            file.write(json.dumps(review | {"verified_purchase": True}) + "\n")


def amazon_2014_ratings(folder: Path) -> None:
    (folder / "ratings_Books.csv").write_text(
        "AH2L9G3DQHHAJ,0000000116,4.0,1019865600\nA2IIIDRK3PRRZY,0000000116,1.0,1395619200\n"
        "AH2L9G3DQHHAJ,0000000868,4.0,1031702400\nA2IIIDRK3PRRZY,0000013714,4.0,1383177600\n"
    )


def amazon_2014_reviews(folder: Path) -> None:
    with gzip.open(folder / "reviews_Books_5.json.gz", "wt") as file:
        for user, item, time in (("A10", "000100", 1355616000), ("A10", "000101", 1071100800), ("A11", "000100", 1)):
            review = {"reviewerID": user, "asin": item, "reviewerName": 'J. "X"', "helpful": [0, 0]}
            file.write(
                json.dumps(review | {"overall": 5.0, "unixReviewTime": time, "reviewTime": "12 16, 2012"}) + "\n"
            )


def pixel(folder: Path) -> None:
    (folder / "Pixel200K.csv").write_text(
        "item_id,user_id,timestamp\ni36413,u1,1658000000\ni31,u1,1658000005\ni31,u2,1658000001\ni7,u2,1658000009\n"
    )


def recbole(folder: Path) -> None:
    (folder / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n196\t242\t3\t881250949\n"
        "196\t302\t3\t881250950.0\n22\t242\t1\t878887116\n22\t377\t1\t878887117\n"
    )
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\n242\tKolya\t1996\n302\tL.A. Confidential\t1997\n"
    )


CASES: list[tuple[str, Callable[[Path], None], dict]] = [
    (
        "ml-1m",
        ml_1m,
        {1: [(1193, 978300760), (914, 978301968), (661, 978302109)], 2: [(1193, 978298413), (661, 978299000)]},
    ),
    (
        "ml-20m",
        ml_20m,
        {1: [(29, 1112484676), (32, 1112484819), (2, 1112486027)], 2: [(62, 974820598), (3, 974820889)]},
    ),
    *(
        (
            "amazon-2023:Books",
            write,
            {
                # The two times differ by less than a second: milliseconds decide the order.
                "AE74DYR3QUGVPZJ3P7RFWBGIX7XQ": [("B00YQ6X8EO", 1588615855), ("B081TJ8YS3", 1588615855)],
                "AGKHLEW2SOWHNMFQIJGBECAF7INQ": [("B081TJ8YS3", 1588615855), ("B097R46CSY", 1589665266)],
            },
        )
        for write in (amazon_2023_csv, amazon_2023_reviews)
    ),
    (
        "amazon-2014:Books",
        amazon_2014_ratings,
        {
            "A2IIIDRK3PRRZY": [("0000013714", 1383177600), ("0000000116", 1395619200)],
            "AH2L9G3DQHHAJ": [("0000000116", 1019865600), ("0000000868", 1031702400)],
        },
    ),
    (
        "amazon-2014:Books",
        amazon_2014_reviews,
        {"A10": [("000101", 1071100800), ("000100", 1355616000)], "A11": [("000100", 1)]},
    ),
    (
        "pixel200k",
        pixel,
        {"u1": [("i36413", 1658000000), ("i31", 1658000005)], "u2": [("i31", 1658000001), ("i7", 1658000009)]},
    ),
    (
        "recbole:ml-100k",
        recbole,
        {22: [(242, 878887116), (377, 878887117)], 196: [(242, 881250949), (302, 881250950)]},
    ),
]


@pytest.mark.parametrize(("name", "write", "expected"), CASES, ids=[f"{n}-{w.__name__}" for n, w, _ in CASES])
def test_published_format(tmp_path: Path, name: str, write: Callable[[Path], None], expected: dict) -> None:
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw")
    data = prepared(name, tmp_path / "out", PAPER_RULE, raw=tmp_path / "raw")
    assert unnumbered(data) == expected
    assert data.meta["source"]["name"] == name


@pytest.mark.parametrize(
    ("name", "write", "names"),
    [
        ("ml-1m", ml_1m, ["James and the Giant Peach (1996)", "Amélie", "One Flew Over (1975)"]),
        ("ml-20m", ml_20m, ["Jumanji (1995)", "", "City of Lost Children, The (1995)", "", ""]),
        ("recbole:ml-100k", recbole, ["Kolya", "L.A. Confidential", ""]),
    ],
)
def test_names_are_kept_for_display(tmp_path: Path, name: str, write: Callable[[Path], None], names: list[str]) -> None:
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw")
    found = prepared(name, tmp_path / "out", PAPER_RULE, raw=tmp_path / "raw").ids("item_names")
    assert found is not None
    assert found.to_list() == names


def test_names_that_are_all_unknown(tmp_path: Path) -> None:
    pixel(tmp_path)
    source = replace(pixelrec(tmp_path, "200K"), names=dict)
    prepare(source, tmp_path / "out", PAPER_RULE)
    names = Sequences.load(tmp_path / "out").ids("item_names")
    assert names is not None
    assert names.to_list() == ["", "", ""]


def test_the_paper_table_is_compared_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    pixel(tmp_path / "raw")
    rows = prepared("pixel200k", tmp_path / "out", PAPER_RULE, raw=tmp_path / "raw").meta["paper"]
    assert rows["users"] == {"ours": 2, "paper": 200_000, "equal": False}
    assert rows["events"]["paper"] == 3_965_656
    assert set(PAPER) == {"ml-20m", "amazon-2023:Books", "pixel200k", "pixel1m", "pixel8m"}


def test_sets_published_filtered_are_not_filtered_again(tmp_path: Path) -> None:
    ml_20m(tmp_path)
    assert (movielens_20m(tmp_path).min_user, movielens_20m(tmp_path).min_item) == (1, 1)
    amazon_2023_csv(tmp_path)
    assert (amazon_2023(tmp_path, "Books").min_user, amazon_2023(tmp_path, "Books").min_item) == (5, 5)


def grocery(folder: Path) -> Path:
    times = pa.array([1_483_271_606 * 10**9, 1_483_271_606 * 10**9, 1_483_358_006 * 10**9] * 2, pa.timestamp("ns"))
    sales = {
        "household_id": [900, 900, 900, 7, 7, 7],
        "basket_id": [31198570044, 31198570044, 31198570050, 1, 1, 2],
        "product_id": [1095275, 9878513, 1095275, 44, 1095275, 9878513],
        "transaction_timestamp": times,
    }
    pq.write_table(pa.table(sales), folder / "transactions.parquet")
    products = {
        "product_id": [1095275, 9878513, 44],
        "product_type": ["BANANAS", "ICE", None],
        "brand": ["National"] * 3,
        "package_size": ["40 LB", None, None],
    }
    pq.write_table(pa.table(products), folder / "products.parquet")
    return folder


def test_complete_journey_by_product(tmp_path: Path) -> None:
    raw = grocery(tmp_path)
    data = prepared("complete-journey", tmp_path / "out", PAPER_RULE, raw=raw)
    assert unnumbered(data)[900] == [(1095275, 1_483_271_606), (9878513, 1_483_271_606), (1095275, 1_483_358_006)]
    names, baskets = data.ids("item_names"), data.ids("basket_ids")
    assert names is not None
    assert baskets is not None
    assert names.to_list() == ["National", "BANANAS, National, 40 LB", "ICE, National"]
    assert baskets.to_list() == [1, 2, 31198570044, 31198570050]


def test_complete_journey_by_product_type(tmp_path: Path) -> None:
    data = prepared("complete-journey", tmp_path / "out", PAPER_RULE, raw=grocery(tmp_path), level="type")
    assert [item for item, _ in unnumbered(data)[7]] == ["BANANAS", "ICE"]  # the product without a type is left out
    assert data.meta["source"]["items_by"] == "product_type"
    with pytest.raises(ValueError, match="--level must be one of"):
        complete_journey("brand", tmp_path)


def test_complete_journey_from_its_package(tmp_path: Path) -> None:
    data = prepared("complete-journey", tmp_path / "out", loose(protocol=Protocol("next-basket")))
    counts = data.meta["counts"]
    assert (counts["events"], counts["users"], counts["items"], counts["baskets"]) == (
        1_469_307,
        2_469,
        68_509,
        155_848,
    )


def test_a_generated_shop_by_name(tmp_path: Path) -> None:
    from trope.data.synthetic import CalendarShop, write_events

    raw = write_events(tmp_path / "shop", CalendarShop(users=200, items=120), progress=False)
    data = prepared("calendar-shop", tmp_path / "out", Options(), raw=raw)
    assert isinstance(data, Sequences)
    assert data.baskets is not None


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("ml-1m", None, "say where they are with --raw"),
        ("amazon-2023", "there", "needs a part after a colon"),
        ("pixel8m", "there", "none of Pixel8M.csv"),
        ("recbole:x", "there", "none of x.inter"),
    ],
)
def test_a_name_without_its_files(tmp_path: Path, name: str, raw: str | None, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        named(name, None if raw is None else tmp_path, "product")
