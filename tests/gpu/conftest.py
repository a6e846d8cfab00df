"""A failure says on which back end."""

import pytest


def pytest_report_header() -> str:
    from kvplan.ops import backend

    return "kvplan: " + "; ".join(f"{choice.device} by {choice.name} ({choice.why})" for choice in backend.chosen())


@pytest.fixture(autouse=True)
def finished():
    """What went wrong on the device is told by the test that did it."""
    yield
    from on_device import finish

    finish()
