"""Memory that one large plan takes beyond its result: peak resident size during the call, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

from bench import inputs


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    from bench.test_plan import layout
    from kvplan import pair

    pairing = pair(layout(inputs.SRC_BASE, host=False), layout(inputs.DST_BASE, host=True))
    source, host, device = inputs.request(64, "scattered")
    pairing.plan(source, {"host": host, "device": device})  # load everything that is loaded once
    source, host, device = inputs.request(4096, "scattered")
    Path("/proc/self/clear_refs").write_text("5")  # peak := now
    before = status("VmRSS")
    plan = pairing.plan(source, {"host": host, "device": device})
    print(json.dumps({"table": plan.table.nbytes, "extra": status("VmHWM") - before - plan.table.nbytes}))


if __name__ == "__main__":
    main()
