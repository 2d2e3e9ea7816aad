"""From the user's graph to chains, stages and exchanges. Pure: no Spark, no files, no clock."""
