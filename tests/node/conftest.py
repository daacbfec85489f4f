"""What tests on a real node share: a cluster whose only node truly runs containers, and a Postgres that these reach.

Where there can be no such node, the tests are skipped with one line of why; where there should be one and it does not come
up, they fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from orca_infra.db.connection import Database, Session
from orca_infra.db.migrate import migrate
from orca_infra.errors import SetupError
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.node import RealNode
from orca_infra.testing.node_postgres import NodePostgres
from orca_infra.testing.node_surroundings import NodeImpossible, check_surroundings

_TEMPLATE = "orca_migrated"


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    """A control plane without fake nodes."""
    try:
        check_surroundings()
        started = TestCluster.start(nodes=0)
    except NodeImpossible as error:
        pytest.skip(str(error))
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)
    with started:
        yield started


@pytest.fixture(scope="session")
def node(cluster: TestCluster) -> Iterator[RealNode]:
    try:
        started = RealNode.start(cluster)
    except NodeImpossible as error:
        pytest.skip(str(error))
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)
    with started:
        yield started


@dataclass(frozen=True)
class NodeDatabases:
    """The node's Postgres, with the face of the embedded one of the other tests."""

    server: NodePostgres
    numbers: Iterator[int]

    @property
    def url(self) -> str:
        return self.server.url

    def new_database(self, template: str = "template1") -> str:
        name = f"test_{next(self.numbers)}"
        self.command(f"create database {name} template {template}")
        return make_conninfo(self.url, dbname=name)

    def drop(self, url: str) -> None:
        self.command(f"drop database if exists {conninfo_to_dict(url)['dbname']} with (force)")

    def container_url(self, url: str) -> str:
        """The same database for a container."""
        return self.server.container_url(str(conninfo_to_dict(url)["dbname"]))

    def command(self, text: Any) -> None:
        session = Session(self.url)
        try:
            session.row(text)
        finally:
            session.close()


@pytest.fixture(scope="session")
def postgres_server(node: RealNode) -> NodeDatabases:
    """Takes the place of the embedded Postgres: it ends with the node."""
    databases = NodeDatabases(NodePostgres(node), itertools.count(1))
    databases.command(f"create database {_TEMPLATE}")
    database = Database(make_conninfo(databases.url, dbname=_TEMPLATE))
    migrate(database, with_orca_tables=True)
    database.close()
    return databases
