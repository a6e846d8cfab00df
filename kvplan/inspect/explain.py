"""python -m kvplan explain: a case file paired and planned, in words; or the reason why it is refused."""

from __future__ import annotations

import argparse
import sys

from ..errors import LayoutError, PairingError, PlanError
from ..planning import case as cases
from ..planning import pair
from . import picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kvplan explain`."""
    parser.add_argument(
        "file",
        help="JSON: src and dst (as Layout.to_dict writes them, or lists of regions with page_size beside them), "
        "src_pages and dst_pages, and where needed src_start, dst_start, num_tokens, null_page, allow_unsent, "
        "src_replica. For several requests, a list of such objects under requests. With layouts alone, only the "
        "pairing is explained. PlanError.case() makes such a file of what was refused",
    )
    parser.add_argument("--picture", metavar="OUT.png", help="draw the pages of each space and the runs between them")


def main(args: argparse.Namespace) -> int:
    """Explain one case. 0: planned; 1: refused, with the reason; 2: the file cannot be read."""
    try:
        case = cases.load(args.file)
    except (OSError, LayoutError) as error:
        print(f"kvplan explain: {error}", file=sys.stderr)
        return 2
    if case.data.get("why"):
        print(case.data["why"])
    try:
        pairing = pair(case.src, case.dst, allow_unsent=case.allow_unsent)
    except PairingError as error:
        print(f"REFUSED when paired: {error}")
        return 1
    print(pairing.explain())
    if not case.requests:
        return 0
    try:
        plan = pairing.plan_batch(case.requests) if len(case.requests) > 1 else pairing.plan(**vars(case.requests[0]))
    except PlanError as error:
        print(f"REFUSED when planned: {error}")
        return 1
    print(plan.explain())
    if args.picture:
        try:
            picture.draw(pairing, plan, args.picture)
        except (ImportError, OSError) as error:
            print(f"kvplan explain: no picture: {error}", file=sys.stderr)
            return 2
        print(f"picture: {args.picture}")
    return 0
