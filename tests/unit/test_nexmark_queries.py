"""Nexmark's queries in the in-process runner give DuckDB's answers, however their events come and are divided."""

from __future__ import annotations

import datetime as dt
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from bench.nexmark import SCHEMAS, Config, NexmarkSource, events, oracle
from bench.nexmark.columns import tops
from bench.nexmark.files import CLOSING, Prepared, closing, prepare, tables
from bench.nexmark.oracle import equal
from bench.nexmark.queries import QUERIES, Options, build
from bench.nexmark.results import final, processed, truth, written
from holdfast.io.rate import START_MS

EVENTS = 3_020
MIDNIGHT_MS = START_MS - START_MS % 86_400_000 + 86_400_000
CONFIG = Config(seed=5, first_event_rate=100, start_ms=MIDNIGHT_MS - 13_000)
"""Thirty seconds, with midnight among them."""
OTHERS = {"q14": Config(seed=5, first_event_rate=1, start_ms=MIDNIGHT_MS - 5 * 3_600_000 - 900_000)}
"""Fifty minutes around seven in the evening."""
OPTIONS: dict[str, dict[str, int]] = {"q11": {"gap_ms": 700}, "q19": {"top": 4}}
LINGER_MS = 20_000

SETTINGS: dict[str, dict[str, Any]] = {
    "in order": {"parallelism": 1, "splits": 1, "per_epoch": 500, "backend": "rocksdb"},
    "shuffled a little": {"parallelism": 2, "splits": 3, "per_epoch": 350, "within": 60, "backend": "heap"},
    "shuffled over epochs": {
        "parallelism": 4,
        "splits": 2,
        "per_epoch": 250,
        "within": 777,
        "backend": "rocksdb",
    },
}


@lru_cache(maxsize=8)
def made(seed: int, query: str = "") -> dict[str, pa.Table]:
    config = OTHERS.get(query, CONFIG)
    return events(0, EVENTS, Config(**{**config.__dict__, "seed": seed}))


def sources(query: str, splits: int, per_epoch: int | None, within: int) -> dict[str, hf.Source]:
    config = OTHERS.get(query, CONFIG)
    return {
        kind: NexmarkSource(
            kind, EVENTS, splits=splits, config=config, per_epoch=per_epoch, shuffle_within=within
        )
        for kind in QUERIES[query].reads
    }


def ran(
    query: str, read: dict[str, hf.Source], *, parallelism: int = 2, backend: str = "heap", **options: int
) -> tuple[pa.Table, hf.testing.Result]:
    """The final result of a run in which nothing came too late, and the run."""
    pipeline = build(query, read, hf.memory(), **options)
    done = hf.testing.run(pipeline, parallelism=parallelism, backend=backend, linger_ms=LINGER_MS)
    assert not any(sum(commit.late.values()) for commit in done.commits)
    return final(query, done.table("out")), done


def true(
    query: str, known: dict[str, pa.Table], read: dict[str, hf.Source], done: Any, **options: int
) -> pa.Table:
    if query == "q12":
        known = {**known, "bid": processed(done.plans, read["bid"])}
        assert known["bid"].num_rows == made(CONFIG.seed)["bid"].num_rows
    return truth(query, known, **options)


