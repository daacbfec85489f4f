"""What this program writes on Kubernetes objects, and how it is recognised there. Standard library only."""

from __future__ import annotations

STACK_LABEL = "orca.stack"
#: driver, head, worker or runtime; base objects never carry it, and only what carries it can be a stray.
ROLE_LABEL = "orca.role"
RUN_LABEL = "orca.run"
START_LABEL = "orca.start"
PIPELINE_LABEL = "orca.pipeline"
#: Stands in a dependent's owner reference where the Job's uid goes at the create.
JOB_UID_PLACEHOLDER = "{{orca-job-uid}}"


def field_manager(stack_id: str) -> str:
    """The one field manager of everything that the stack applies: an `up` that is done twice then changes nothing."""
    return f"orca-infra-{stack_id}"


def object_annotations(stack_id: str) -> dict[str, str]:
    """What tells the provider to apply as that manager, and not to wait: readiness is the loop's business."""
    return {"pulumi.com/patchFieldManager": field_manager(stack_id), "pulumi.com/skipAwait": "true"}
