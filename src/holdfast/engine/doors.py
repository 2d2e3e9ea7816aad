"""The few doors of PySpark that are not public, all in this file.

`Doors` builds a job from four things: bytes into one-element partitions, a Python function over a
partition, an exchange of (partition, bytes) pairs, and a partition of an exchange in a worker pool of its
own on an executor of its own. PySpark has each of them; its public calls do more (they pickle, batch and
collect again what is bytes already) and give no way to say where a partition runs and in which Python
worker. `PublicDoors` does the same with public calls alone: slower, never wrong, and without pinning, so
that a shard finds its state on the host's disk instead of in memory.

Checked at start by `open_doors`; used by `worker` and `spark_runner` only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark import SparkContext

SLOT = "HOLDFAST_SLOT"
"""A worker pool is keyed by its environment: this variable gives a shard a pool, so a worker, of its own."""

Body = Callable[[int, Iterator[bytes]], Iterable[Any]]
"""What runs over a partition: its number and its bytes in, bytes or (partition, bytes) pairs out."""

_log = logging.getLogger("holdfast.doors")


class Doors(Protocol):
    """How a job is built."""

    pins: bool

    def function(self, body: Body, slot: str | None, pairs: bool) -> Any:
        """A function ready for executors; made once, used every epoch."""

    def sources(self, items: list[bytes], function: Any) -> Any:
        """One task for each item."""

    def exchange(self, tasks: list[Any], partitions: int) -> Any:
        """What tasks send, by partition."""

    def shard(self, exchanges: list[tuple[Any, int]], function: Any, location: str | None) -> Any:
        """One task over one partition of each of these exchanges."""

    def located(self, item: bytes, function: Any, location: str | None) -> Any:
        """One task over one item, on one executor."""

    def collect(self, tasks: list[Any]) -> list[bytes]:
        """Run the job: everything the last tasks gave."""

    def ask(self, locations: list[str], body: Body) -> list[bytes]:
        """Run a body once on each of these executors, as far as Spark lets us."""


def open_doors(sc: SparkContext, known: Path | None = None) -> Doors:
    """The fast doors where this PySpark has them, the public ones otherwise.

    Trying them takes a job with two fresh workers, seconds of a restart. So a pipeline's directory remembers
    (`known`) with which PySpark, Python and kind of cluster they were found to open.
    """
    there = f"{_versions()} {'local' if is_local(sc) else 'cluster'}"
    try:
        doors = PinnedDoors(sc)
        if known is None or _read(known) != there:
            doors.check()
            _remember(known, there)
    except Exception as error:
        _log.warning("pinning is off, state is read from disk each epoch: %s", error)
        return PublicDoors(sc)
    return doors


def _versions() -> str:
    import platform

    import pyspark

    return f"pyspark {pyspark.__version__} python {platform.python_version()}"


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _remember(path: Path | None, text: str) -> None:
    with contextlib.suppress(OSError):
        if path is not None:
            path.write_text(text)


class PinnedDoors:
    """Jobs of PythonRDDs made directly, with a worker pool for each shard."""

    pins = True

    def __init__(self, sc: SparkContext) -> None:
        from pyspark.core.rdd import RDD, _wrap_function
        from pyspark.serializers import NoOpSerializer

        self._sc = sc
        self._jsc: Any = sc._jsc.sc()
        self._rdd, self._wrap, self._raw = RDD, _wrap_function, NoOpSerializer
        # Every dot in a class's name asks the JVM, and one that is no class yet is looked for in all jars: so only once.
        jvm: Any = sc._jvm
        spark = jvm.org.apache.spark
        self._to_scala = jvm.scala.jdk.javaapi.CollectionConverters.asScala
        self._bytes = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
        self._list, self._set, self._tuple = jvm.java.util.ArrayList, jvm.java.util.HashSet, jvm.scala.Tuple2
        self._python_rdd, self._value_of_pair = jvm.PythonRDD, jvm.PythonRDD.valueOfPair
        self._pairwise_rdd, self._partitioner = jvm.PairwiseRDD, jvm.PythonPartitioner
        self._java_rdd, self._from_pairs = spark.api.java.JavaRDD, spark.api.java.JavaPairRDD.fromRDD
        self._pruned = spark.rdd.PartitionPruningRDD.create
        self._sets: dict[int, Any] = {}
        self._tokens: dict[str, Any] = {}

    def check(self) -> None:
        """Raise unless every door opens here."""
        tasks = self.sources([b"a", b"b"], self.function(_echo_pairs, None, pairs=True))
        exchange = self.exchange([tasks], 2)
        got = self.collect([self.shard([(exchange, 1)], self.function(_echo, "check", pairs=False), None)])
        if got != [b"b"]:
            raise RuntimeError(f"a job through the doors gave {got!r}")

    def function(self, body: Body, slot: str | None, pairs: bool) -> Any:
        if slot is not None:
            self._sc.environment[SLOT] = slot
        try:
            run = _paired(body) if pairs else body
            return self._wrap(self._sc, run, self._raw(), self._raw())
        finally:
            self._sc.environment.pop(SLOT, None)

    def sources(self, items: list[bytes], function: Any) -> Any:
        made = self._list()
        for item in items:
            made.add(bytearray(item))
        seq = self._to_scala(made).toSeq()
        return self._run(self._jsc.makeRDD(seq, len(items), self._bytes), function)

    def _run(self, rdd: Any, function: Any) -> Any:
        return self._python_rdd(rdd, function, False, False)

    def exchange(self, tasks: list[Any], partitions: int) -> Any:
        rdd = tasks[0] if len(tasks) == 1 else self._union(tasks)
        pairs = self._pairwise_rdd(rdd).asJavaPairRDD()
        return self._value_of_pair(pairs.partitionBy(self._partitioner(partitions, 0))).rdd()

    def shard(self, exchanges: list[tuple[Any, int]], function: Any, location: str | None) -> Any:
        parts = [self._only(rdd, partition) for rdd, partition in exchanges]
        rdd = parts[0]
        if len(parts) > 1:
            rdd = self._java_rdd(self._union(parts), self._bytes).coalesce(1, False).rdd()
        if location is not None:
            # The token goes first in each pair, so that a partition's own bytes are the value.
            pairs = self._token(location).cartesian(rdd, self._bytes)
            rdd = self._from_pairs(pairs, self._bytes, self._bytes).values().rdd()
        return self._run(rdd, function)

    def _only(self, rdd: Any, partition: int) -> Any:
        """A pruned RDD wants a Scala Int => Boolean; a Scala Set is one."""
        if partition not in self._sets:
            chosen = self._set()
            chosen.add(partition)
            self._sets[partition] = self._to_scala(chosen).toSet()
        return self._pruned(rdd, self._sets[partition])

    def located(self, item: bytes, function: Any, location: str | None) -> Any:
        return (
            self.sources([item], function)
            if location is None
            else self._run(self._one(item, location), function)
        )

    def _token(self, location: str) -> Any:
        """An RDD of one element that prefers one executor: "executor_<host>_<id>"."""
        if location not in self._tokens:
            self._tokens[location] = self._one(b"t", location)
        return self._tokens[location]

    def _one(self, item: bytes, location: str) -> Any:
        hosts, items = self._list(), self._list()
        hosts.add(location)
        items.add(self._tuple(bytearray(item), self._to_scala(hosts).toSeq()))
        return self._jsc.makeRDD(self._to_scala(items).toSeq(), self._bytes)

    def _union(self, rdds: list[Any]) -> Any:
        made = self._list()
        for rdd in rdds:
            made.add(rdd)
        return self._jsc.union(self._to_scala(made).toSeq(), self._bytes)

    def collect(self, tasks: list[Any]) -> list[bytes]:
        rdd = tasks[0] if len(tasks) == 1 else self._union(tasks)
        java = self._java_rdd(rdd, self._bytes)
        return list(self._rdd(java, self._sc, self._raw()).collect())

    def ask(self, locations: list[str], body: Body) -> list[bytes]:
        function = self.function(body, None, pairs=False)
        return self.collect([self._run(self._token(location), function) for location in locations])


def _paired(body: Body) -> Body:
    """Pairs as PairwiseRDD reads them: eight bytes of partition, then the value, each framed."""

    def run(split: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
        for partition, value in body(split, blobs):
            yield partition.to_bytes(8, "big")
            yield value

    return run


def _echo_pairs(split: int, blobs: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    return iter([(split, b) for b in blobs])


def _echo(split: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
    return iter(list(blobs))


class PublicDoors:
    """The same jobs with public calls: any worker may run any shard."""

    pins = False

    def __init__(self, sc: SparkContext) -> None:
        self._sc = sc

    def function(self, body: Body, slot: str | None, pairs: bool) -> Any:
        return body

    def sources(self, items: list[bytes], function: Any) -> Any:
        return self._sc.parallelize(items, len(items)).mapPartitionsWithIndex(function)

    def exchange(self, tasks: list[Any], partitions: int) -> Any:
        rdd = tasks[0] if len(tasks) == 1 else self._sc.union(tasks)
        return rdd.partitionBy(partitions, lambda partition: partition).values()

    def shard(self, exchanges: list[tuple[Any, int]], function: Any, location: str | None) -> Any:
        kept = []
        for rdd, wanted in exchanges:
            kept.append(rdd.mapPartitionsWithIndex(_keep(wanted)))
        rdd = kept[0] if len(kept) == 1 else self._sc.union(kept)
        return rdd.coalesce(1).mapPartitionsWithIndex(function)

    def located(self, item: bytes, function: Any, location: str | None) -> Any:
        return self.sources([item], function)

    def collect(self, tasks: list[Any]) -> list[bytes]:
        rdd = tasks[0] if len(tasks) == 1 else self._sc.union(tasks)
        return list(rdd.collect())

    def ask(self, locations: list[str], body: Body) -> list[bytes]:
        items = [b"t"] * len(locations)
        return self.collect([self.sources(items, body)]) if items else []


def _keep(wanted: int) -> Callable[[int, Iterator[Any]], Iterator[Any]]:
    return lambda split, items: items if split == wanted else iter([])


def is_local(sc: SparkContext) -> bool:
    """Whether driver and executor are one process."""
    return str(sc.master).startswith("local")


def executors(sc: SparkContext) -> list[tuple[str, str]]:
    """The live executors as (id, host), without the driver of a cluster; in local mode the driver is the one."""
    if is_local(sc):
        return [("driver", "localhost")]
    listed = sc._jsc.sc().statusStore().executorList(True)
    found = []
    for i in range(listed.size()):
        one = listed.apply(i)
        if one.id() != "driver":
            found.append((str(one.id()), str(one.hostPort()).rsplit(":", 1)[0]))
    return sorted(found)
