"""Keyed state: declared by users, kept in shards of key groups, stored as versions on the host's disk."""