@pytest.mark.parametrize("how", list(SETTINGS))
@pytest.mark.parametrize("query", list(QUERIES))
def test_a_query_gives_duckdbs_answer(query: str, how: str) -> None:
    setting = SETTINGS[how]
    rate = OTHERS.get(query, CONFIG).first_event_rate
    within = setting.get("within", 0)
    options = {**OPTIONS.get(query, {}), "out_of_order_ms": within * 1000 // rate}
    read = sources(query, setting["splits"], setting["per_epoch"], within)
    found, done = ran(query, read, parallelism=setting["parallelism"], backend=setting["backend"], **options)
    expected = true(query, made(CONFIG.seed, query), read, done, **options)
    assert expected.num_rows > 1
    assert equal(found, expected) == (True, "")
    if query != "q12":
        assert equal(found, truth(query, made(6, query), **options))[0] is False


def test_the_queries_are_those_of_the_oracle_and_read_what_it_reads() -> None:
    assert list(QUERIES) == list(oracle.QUERIES)
    for name, query in QUERIES.items():
        assert set(query.reads) == set(oracle.QUERIES[name].reads) - {"side_input"}
        assert all(set(columns) <= set(SCHEMAS[kind].names) for kind, columns in query.reads.items())
    theirs = oracle.Options.__dataclass_fields__
    assert {n: f.default for n, f in theirs.items()} == {
        n: f.default for n, f in Options.__dataclass_fields__.items() if n in theirs
    }
    with pytest.raises(TypeError, match="widow_ms"):
        build("q7", {}, hf.memory(), widow_ms=1)


# Events that are alike in almost everything


def tied(seed: int) -> dict[str, list[dict[str, Any]]]:
    """A few auctions and many bids that share times, prices and texts; some of them in all."""
    chance = random.Random(seed)
    start = dt.datetime(2024, 1, 1)

    def at(second: float) -> dt.datetime:
        return start + dt.timedelta(seconds=second)

    def text(schema: pa.Schema) -> dict[str, Any]:
        return {f.name: chance.choice("ab") for f in schema if f.type == pa.string()}

    persons = [
        {**text(SCHEMAS["person"]), "id": n, "state": chance.choice(["OR", "WA"]), "date_time": at(n)}
        for n in range(12)
    ]
    auctions = []
    for n in range(1, 13):
        put_up = at(chance.randrange(24) / 2)
        auctions.append(
            {
                **text(SCHEMAS["auction"]),
                "id": n,
                "initial_bid": 1,
                "reserve": 2,
                "date_time": put_up,
                "expires": put_up + dt.timedelta(seconds=chance.randrange(1, 9) / 2),
                "seller": chance.randrange(14),
                "category": chance.choice([10, 11]),
            }
        )
    bids = [
        {
            **text(SCHEMAS["bid"]),
            "auction": chance.choice([*range(1, 14), 123]),
            "channel": chance.choice(["Apple", "b"]),
            "bidder": chance.randrange(3),
            "price": chance.randrange(1, 4) * chance.choice([1, 10_000, 1_500_000]),
            "date_time": at(chance.randrange(36) / 2),
        }
        for _ in range(300)
    ]
    bids += bids[:40]
    found = {"person": persons, "auction": auctions, "bid": bids}
    return {kind: sorted(rows, key=lambda row: row["date_time"]) for kind, rows in found.items()}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("query", list(QUERIES))
def test_ties_are_decided_by_the_records_own_values(query: str, seed: int) -> None:
    rows = tied(seed)
    options = {**OPTIONS.get(query, {}), "window_ms": 4_000, "slide_ms": 1_500, "gap_ms": 500, "top": 4}
    if query != "q12":
        chance = random.Random(seed)  # up to two seconds late
        for mine in rows.values():
            mine.sort(key=lambda row: row["date_time"].timestamp() + 2 * chance.random())
    read: dict[str, hf.Source] = {
        kind: hf.records(
            rows[kind], splits=2, per_epoch=5 * seed * (1 if kind != "bid" else 12), schema=SCHEMAS[kind]
        )
        for kind in QUERIES[query].reads
    }
    found, done = ran(query, read, parallelism=2 + seed, out_of_order_ms=2_000, **options)
    known = {kind: pa.Table.from_pylist(rows[kind], SCHEMAS[kind]) for kind in rows}
    if query == "q12":
        known["bid"] = processed(done.plans, read["bid"])
    assert found.num_rows > 0
    assert equal(found, truth(query, known, **options)) == (True, "")


def test_nothing_of_an_auction_stays_in_state_when_it_is_over() -> None:
    for query, uid in (("q4", "prices"), ("q9", "winners")):
        _, done = ran(query, sources(query, 2, 250, 0))
        assert {name: table.num_rows for name, table in done.state(uid).items() if table.num_rows} == {}
        kept = hf.testing.run(build(query, sources(query, 2, 250, 0), hf.memory()), epochs=3).state(uid)
        assert kept["closes"].num_rows > 0


# What a table says before an exchange


def test_all_that_are_tied_for_the_top_are_kept() -> None:
    assert tops(np.array([1, 1, 2, 1]), np.array([5, 7, 3, 7])).tolist() == [False, True, True, True]


def test_kinds_that_are_read_together_fill_an_epoch_together(tmp_path: Path) -> None:
    """A query of few kinds took their share of all events: epochs stayed so small that what they may take never grew."""
    prepare(tmp_path, 2_000, 1_000, CONFIG)
    limit = hf.Limit(records=40, tasks=1, now_ms=0)
    for kinds, expected in (
        (("person", "auction"), [10, 30]),
        (("bid",), [40]),
        (("person", "auction", "bid"), [1, 2, 36]),
    ):
        offers = [Prepared(tmp_path, kind, files=2, beside=kinds).plan(None, limit) for kind in kinds]
        assert [sum(r.records for r in offer.ranges) for offer in offers] == expected


def test_of_updates_the_last_row_of_a_key_remains_and_other_rows_all_do() -> None:
    rows = pa.table({"category": [1, 2, 1], "final": [5, 6, 4]})
    assert final("q4", rows).to_pylist() == [{"category": 2, "final": 6}, {"category": 1, "final": 4}]
    twice = pa.table({"auction": [1, 1], "price": [5, 5]})
    assert final("q2", twice) == twice
    assert final("q2", None).num_rows == 0


# Prepared files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nexmark") / "data"
    prepare(made, EVENTS, 250, CONFIG)
    return made


def test_prepared_files_hold_the_events(folder: Path) -> None:
    for kind, table in tables(folder).items():
        assert table.combine_chunks() == made(CONFIG.seed)[kind].combine_chunks()
        assert len(list((folder / kind).glob("part-*.parquet"))) == -(-EVENTS // 250)
        assert (folder / kind / CLOSING).exists() and closing(kind).schema == SCHEMAS[kind]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    prepare(folder, EVENTS, 250, CONFIG)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    with pytest.raises(ValueError, match="multiple of 50"):
        prepare(folder, EVENTS, 20, CONFIG)


@pytest.mark.parametrize("query", ["q3", "q5", "q8", "q9", "q12", "q18"])
def test_prepared_files_give_the_same_answer(query: str, folder: Path) -> None:
    read: dict[str, hf.Source] = {
        kind: Prepared(folder, kind, columns, files=2, linger_ms=LINGER_MS if query == "q12" else 0)
        for kind, columns in QUERIES[query].reads.items()
    }
    found, done = ran(query, read)
    for plan in done.plans[:6]:  # two files of each kind
        assert {p.source: 0 for p in plan.ranges}.keys() == QUERIES[query].reads.keys()
        for kind in QUERIES[query].reads:
            mine = [p.piece for p in plan.ranges if p.source == kind]
            assert len({p.info["path"] for p in mine}) == 2
    expected = true(query, tables(folder), read, done)
    assert equal(found, expected) == (True, "")


def test_what_was_written_is_read_in_the_order_of_epochs(tmp_path: Path) -> None:
    assert written(tmp_path) is None
    for epoch in (2, 10, 1):
        pq.write_table(pa.table({"n": [epoch]}), tmp_path / f"part-{epoch:08d}-00000.parquet")
    found = written(tmp_path)
    assert found is not None and found.column("n").to_pylist() == [1, 2, 10]
