"""Test reports name the back end, and what fails on the device fails the test that ran it."""

import pytest


def pytest_report_header() -> str:
    from kvplan.ops import backend

    return "kvplan: " + "; ".join(f"{choice.device} by {choice.name} ({choice.why})" for choice in backend.chosen())


@pytest.fixture(autouse=True)
def finished():
    """Waits for the device behind each test, so that an error there fails that test and not a later one."""
    yield
    from on_device import finish

    finish()
