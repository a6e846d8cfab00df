"""Mistakes that the sanitizers must see in the extension as the tests load it: what is believed is made a lie.

Prints which extension is loaded, and for each mistake the status and the report of the process that made it. Run by
tests/test_sanitizers.py.
"""

from __future__ import annotations

import json
import os
import tempfile

import torch

from kvplan import ops


def a_write_behind_a_block() -> None:
    src, dst = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    ops.copy_(torch.tensor([[src.data_ptr()], [dst.data_ptr() + 1], [64]]))


def a_read_behind_a_block() -> None:
    src, dst = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    ops.copy_(torch.tensor([[src.data_ptr() + 1], [dst.data_ptr()], [64]]))


def a_word_out_of_line() -> None:
    words = torch.frombuffer(bytearray(25), dtype=torch.int64, offset=1)
    ops.copy_(words.view(3, 1))


def report(mistake) -> tuple[int, str]:
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.dup2(file.fileno(), 2)
            mistake()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return os.waitstatus_to_exitcode(status), file.read().decode(errors="replace")[:3000]


if __name__ == "__main__":
    torch.set_num_threads(1)
    mistakes = (a_write_behind_a_block, a_read_behind_a_block, a_word_out_of_line)
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if line.endswith("/_C.so\n")}
    print(json.dumps([sorted(loaded), {mistake.__name__: report(mistake) for mistake in mistakes}]))
