"""What tests on a real API server share: one cluster for each pytest process, and a fresh namespace for each test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from orca_infra.errors import SetupError
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_http import Api, ApiError


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    """A control plane with one fake node. Without its programs the tests fail, and say how to get them."""
    try:
        started = TestCluster.start()
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)
    with started:
        yield started


class Objects:
    """The objects of one namespace, by plain requests: `objects.create("pods", {...})`."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    def path(self, plural: str, name: str = "") -> str:
        groups = {"jobs": "/apis/batch/v1", "endpointslices": "/apis/discovery.k8s.io/v1"}
        return f"{groups.get(plural, '/api/v1')}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, plural: str, item: dict[str, Any]) -> dict[str, Any]:
        return self.api.call("POST", self.path(plural), item)

    def get(self, plural: str, name: str) -> dict[str, Any]:
        return self.api.call("GET", self.path(plural, name))

    def find(self, plural: str, name: str) -> dict[str, Any] | None:
        with contextlib.suppress(ApiError):
            return self.get(plural, name)
        return None

    def list(self, plural: str) -> list[dict[str, Any]]:
        return list(self.api.call("GET", self.path(plural))["items"])

    def delete(self, plural: str, name: str) -> None:
        self.api.call("DELETE", self.path(plural, name))


@pytest.fixture
def objects(cluster: TestCluster, namespace: str) -> Objects:
    return Objects(cluster.api, namespace)
