"""Notices: what is kept, for how long, and of whom."""

from __future__ import annotations

import pytest

from kvplan.engines import notices
from kvplan.engines.notices import MAX_BYTES, MAX_KEPT, MAX_KEPT_BYTES, Notices


class Inbox:
    """Hands over what was put in, once."""

    def __init__(self) -> None:
        self.new: list[tuple[str, bytes]] = []

    def __call__(self) -> list[tuple[str, bytes]]:
        new, self.new = self.new, []
        return new


@pytest.fixture
def inbox():
    return Inbox()


@pytest.fixture
def kept(inbox):
    return Notices(inbox)


def test_each_is_taken_as_often_as_it_came(inbox, kept):
    inbox.new = [("a", b"x"), ("b", b"x"), ("a", b"x"), ("a", b"y")]
    assert kept.collect() == 4
    assert [kept.take(b"x") for _ in range(4)] == [True, True, True, False]
    assert kept.take(b"y") and not kept.take(b"y")
    assert (kept._kept, kept._nbytes, kept._senders) == (0, 0, {})


def test_what_is_none_of_ours_is_thrown_away(inbox, kept):
    inbox.new = [("a", b""), ("a", b"x" * (MAX_BYTES + 1)), ("a" * 10_000, b"x" * MAX_BYTES)]
    kept.collect()
    assert kept._kept == 1 and kept.take(b"x" * MAX_BYTES)


@pytest.mark.parametrize("nbytes", [8, MAX_BYTES])
def test_the_oldest_go_where_there_are_too_many(inbox, kept, nbytes):
    most = min(MAX_KEPT, MAX_KEPT_BYTES // (nbytes + notices._OVERHEAD))
    made = [b"%0*d" % (nbytes, k) for k in range(most + 1)]
    inbox.new = [("a", notice) for notice in made[:most]]
    kept.collect()
    assert kept._kept == most
    inbox.new = [("a", made[most])]
    kept.collect()
    gone = (most + 1) // 16
    assert kept._kept == most + 1 - gone and kept._nbytes == kept._kept * (nbytes + notices._OVERHEAD)
    assert not kept.take(made[gone - 1]) and kept.take(made[gone]) and kept.take(made[most])


def test_how_much_is_kept():
    assert (MAX_BYTES, MAX_KEPT, MAX_KEPT_BYTES) == (1024, 65_536, 16 << 20)


@pytest.mark.parametrize("first", ["good", "bad"])
def test_no_peer_pushes_out_what_another_has_sent(inbox, kept, first):
    good = [("good", b"page %d" % k) for k in range(100)]
    bad = [("bad", b"%1000d" % k) for k in range(50_000)]
    inbox.new = good + bad if first == "good" else bad + good
    kept.collect()
    assert all(kept.take(notice) for _, notice in good)


def test_senders_are_bounded(inbox, kept):
    inbox.new = [("good", b"mine"), *((f"bad {k}", b"%d" % k) for k in range(200_000))]
    kept.collect()
    assert len(kept._senders) <= notices._MAX_SENDERS + 1 and kept._kept <= MAX_KEPT
    assert kept.take(b"mine")


@pytest.mark.parametrize("timeout", [float("nan"), -1.0, "1"])
def test_limits_that_are_none(kept, timeout):
    with pytest.raises(ValueError, match="timeout"):
        kept.wait(b"x", timeout)


@pytest.mark.parametrize("timeout", [None, float("inf")])
def test_no_limit(inbox, kept, timeout):
    inbox.new = [("a", b"x")]
    kept.wait(b"x", timeout)
    with pytest.raises(TimeoutError, match="within 0 s"):
        kept.wait(b"x", 0)
