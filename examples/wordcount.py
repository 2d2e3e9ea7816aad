"""Word count, the stream everybody knows: JSON lines in, `flat_map` into words, a count for each.

    holdfast run examples/wordcount.py --drain
    echo '{"text": "and one more line"}' > data/lines/more.jsonl     # then run it again: it goes on counting
    holdfast state .holdfast/wordcount --operator counts --key the

Words are counted in batches and combined before the exchange, so a word that comes a thousand times in a file
crosses it once. Each epoch writes the new count of every word it saw. Output: out/counts (JSON lines).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holdfast as hf

POEM = """The sea is calm tonight. The tide is full, the moon lies fair
Upon the straits; on the French coast the light
Gleams and is gone; the cliffs of England stand,
Glimmering and vast, out in the tranquil bay.
Come to the window, sweet is the night-air!
Only, from the long line of spray
Where the sea meets the moon-blanched land,
Listen! you hear the grating roar
Of pebbles which the waves draw back, and fling,
At their return, up the high strand,
Begin, and cease, and then again begin,
With tremulous cadence slow, and bring
The eternal note of sadness in."""


def make_lines(folder: str) -> None:
    """Some lines to count, where there are none yet."""
    if not Path(folder).exists():
        Path(folder).mkdir(parents=True)
        lines = [json.dumps({"text": line}) for line in POEM.splitlines()]
        Path(folder, "dover-beach.jsonl").write_text("\n".join(lines) + "\n")


def words(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The words of a line, without capitals."""
    for word in re.findall(r"[\w'-]+", line["text"].lower()):
        yield {"word": word}


make_lines("data/lines")
pipeline = hf.Pipeline("wordcount")
(
    pipeline.read("lines", hf.files("data/lines", format="jsonl", schema={"text": str}))
    .flat_map(words, uid="words", schema={"word": str})
    .key_by("word")
    .aggregate("counts", count=hf.count())
    .write("word-counts", hf.jsonl("out/counts"))
)

if __name__ == "__main__":
    pipeline.run(drain=True)
