"""The Nexmark benchmark: its events (`generator`), a source of them (`source`), its queries' truth (`oracle`).

Events and queries are those of github.com/nexmark/nexmark, made anew here: a stream of persons, auctions and
bids of an auction house. The oracle is not imported here, as it needs DuckDB, which executors may lack.
"""

from bench.nexmark.generator import KINDS, SCHEMAS, Config, events, mixed
from bench.nexmark.source import NexmarkSource

__all__ = ["KINDS", "SCHEMAS", "Config", "NexmarkSource", "events", "mixed"]
