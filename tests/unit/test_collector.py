"""What a worker's cycle collector looks at, and when."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.engine import collector
from holdfast.engine.collector import GROWN, ROOM_BYTES, Collector, quiet


class Ring:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def counted(
    monkeypatch: pytest.MonkeyPatch, blocks: list[int], sizes: list[int] | None = None
) -> tuple[Collector, list[int]]:
    """A collector that is told how many blocks there are and how large they are, and the generations it asks for."""
    asked: list[int] = []
    real = gc.collect

    def collect(generation: int = 2) -> int:
        asked.append(generation)
        return real(generation)

    monkeypatch.setattr(collector.gc, "collect", collect)
    told, measured = iter(blocks), iter(sizes or [0] * len(blocks))
    return Collector(lambda: next(told), lambda: next(measured)), asked


def test_the_cycles_of_a_task_are_gone_after_it() -> None:
    gc.disable()
    mine = Collector()
    mine.collect()
    ring = weakref.ref(Ring())
    assert ring() is not None
    mine.collect()
    assert ring() is None


def test_all_objects_are_walked_when_there_are_twice_as_many_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert GROWN == 2.0
    # Asked once after each task, and once more after each walk through everything.
    mine, asked = counted(monkeypatch, [1_000, 900, 1_799, 1_800, 1_500, 2_999, 3_000, 3_000])
    for _ in range(5):
        mine.collect()
    assert asked == [1, 2, 1, 1, 2, 1, 1, 2]


def test_what_is_kept_may_become_less_and_then_counts_as_less(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, asked = counted(monkeypatch, [1_000, 1_000, 400, 799, 800, 800])
    for _ in range(4):
        mine.collect()
    assert asked == [1, 2, 1, 1, 1, 2]


def test_all_objects_are_walked_when_memory_has_grown_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    large = 1 << 30
    sizes = [large, large, large + ROOM_BYTES + large // 2 - 1, large + ROOM_BYTES + large // 2, large]
    mine, asked = counted(monkeypatch, [1_000] * 5, sizes)
    for _ in range(3):
        mine.collect()
    assert asked == [1, 2, 1, 1, 2]


def test_circles_that_outlive_their_task_do_not_fill_the_memory() -> None:
    gc.disable()
    mine, held = Collector(), Ring()
    mine.collect()
    for _ in range(60):
        held = Ring()
        held.block = np.ones(1 << 20)  # type: ignore[attr-defined]
        mine.collect()
    rings = sum(isinstance(one, Ring) for one in gc.get_objects())
    assert held in held.__dict__.values() and rings < 50


def test_the_first_task_finds_modules_frozen_and_no_task_freezes_what_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "_tasks", itertools.count(1))
    before = gc.get_freeze_count()
    quiet({})
    frozen = gc.get_freeze_count()
    assert frozen > before
    ring = weakref.ref(Ring())
    Collector().collect()
    quiet({})
    assert gc.get_freeze_count() == frozen and ring() is None


@pytest.mark.parametrize("name", ["pyspark.daemon", "__main__"])
def test_the_daemons_collector_is_replaced_wherever_it_runs(name: str) -> None:
    daemon, other = SimpleNamespace(gc=gc, manager=print), SimpleNamespace(gc=gc)
    quiet({name: daemon, "other": other})
    assert isinstance(daemon.gc, Collector) and other.gc is gc
    assert not gc.isenabled()


def test_a_main_module_that_is_no_daemon_keeps_its_own() -> None:
    main = SimpleNamespace(gc=gc)
    quiet({"__main__": main})
    assert main.gc is gc


def test_without_a_daemon_it_runs_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(collector, "_own", SimpleNamespace(collect=lambda: calls.append("collected")))
    for _ in range(128):
        quiet({})
    assert len(calls) == 2
