"""A fuzzer for what comes from a peer: `python -m tests.fuzz --help`."""
