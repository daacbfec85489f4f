"""The loop as a service: policies, log, record, health."""

from __future__ import annotations

from orca_infra.settings.values import Setting, count, read_log_form, read_policies, read_port, seconds

SERVICE: tuple[Setting, ...] = (
    Setting(
        name="ORCA_POLICY_CONFIG",
        field="policies",
        meaning="The policies' configuration, as `pulumi preview --policy-pack-config` takes it. The loop keeps within its "
        "machine types, locations, counts and registries.",
        unit="path of a JSON file; docs/reference/policies.md",
        default=None,
        why="What may be made is its owner's to say.",
        unset="The policies' defaults, which restrain no type, location, count or registry.",
        read=read_policies,
    ),
    Setting(
        name="ORCA_LOG",
        field="log_form",
        meaning="The form of the program's own log on standard error, a line for each action.",
        unit="json or text",
        default=None,
        why="People read terminals, programs read what is kept.",
        unset="text on a terminal, JSON elsewhere.",
        read=read_log_form,
    ),
    count(
        "ORCA_RECORD_PASSES",
        "record_passes",
        "1000",
        meaning="How many passes that changed something are kept for `orca-infra explain`, of machines, of runs and of "
        "runtimes. 0: none.",
        why="Days of a quiet stack and hours of a busy one. A pass takes a few kilobytes; what many share is kept once.",
    ),
    seconds(
        "ORCA_RECORD_SECONDS",
        "record_seconds",
        "7d",
        meaning="How long a pass is kept for `orca-infra explain` at the most.",
        why="What went wrong over a long weekend can still be asked.",
    ),
    Setting(
        name="ORCA_HEALTH_PORT",
        field="health_port",
        meaning="The port on which `orca-infra run` serves /healthz, /readyz and /metrics over HTTP.",
        unit="port",
        default=None,
        why="Two loops on one machine would want the same one; in a container nothing else does, and its manifest sets it.",
        unset="Nothing is served.",
        read=read_port,
    ),
    Setting(
        name="ORCA_HEALTH_HOST",
        field="health_host",
        meaning="The address that ORCA_HEALTH_PORT is opened on.",
        unit="host name or address",
        default="0.0.0.0",  # noqa: S104  (as `why` says)
        why="A kubelet and a Prometheus come from outside the container. What is served holds no secret and changes nothing.",
        unset="Every IPv4 address of the machine; `::` is every address.",
        read=str,
    ),
)
