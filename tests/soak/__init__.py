"""Faults at random, for as long as wanted: no byte may change after a transfer was called settled."""
