"""A network on which tests of fetching reach this machine alone."""

import pytest

from tests.helpers.serving.web import FakeNetwork, fake_network


@pytest.fixture
def network(monkeypatch) -> FakeNetwork:
    return fake_network(monkeypatch)
