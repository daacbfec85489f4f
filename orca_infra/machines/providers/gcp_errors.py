"""What Google Cloud's words mean: one table for its API, its operations and what the engine reports of both.

The spellings are from Google's documentation (https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation,
https://cloud.google.com/compute/docs/resource-error) and from what people reported; tests/unit/test_gcp_errors.py has a
sample of each. Words that a machine's name could hold are matched as they are written, so that a pool named `quota` is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient

_MESSAGE_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class _Meaning:
    error: type[OrcaError]
    words: str
    remedy: str = ""


# The first that is found counts: what is specific stands before what is general, and a stock-out before all, since it may
# come with a 503, or with a sentence on quotas beside it.
_MEANINGS = (
    _Meaning(
        NoCapacity,
        r"RESOURCE_POOL_EXHAUSTED|\bSTOCKOUT\b|\bresource_availability\b"
        r"|does not have enough resources available|[Nn]ot enough resources available"
        r"|is currently unavailable in the \S+ (?:zone|region)"
        r"|\bINSUFFICIENT_CAPACITY\b|[Ii]nsufficient capacity",
    ),
    _Meaning(
        QuotaExceeded,
        r"[rR]ateLimitExceeded|RATE_LIMIT_EXCEEDED|Quota exceeded for quota metric|\bError 429\b|Too [Mm]any [Rr]equests"
        r"|[oO]perationQuotaExceeded|OPERATIONS?_QUOTA_EXCEEDED|OPERATION_RATE_EXCEEDED|[oO]perationRateExceeded",
        "it is a limit for requests in a time and passes by itself; `gcloud compute project-info describe` shows limits",
    ),
    _Meaning(
        QuotaExceeded,
        r"QUOTA_EXCEEDED|quotaExceeded|Quota '[^']*' exceeded|Quota limit '[^']*' has been exceeded"
        r"|Quota [A-Z0-9_]+ exceeded",
        "ask for more at https://console.cloud.google.com/iam-admin/quotas, or lower max_machines",
    ),
    _Meaning(
        Transient,
        r"\bError 5\d\d\b|\bbackendError\b|\binternalError\b|\bINTERNAL_ERROR\b|\bRESOURCE_NOT_READY\b|resourceNotReady"
        r"|connection reset|connection refused|no such host|i/o timeout|TLS handshake timeout|context deadline exceeded"
        r"|unexpected EOF|network is unreachable|[Ll]abels? ?[Ff]ingerprint",
    ),
    _Meaning(Conflict, r"\balreadyExists\b|\bRESOURCE_ALREADY_EXISTS\b|\bALREADY_EXISTS\b|' already exists"),
    _Meaning(
        Refused,
        r"SERVICE_DISABLED|accessNotConfigured|has not been used in project|API \[[^\]]*\] not enabled",
        "turn the API on: `gcloud services enable compute.googleapis.com --project=PROJECT`, then wait a few minutes",
    ),
    _Meaning(
        Refused,
        r"BILLING_DISABLED|[Bb]illing (?:account|is disabled|must be enabled)|requires billing",
        "link a billing account to the project",
    ),
    _Meaning(
        AuthFailed,
        r"default credentials|invalid_grant|Reauthentication|\bError 401\b|UNAUTHENTICATED|authError"
        r"|invalid authentication credentials|[Nn]o credentials|oauth2: |Request is missing required authentication",
        "run `gcloud auth application-default login`, or give the loop's machine a service account "
        "(GOOGLE_APPLICATION_CREDENTIALS names a key file)",
    ),
    _Meaning(
        AuthFailed,
        r"SERVICE_ACCOUNT_ACCESS_DENIED|iam\.serviceAccounts\.actAs|serviceAccountUser",
        "give the loop's account roles/iam.serviceAccountUser on the machines' service account",
    ),
    _Meaning(
        AuthFailed,
        r"PERMISSION_DENIED|\bforbidden\b|\bError 403\b|[Rr]equired '[\w.]+' permission|insufficient authentication scopes",
        "give the loop's account roles/compute.instanceAdmin.v1 on the project, and look that the project's id is right",
    ),
    _Meaning(
        Refused,
        r"machineTypes?/|machine ?[tT]ype",
        "`gcloud compute machine-types list --zones=ZONE` shows the types that a zone has; mend `types` or `locations`",
    ),
    _Meaning(
        Refused,
        r"[Uu]nknown zone|Invalid value for field 'zone'|The resource 'projects/[^/']*/zones/[^/']*' was not found",
        "`gcloud compute zones list` shows the zones; mend the pool's `locations`",
    ),
    _Meaning(
        Refused,
        r"global/images/|resolving image|could not find image|sourceImage",
        "`gcloud compute images list` shows the images; mend `boot_image` of [gcp]",
    ),
    _Meaning(
        Refused,
        r"global/networks/|/subnetworks/|networkInterfaces\[|[Nn]etwork .* not found",
        "the network is missing or of another region: `pulumi up` makes the stack's own, or mend `network` and `subnetwork`",
    ),
    _Meaning(
        Refused,
        r"serviceAccounts?[./]|[Ss]ervice account",
        "the service account is missing: `pulumi up` makes the stack's own, or mend `service_account` of [gcp]",
    ),
    _Meaning(
        Refused,
        r"[Cc]onstraint|conditionNotMet|CONDITION_NOT_MET|\bError 412\b",
        "a policy of the organization forbids it; ask who keeps it",
    ),
    _Meaning(
        Refused,
        r"\bError 4\d\d\b|\binvalid\b|Invalid value|INVALID_|\bbadRequest\b|\bnotFound\b|NOT_FOUND|was not found"
        r"|does not exist|UNSUPPORTED_OPERATION|has a problem:|is required|must be (?:one of|a match)",
        "mend [gcp] or the pool in orca.toml: the same request never succeeds",
    ),
)
_COMPILED = tuple((re.compile(meaning.words), meaning) for meaning in _MEANINGS)


def classify(message: str) -> OrcaError:
    """What the words mean, with what to do about it; nobody knows: Transient."""
    said = " ".join(re.sub(r"^\s*\d+ errors? occurred:\s*\*?", "", message).split())
    said = said if len(said) <= _MESSAGE_CHARACTERS else f"{said[:_MESSAGE_CHARACTERS]}…"
    for words, meaning in _COMPILED:
        if words.search(message):
            return meaning.error(f"{said}; {meaning.remedy}" if meaning.remedy else said)
    return Transient(said)
