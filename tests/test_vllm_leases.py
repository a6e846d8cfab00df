"""Leases: blocks of the prefill side are held until they were read, or nobody asked for long; and never longer."""

from __future__ import annotations

from kvplan.integrations.vllm.leases import Leases


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_done_with_is_released_once() -> None:
    leases = Leases(10, Clock())
    leases.hold("a")
    leases.hold("b")
    leases.done(["a", "no such request"])
    assert leases.released() == ({"a"}, set()) and leases.released() == (set(), set())
    assert not leases.held("a") and leases.held("b") and len(leases) == 1


def test_a_lease_ends_when_nobody_asks() -> None:
    clock = Clock()
    leases = Leases(10, clock)
    leases.hold("a")
    leases.hold("b")
    clock.now = 9
    leases.renew(["b", "no such request"])
    clock.now = 10
    assert leases.released() == (set(), {"a"})
    clock.now = 18
    assert leases.held("b")  # which renews it
    clock.now = 27
    assert leases.released() == (set(), set())
    clock.now = 28
    assert leases.released() == (set(), {"b"})


def test_a_lease_whose_time_has_passed_is_not_held_and_not_renewed() -> None:
    """Also before anybody has taken it out: its blocks are freed with the next step."""
    clock = Clock()
    leases = Leases(10, clock)
    leases.hold("a")
    clock.now = 10
    leases.renew(["a"])
    assert not leases.held("a")
    assert leases.released() == (set(), {"a"})


def test_what_is_done_with_after_its_time_is_released_once() -> None:
    clock = Clock()
    leases = Leases(10, clock)
    leases.hold("a")
    clock.now = 11
    leases.done(["a"])
    assert leases.released() == ({"a"}, set()) and leases.released() == (set(), set())
