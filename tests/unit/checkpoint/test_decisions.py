"""The pure parts of checkpoints: when one is due, what may be deleted, what a record says."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.lifecycle import Tolerance
from holdfast.checkpoint.metadata import (
    Checkpoint,
    DamagedRecord,
    StoredFile,
    StoredVersion,
    pack,
    unpack,
)
from holdfast.checkpoint.policy import (
    Deadline,
    EveryEpochs,
    EveryInterval,
    Known,
    Manual,
    Never,
    Policy,
    Trigger,
    YoungDaly,
    due,
    parse_policy,
)
from holdfast.checkpoint.retention import doubtful, generation_of, lacking, sort_out, upload_folder
from holdfast.errors import ConfigError
from holdfast.state.versions import Manifest

POLICIES: list[Policy] = [EveryEpochs(3), EveryInterval(10), Manual(), Deadline(), YoungDaly(60.0), Never()]
KNOWN = st.builds(
    Known,
    epochs_since=st.integers(0, 10),
    last_started_ms=st.integers(0, 30_000),
    now_ms=st.integers(0, 60_000),
    endangered=st.booleans(),
    backup_s=st.floats(0.01, 10),
    asked=st.booleans(),
    stopping=st.booleans(),
    code_changed=st.booleans(),
    expires_ms=st.none() | st.integers(0, 100_000),
    margin_ms=st.integers(0, 5_000),
)


@given(st.sampled_from(POLICIES), KNOWN)
def test_nothing_new_needs_no_checkpoint_and_never_means_never(policy: Policy, known: Known) -> None:
    trigger = due(policy, known)
    if known.epochs_since == 0 or policy == Never():
        assert trigger is None
    elif known.asked:
        assert trigger is Trigger.ASKED
    elif policy == Manual():
        assert trigger in (None, Trigger.SOURCE_EXPIRES)


@given(st.sampled_from(POLICIES[:-1]), KNOWN)
def test_what_expires_is_backed_up_before_it_does(policy: Policy, known: Known) -> None:
    if (
        known.epochs_since
        and known.expires_ms is not None
        and known.now_ms + known.margin_ms >= known.expires_ms
    ):
        assert due(policy, known) is not None


@given(KNOWN)
def test_more_epochs_never_make_a_checkpoint_less_due(known: Known) -> None:
    more = Known(
        **{
            **{f: getattr(known, f) for f in known.__dataclass_fields__},
            "epochs_since": known.epochs_since + 1,
        }
    )
    if due(EveryEpochs(3), known) is not None:
        assert due(EveryEpochs(3), more) is not None


@pytest.mark.parametrize("text", ["", "sometimes", "0 epochs", "-3s", "0s", "epochs"])
def test_a_policy_that_is_none_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match="is no policy") as caught:
        parse_policy(text)
    assert '"10 epochs"' in str(caught.value)


def made(number: int, generation: int, keys: list[str]) -> Checkpoint:
    files = [StoredFile(k.rsplit("/", 1)[-1], k, 10, 1) for k in keys]
    version = StoredVersion(Manifest("00000001-1-0-1", 1, [], ["n"], {}), files)
    return Checkpoint(
        number,
        number * 10,
        generation,
        "p",
        "f",
        "ASKED",
        1,
        2,
        128,
        1,
        "heap",
        {},
        {},
        5,
        {},
        {},
        {"u": [version]},
    )


@given(st.data(), st.integers(1, 4))
def test_no_file_of_a_kept_checkpoint_is_ever_deleted(data: st.DataObject, keep: int) -> None:
    stored: list[str] = []
    completed = []
    for number in range(1, data.draw(st.integers(0, 6)) + 1):
        generation = data.draw(st.integers(1, 3))
        new = [
            f"{upload_folder(number, generation)}/u/00000/d-{i}" for i in range(data.draw(st.integers(0, 3)))
        ]
        shared = data.draw(st.lists(st.sampled_from(stored), unique=True)) if stored else []
        stored += new
        completed.append(made(number, generation, [*new, *shared]))
    newer = f"{upload_folder(99, 4)}/u/00000/d-new"
    left = sort_out(completed, keep, [*stored, newer, "somebody-elses"], generation=3)
    kept = completed[-keep:]
    needed = {f.key for c in kept for f in c.files}
    assert not needed & set(left.keys)
    assert newer not in left.keys and "somebody-elses" not in left.keys
    assert set(left.keys) == set(stored) - needed
    assert left.records == [c.number for c in completed[:-keep]]
    assert left.replay_from == (kept[0].epoch if len(kept) == keep else 0), "a lone one may be lost"


@given(st.data())
def test_a_checkpoint_that_lost_a_file_or_a_part_of_one_is_told_by_the_listing(data: st.DataObject) -> None:
    keys = [f"{upload_folder(n, 1)}/u/00000/d-{n}" for n in range(1, 6)]
    of = st.lists(st.sampled_from(keys), unique=True)
    completed = [made(n, 1, data.draw(of)) for n in range(1, data.draw(st.integers(0, 4)) + 1)]
    gone, short = set(data.draw(of)), set(data.draw(of))
    stored = {k: 3 if k in short else 10 for k in keys if k not in gone}
    named = {f.key for c in completed for f in c.files}
    asked = doubtful(completed, {**stored, "somebody-elses": 1})
    assert asked == named & (gone | short)
    assert lacking(completed, {key: stored.get(key) for key in asked}).keys() == {
        c.number for c in completed if {f.key for f in c.files} & (gone | short)
    }
    assert lacking(completed, dict.fromkeys(asked, 10)) == {}, "the listing was out of date"


def test_a_key_says_which_generation_uploaded_it() -> None:
    assert generation_of(f"{upload_folder(3, 17)}/u/00000/d-1") == 17
    assert generation_of("notes.txt") is None


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_record_with_any_byte_changed_is_told_from_a_good_one(place: int, byte: int) -> None:
    data = pack(made(1, 1, ["c00000001-g1-1/u/00000/d-1"]))
    assert unpack(data) == made(1, 1, ["c00000001-g1-1/u/00000/d-1"])
    changed = bytearray(data)
    changed[place % len(data)] = byte
    if bytes(changed) == data:
        return
    try:
        found = unpack(bytes(changed))
    except DamagedRecord:
        return
    assert found == made(1, 1, ["c00000001-g1-1/u/00000/d-1"])  # white space, or a number written otherwise


def test_a_number_can_be_taken_by_nothing() -> None:
    assert unpack(pack(None)) is None
    assert b"secret" not in pack(made(1, 1, []))
    assert msgspec.json.decode(pack(made(1, 1, [])))["checkpoint"]["pipeline"] == "p"


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=30))
def test_only_failures_in_a_row_count(allowed: int, outcomes: list[bool]) -> None:
    tolerance = Tolerance(allowed)
    row = 0
    for succeeded in outcomes:
        tolerance = tolerance.after(succeeded)
        row = 0 if succeeded else row + 1
        assert tolerance.spent == (row >= allowed)
