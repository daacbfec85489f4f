from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from orca_infra.testing.simulation import Simulation
from orca_infra.testing.simulation_world import prepare_database


@pytest.fixture(scope="session")
def simulated_database_url(postgres_server: Any) -> Iterator[str]:
    """A database whose time is the simulation's."""
    url = postgres_server.new_database()
    prepare_database(url)
    yield url
    postgres_server.drop(url)


@pytest.fixture(scope="module")
def simulation(simulated_database_url: str) -> Iterator[Simulation]:
    simulation = Simulation(simulated_database_url)
    yield simulation
    simulation.close()
