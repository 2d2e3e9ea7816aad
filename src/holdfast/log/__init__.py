"""The durable log of a pipeline: generations, plans and commits, each created exactly once."""
