"""The engine: plans epochs, runs each as one Spark job, and decides it. See docs/architecture.md."""
