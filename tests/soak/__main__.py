"""python -m tests.soak --engine mooncake --faults 500 --seed 1; status 1 where a byte changed that must not."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.soak.soak import FAULTS, Soak, Wrong

ROUND_S = 150  # more than any round may take


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--engine", choices=sorted(FAULTS), required=True)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--lie", action="store_true", help="have settle() lie, which must be found")
    arguments = parser.parse_args()
    logging.getLogger("kvplan").setLevel(logging.CRITICAL)  # every round fails
    print(f"{arguments.engine}: {arguments.faults} faults, seed {arguments.seed}", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(arguments.engine, Path(folder), arguments.seed, arguments.lie)
        try:
            for number in range(1, arguments.faults + 1):
                faulthandler.dump_traceback_later(ROUND_S, exit=True)  # shows where it stands still
                soak.round()
                if number % 25 == 0 or number == arguments.faults:
                    said = ", ".join(f"{count} {name}" for name, count in soak.counts.items())
                    print(f"{time.monotonic() - begun:6.1f} s: {number} faults; {said}", flush=True)
            faulthandler.cancel_dump_traceback_later()
            soak.close()
        except Exception as error:  # whatever it is: no process may stay behind, stopped
            print(f"WRONG after {time.monotonic() - begun:.1f} s, seed {arguments.seed}: {error!r}", flush=True)
            if not isinstance(error, Wrong):
                traceback.print_exc()
            soak.stop()
            return 1
    print("No byte changed after its transfer was called settled.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
