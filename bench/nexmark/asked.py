"""What `bench nexmark` is asked to run: its arguments, and the plan they come to."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.nexmark.generator import ROUND, Config
from bench.nexmark.oracle import QUERIES
from holdfast.recovery.guard import FIRST_RECORDS, GROWTH

BENCH = Path(__file__).resolve().parent.parent.parent / ".bench"


@dataclass(frozen=True)
class Plan:
    """What is run."""

    events: int
    per_file: int
    files: tuple[int, ...]
    rounds: int
    queries: tuple[str, ...]
    parallelism: tuple[int, ...]
    check_parallelism: tuple[int, ...]
    source: str
    backend: str
    stores: tuple[str, ...]
    their_files: tuple[int, ...]
    crash: bool
    rate: int
    seed: int

    @property
    def config(self) -> Config:
        return Config(seed=self.seed, first_event_rate=self.rate)

    @property
    def data(self) -> Path:
        name = f"nexmark-{self.events}-{self.per_file}-{self.rate}-{self.seed}"
        return BENCH / "data" / name

    def batches(self, files: int) -> int:
        """How many epochs or batches there are if each takes so many files."""
        return batches(self.events, self.per_file, files)

    @property
    def epochs(self) -> int:
        """How many epochs ours takes with the first choice of files."""
        return self.batches(self.files[0])


def batches(events: int, per_file: int, files: int) -> int:
    return -(-events // (per_file * files))


def halfway(events: int, an_epoch: int, records_a_round: int = ROUND) -> int:
    """After which epoch half of the events are read: the first two are small, for nothing is known of their cost.

    Of a query that reads some kinds only, the records in a round of events make up an epoch's limit.

    >>> halfway(2_000, 500), halfway(1_000_000, 250_000), halfway(1_000_000, 250_000, 4)
    (2, 5, 2)
    """
    read, most, epochs = 0, FIRST_RECORDS * ROUND // records_a_round, 0
    while 2 * read < events:
        size = min(an_epoch, most)
        read, epochs = read + size, epochs + 1
        most = max(most, GROWTH * size) if epochs > 1 else most
    return epochs


def per_file_of(events: int) -> int:
    """So many events a file that there are about 40.

    >>> per_file_of(1_000_000), per_file_of(100_000), per_file_of(1_000)
    (25000, 2500, 50)
    """
    return max(ROUND, events // 40 // ROUND * ROUND)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def arguments(argv: list[str], description: str | None = None) -> tuple[Plan, bool, bool]:
    """What is asked for: the plan, whether peers are run, and whether JSON is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench nexmark",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="how many, of all kinds together")
    parser.add_argument(
        "--per-file",
        type=int,
        help="events of all kinds a file of each kind holds; without it, so many that there are about 40 files",
    )
    parser.add_argument(
        "--files",
        help="files of each kind that an epoch of ours takes, with commas; the best counts, a crash is with the first",
    )
    parser.add_argument("--their-files", help="the same for a batch of theirs; the best counts")
    parser.add_argument("--stores", default="hdfs,rocksdb", help="their state stores; the best counts")
    parser.add_argument("--queries", default=",".join(QUERIES), help="which queries, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is run")
    parser.add_argument("--parallelism", default="2", help="cores and shards, with commas")
    parser.add_argument(
        "--check-parallelism",
        default="1,4",
        help="run ours once with each of these too, to see if it is equal; '' for none",
    )
    parser.add_argument("--source", choices=("files", "generator"), default="files", help="what ours reads")
    parser.add_argument("--backend", choices=("heap", "rocksdb"), default="heap", help="where our state is")
    parser.add_argument("--rate", type=int, default=10_000, help="events a second of event time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--crash",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="kill our driver halfway, once for each query",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave Structured Streaming out")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    chosen = parser.parse_args(argv)
    queries = tuple(q for q in chosen.queries.split(",") if q)
    unknown = [q for q in queries if q not in QUERIES]
    if unknown or not queries:
        parser.error(f"unknown queries: {', '.join(unknown)}; they are {', '.join(QUERIES)}")
    unknown = [s for s in chosen.stores.split(",") if s not in ("hdfs", "rocksdb")]
    if unknown:
        parser.error(f"unknown stores: {', '.join(unknown)}; they are hdfs, rocksdb")
    per_file = per_file_of(chosen.events) if chosen.per_file is None else chosen.per_file
    if per_file < ROUND or per_file % ROUND:
        parser.error(f"--per-file must be a multiple of {ROUND}, not {per_file}")
    few = max(1, batches(chosen.events, per_file, 2))  # files of which there are two batches
    usual = ",".join({str(n): n for n in (min(10, few), min(20, few))})
    choices = [_numbers(chosen.files or usual), _numbers(chosen.their_files or usual)]
    parallelism, others = _numbers(chosen.parallelism), _numbers(chosen.check_parallelism)
    if chosen.rounds < 1 or min((1, *choices[0], *choices[1], *parallelism, *others)) < 1 or not parallelism:
        parser.error("--rounds, files and parallelism must be at least 1")
    # A speed needs two batches: what is too large a choice for so few events is none.
    files, their_files = (
        tuple(n for n in choice if batches(chosen.events, per_file, n) >= 2) for choice in choices
    )
    if not files or not (their_files or chosen.no_peers):
        parser.error(
            f"{chosen.events:,} events in files of {per_file:,} are fewer than two epochs, and at least two are needed; "
            f"choose a smaller --per-file, or fewer files an epoch"
        )
    plan = Plan(
        chosen.events,
        per_file,
        files,
        chosen.rounds,
        queries,
        parallelism,
        others,
        chosen.source,
        chosen.backend,
        tuple(chosen.stores.split(",")),
        their_files,
        chosen.crash,
        chosen.rate,
        chosen.seed,
    )
    return plan, not chosen.no_peers, chosen.json
