"""These tests run in SGLang's environment (`make sglang`); elsewhere tests/test_sglang.py runs some of them there."""

import importlib.util

try:
    THERE = importlib.util.find_spec("sglang.srt") is not None
except ModuleNotFoundError:
    THERE = False
collect_ignore_glob = [] if THERE else ["*"]
