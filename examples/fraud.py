"""Payments that look wrong: state that forgets by itself, a side output, and a place for broken records.

    holdfast run examples/fraud.py --drain
    holdfast state .holdfast/fraud --operator cards --state merchants --limit 5

For each card the pipeline keeps the last amounts (a list), when it paid where (a map whose entries are
forgotten after an hour) and whether it is blocked (a value, forgotten after a day). A payment far above the
card's usual ones, or the fourth merchant within the hour, raises an alert. Lines that are no payments go to
the dead letters with file and line, and nothing stops. Output: out/fraud/passed, /alerts and /dead_letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf

KEPT = 20
PAYMENT = {"card": str, "merchant": str, "amount": float}


def make_payments(folder: str, count: int = 5_000) -> None:
    """Payments of 200 cards, most of them harmless, and three broken lines; only where there are none yet."""
    if Path(folder).exists():
        return
    Path(folder).mkdir(parents=True)
    chance = np.random.default_rng(11)
    lines = []
    for number in range(count):
        amount = float(chance.gamma(2.0, 15.0)) * (40 if chance.random() < 0.002 else 1)
        card = int(chance.integers(0, 200))
        merchant = int(chance.integers(0, 300)) if card == 13 else card % 50
        payment = {"card": f"card-{card:03d}", "merchant": f"shop-{merchant:03d}", "amount": round(amount, 2)}
        lines.append(json.dumps(payment))
        if number in (17, 1_017, 4_017):
            lines.append('{"card": "card-000", "amount": "a lot"')
    Path(folder, "monday.jsonl").write_text("\n".join(lines) + "\n")


class Watch(hf.KeyedProcess):
    """One card, and what is usual for it."""

    side_outputs = ("alerts",)

    amounts = hf.ListState(float)
    merchants = hf.MapState(str, int, ttl="1h")
    blocked = hf.ValueState(bool, default=False, ttl="1d")

    def process(self, card: str, payment: dict[str, Any], ctx: hf.Context) -> Iterator[dict[str, Any]]:
        reason = self.wrong(payment)
        self.remember(payment, ctx)
        if reason:
            self.blocked.value = True
            ctx.emit("alerts", {**payment, "reason": reason, "at_ms": ctx.now_ms})
        elif not self.blocked.value:
            yield payment

    def wrong(self, payment: dict[str, Any]) -> str:
        """Why a payment looks wrong, or nothing."""
        usual = list(self.amounts)
        if len(usual) >= 5 and payment["amount"] > 10 * sum(usual) / len(usual):
            return "far above what is usual"
        if payment["merchant"] not in self.merchants and len(self.merchants) >= 3:
            return "a fourth merchant within the hour"
        return ""

    def remember(self, payment: dict[str, Any], ctx: hf.Context) -> None:
        """Keep the last amounts, and when the card paid where."""
        self.merchants[payment["merchant"]] = ctx.now_ms
        if len(self.amounts) < KEPT:
            self.amounts.add(payment["amount"])
        else:
            self.amounts.update([*list(self.amounts)[-KEPT + 1 :], payment["amount"]])


make_payments("data/payments")
pipeline = hf.Pipeline("fraud")
payments = pipeline.read(
    "payments", hf.files("data/payments", format="jsonl", schema=PAYMENT, on_bad_record="dead_letter")
)
payments.side("dead_letter").write("dead-letters", hf.jsonl("out/fraud/dead_letters"))
watched = payments.key_by("card").process("cards", Watch())
watched.write("passed", hf.parquet("out/fraud/passed"))
watched.side("alerts").write("alerts", hf.jsonl("out/fraud/alerts"))

if __name__ == "__main__":
    pipeline.run(drain=True)
