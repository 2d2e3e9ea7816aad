"""Sources and sinks, one file a system; `base` is the interface that users extend."""
