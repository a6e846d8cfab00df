"""Prove a cluster before it serves: TP 2 to 4, with 3 pipeline stages to 2. Then the same with a rank left out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvplan import Cluster, Heads, Layout, PairingError

LAYERS, HEADS = 12, 8


def ranks_of(tensor: int, stages: int) -> list[Layout]:
    """All ranks of a side. In a serving stack each sends its `to_dict()`, and one process reads them by `from_dict`."""
    layers, share = LAYERS // stages, HEADS // tensor
    return [
        Layout.mha(
            (1 + stage * tensor + rank) << 36,  # addresses do not matter to the proof
            layers=range(stage * layers, (stage + 1) * layers),
            num_pages=64,
            heads=Heads(rank * share, (rank + 1) * share, HEADS),
        )
        for stage in range(stages)
        for rank in range(tensor)
    ]


def main() -> None:
    prefill, decode = ranks_of(tensor=2, stages=3), ranks_of(tensor=4, stages=2)
    Cluster(prefill, decode).check()
    print(f"right: {len(prefill)} prefill ranks write every row of {len(decode)} decode ranks once")
    try:
        Cluster(prefill[:-1], decode).check()
        raise AssertionError("a rank is left out, and nobody noticed")
    except PairingError as error:
        print(f"refused: {error}")
    if len(sys.argv) > 1:  # a file for: python -m kvplan check FILE --picture cluster.png
        sides = {"prefill": [r.to_dict() for r in prefill], "decode": [r.to_dict() for r in decode]}
        Path(sys.argv[1]).write_text(json.dumps(sides))


if __name__ == "__main__":
    main()
