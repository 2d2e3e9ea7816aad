"""The smallest useful pipeline: the balance of every account, from files of transfers.

    holdfast run examples/accounts.py --drain       # until every file is read
    holdfast state .holdfast/accounts --operator balance --limit 5
    python examples/accounts.py                     # the same without the command line

Files that appear in data/transfers later are taken as they come; run without --drain to wait for them. The
first lines make some transfers up, so that there is something to read. Output: out/balances (Parquet).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import holdfast as hf


def make_transfers(folder: str, count: int = 10_000) -> None:
    """Transfers between a hundred accounts, the same every time; only where there are none yet."""
    if Path(folder).exists():
        return
    chance = np.random.default_rng(7)
    accounts = [f"account-{n:03d}" for n in chance.integers(0, 100, count)]
    amounts = np.round(chance.normal(0, 50, count), 2)
    Path(folder).mkdir(parents=True)
    pq.write_table(pa.table({"account": accounts, "amount": amounts}), f"{folder}/first.parquet")


class Balance(hf.KeyedProcess):
    """An account's balance, after each of its transfers."""

    total = hf.ValueState(float, default=0.0)

    def process(self, account, transfer, ctx):
        self.total.value += transfer["amount"]
        yield {"account": account, "balance": round(self.total.value, 2)}


make_transfers("data/transfers")
pipeline = hf.Pipeline("accounts")
(
    pipeline.read("transfers", hf.files("data/transfers", format="parquet"))
    .key_by("account")
    .process("balance", Balance())
    .write("balances", hf.parquet("out/balances"))
)

if __name__ == "__main__":
    pipeline.run(drain=True)
