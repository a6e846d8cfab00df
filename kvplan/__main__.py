"""The command line: python -m kvplan demo | explain | check | doctor. It may name every floor."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__

# command -> (module with add_arguments and main, what it does). Modules are loaded one at a time: doctor must run where
# what the others need is missing.
COMMANDS = {
    "demo": (
        "kvplan.demo.run",
        "move DeepSeek-V4 requests between two processes through a real engine and check every byte",
    ),
    "explain": ("kvplan.inspect.explain", "which region goes where, and why; or why a plan is refused"),
    "check": (
        "kvplan.inspect.check",
        "which prefill rank sends what to which decode rank, and whether every row is written exactly once",
    ),
    "doctor": ("kvplan.inspect.doctor", "what is installed and usable here, and how to mend what is not"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m kvplan", description="Transfer plans for KV caches between prefill and decode machines."
    )
    parser.add_argument("--version", action="version", version=f"kvplan {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name in argv[:1]:
            module = importlib.import_module(module_name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.main)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
