"""The command line: python -m kvplan demo | explain | doctor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import doctor, explain
from .demo import run as demo


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvplan", description="Transfer plans for KV caches between prefill and decode machines."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sub = commands.add_parser(
        "demo",
        help="move DeepSeek-V4 requests between two processes through a real engine and check every byte",
    )
    demo.add_arguments(sub)
    sub.set_defaults(run=demo.main)
    sub = commands.add_parser("explain", help="which region goes where, and why; or why a plan is refused")
    explain.add_arguments(sub)
    sub.set_defaults(run=explain.main)
    sub = commands.add_parser("doctor", help="what is installed and usable here, and how to mend what is not")
    doctor.add_arguments(sub)
    sub.set_defaults(run=doctor.main)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status
