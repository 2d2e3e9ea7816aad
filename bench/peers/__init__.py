"""The peers: one script each, run in a virtual environment of its own, and what makes those."""
