"""All policies, in the order in which they are shown."""

from __future__ import annotations

from orca_infra.policy import identity, machines, pods

RULES = (*identity.RULES, *machines.RULES, *pods.RULES)
