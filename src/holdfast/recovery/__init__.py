"""Recovery: what shards that lost their version load and replay, and who must help them."""
