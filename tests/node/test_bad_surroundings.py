"""Surroundings in which no node starts; the first file of the folder, because the others' node has the port."""

from __future__ import annotations

import socket

import pytest

from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.node import RealNode
from orca_infra.testing.node_surroundings import NodeImpossible


def test_a_port_53_that_is_taken_is_said(cluster: TestCluster) -> None:
    """Of every address: the node's own is among them."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
        try:
            taken.bind(("0.0.0.0", 53))
        except OSError:
            pytest.skip("port 53 is taken already: by another program, or another node")
        taken.listen()
        with pytest.raises(NodeImpossible, match="has port 53 of every address"):
            RealNode.start(cluster)
