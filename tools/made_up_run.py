"""The run that the guide to simulations shows: half an hour of made-up epochs, one every half second.

    python tools/made_up_run.py DIR          # writes a trace and what was learned into a new folder
    holdfast simulate DIR --deadlines 20s,40s,70s

Nothing of it was measured: epochs, uploads and starts take what the constants below say, with some noise from a seed, so
that everybody gets the same. Around the eighteenth minute there is two and a half times the load.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import msgspec

from holdfast.faults.kinds import Fault
from holdfast.recovery.estimate import History, Learned
from holdfast.recovery.memory import MEMORY
from holdfast.recovery.trace import BackupLine, EpochLine, Trace

EPOCHS, APART_S, BEGUN_MS = 3600, 0.5, 1_700_000_000_000
RECORDS, PEAK, PEAK_AT, PEAK_WIDTH = 8_000, 1.5, 18 * 60, 90.0
"""Of an epoch; by how much the load is higher at its peak, when that is and how long it lasts, in seconds."""
EPOCH_S, RECORD_S, UPLOAD_S, BYTES_PER_S = 0.05, 2e-5, 0.4, 60e6
DRIVER_S, EXECUTOR_S = 9.0, 4.0
NEW_BYTES, STATE_BYTES = 55, 250_000_000
"""A record changes so much state, of so much in the end."""
BACKUP_EVERY = 60


def load(at_s: float) -> float:
    """How many times the usual load there is."""
    return 1 + PEAK * math.exp(-(((at_s - PEAK_AT) / PEAK_WIDTH) ** 2))


def write(directory: Path, seed: int = 1) -> None:
    """Make the folder."""
    directory.mkdir(parents=True)
    chance, trace, learned = random.Random(seed), Trace(directory), Learned()
    new_bytes = 0
    for number in range(1, EPOCHS + 1):
        at_s = number * APART_S
        records = round(RECORDS * load(at_s) * chance.uniform(0.9, 1.1))
        took_s = (EPOCH_S + records * RECORD_S) * chance.uniform(0.9, 1.15)
        state = round(STATE_BYTES * (1 - math.exp(-4 * number / EPOCHS)))
        grown = records * NEW_BYTES
        new_bytes += grown
        at_ms = BEGUN_MS + round(at_s * 1000)
        trace.add(EpochLine(number, at_ms, records, round(took_s, 4), state, state // 2, state // 4, grown))
        learned.epoch.learn([1.0, float(records)], took_s)
        if number % BACKUP_EVERY == 0:
            backup_s = (UPLOAD_S + new_bytes / BYTES_PER_S) * chance.uniform(0.9, 1.2)
            trace.add(BackupLine(number, at_ms, round(backup_s, 3), new_bytes, state, trigger="INTERVAL"))
            learned.upload.learn([1.0, float(new_bytes)], backup_s)
            replayed = BACKUP_EVERY // 2
            replay_s = replayed * (EPOCH_S / 2 + records * RECORD_S) * chance.uniform(0.9, 1.15)
            learned.replay.learn(learned.replay_features(History(replayed, replayed * records)), replay_s)
            learned.recovered(Fault.DRIVER_KILL, DRIVER_S * chance.uniform(0.9, 1.2))
            learned.recovered(Fault.EXECUTOR_KILL, EXECUTOR_S * chance.uniform(0.9, 1.2))
            new_bytes = 0
    (directory / MEMORY).write_bytes(msgspec.json.encode(learned.memory()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
