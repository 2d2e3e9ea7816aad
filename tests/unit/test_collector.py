"""What a worker's cycle collector looks at, and when."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from holdfast.engine import collector
from holdfast.engine.collector import GROWN, Collector, quiet


class Ring:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def counted(monkeypatch: pytest.MonkeyPatch, blocks: list[int]) -> tuple[Collector, list[int]]:
    """A collector that is told how many blocks there are, and the generations it asks for."""
    asked: list[int] = []
    real = gc.collect

    def collect(generation: int = 2) -> int:
        asked.append(generation)
        return real(generation)

    monkeypatch.setattr(collector.gc, "collect", collect)
    told = iter(blocks)
    return Collector(lambda: next(told)), asked


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


def test_what_the_first_task_left_is_never_walked_again() -> None:
    gc.disable()
    before = gc.get_freeze_count()
    mine = Collector()
    mine.collect()
    assert gc.get_freeze_count() > before
    frozen = gc.get_freeze_count()
    mine.collect()
    assert gc.get_freeze_count() == frozen


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
