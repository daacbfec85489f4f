"""What Google Cloud's words mean, in every spelling that was found."""

from __future__ import annotations

import pytest

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.providers.gcp_errors import classify

ZONE = "projects/p/zones/us-central1-a"

SAMPLES: list[tuple[type[OrcaError], str]] = [
    # The plain sentence, as Pulumi's provider says it: without the code.
    (
        NoCapacity,
        f"1 error occurred:\n\t* Error waiting for instance to create: The zone '{ZONE}' does not have enough resources available to fulfill the request.  Try a different zone, or try again later.\n\n",
    ),
    (
        NoCapacity,
        f"Error waiting for instance to create: The zone '{ZONE}' does not have enough resources available to fulfill the request.  '(resource type:compute)'.",
    ),
    (NoCapacity, f"ZONE_RESOURCE_POOL_EXHAUSTED: The zone '{ZONE}' is full"),
    (NoCapacity, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"),
    (NoCapacity, "503 SERVICE UNAVAILABLE ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: The zone is full"),
    (NoCapacity, "googleapi: Error 503: The zone has not ... '(state:STOCKOUT, sub-state:STOCKOUT)', backendError"),
    (
        NoCapacity,
        "A n1-standard-4 VM instance with 1 nvidia-tesla-t4 accelerator(s) is currently unavailable in the us-central1-b zone. Consider trying your request in the us-central1-a zone(s).",
    ),
    (NoCapacity, "reason: resource_availability"),
    (NoCapacity, "REGION_RESOURCE_POOL_EXHAUSTED"),
    (QuotaExceeded, "googleapi: Error 403: Quota 'CPUS' exceeded.  Limit: 24.0 in region us-central1., quotaExceeded"),
    (
        QuotaExceeded,
        "Error waiting for instance to create: Quota 'CPUS_ALL_REGIONS' exceeded.  Limit: 12.0 globally.\n\tmetric name = compute.googleapis.com/cpus_all_regions",
    ),
    (QuotaExceeded, "QUOTA_EXCEEDED"),
    (
        QuotaExceeded,
        "googleapi: Error 403: Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of service 'compute.googleapis.com', rateLimitExceeded",
    ),
    (QuotaExceeded, "googleapi: Error 429: Too many requests, rateLimitExceeded"),
    (QuotaExceeded, "Error 403: Rate Limit Exceeded, userRateLimitExceeded"),
    (
        AuthFailed,
        "googleapi: Error 403: Required 'compute.instances.create' permission for 'projects/p/zones/z/instances/orca-p-1', forbidden",
    ),
    (AuthFailed, "googleapi: Error 401: Request had invalid authentication credentials., authError"),
    (AuthFailed, "google: could not find default credentials. See https://cloud.google.com/docs/authentication"),
    (AuthFailed, 'oauth2: "invalid_grant" "Account has been deleted"'),
    (
        AuthFailed,
        "googleapi: Error 400: The user does not have access to service account 'a@p.iam.gserviceaccount.com'.  User: 'x'.  Ask a project owner to grant you the iam.serviceAccountUser role, SERVICE_ACCOUNT_ACCESS_DENIED",
    ),
    (
        Refused,
        "googleapi: Error 403: Compute Engine API has not been used in project 42 before or it is disabled., accessNotConfigured",
    ),
    (Refused, "googleapi: Error 403: This API method requires billing to be enabled., BILLING_DISABLED"),
    (
        Refused,
        "googleapi: Error 400: Invalid value for field 'resource.machineType': 'zones/us-central1-a/machineTypes/e9-huge'. The referenced resource does not exist., invalid",
    ),
    (Refused, "googleapi: Error 404: The resource 'projects/p/zones/moon-east1-a' was not found, notFound"),
    (
        Refused,
        "Error resolving image name 'debian-cloud/debian-99': Could not find image or family debian-cloud/debian-99",
    ),
    (
        Refused,
        "googleapi: Error 400: Invalid value for field 'resource.networkInterfaces[0].network': 'global/networks/none'. The referenced network resource cannot be found., invalid",
    ),
    (
        Refused,
        "googleapi: Error 412: Constraint constraints/compute.vmExternalIpAccess violated for project p., conditionNotMet",
    ),
    (Refused, "gcp:compute/instance:Instance resource 'orca-p-1' has a problem: Missing required argument"),
    (
        Conflict,
        "googleapi: Error 409: The resource 'projects/p/zones/us-central1-a/instances/orca-p-1' already exists, alreadyExists",
    ),
    (Transient, "googleapi: Error 503: Backend Error, backendError"),
    (
        Transient,
        'Post "https://compute.googleapis.com/compute/v1/projects/p": dial tcp: lookup compute.googleapis.com: no such host',
    ),
    (Transient, "read tcp 10.0.0.2:443: connection reset by peer"),
    (Transient, "Internal error. Please try again or contact Google Support. (Code: '1'), INTERNAL_ERROR"),
    (Transient, "words that nobody has seen before"),
]


@pytest.mark.parametrize(
    ("meaning", "words"), SAMPLES, ids=[f"{kind.__name__}-{n}" for n, (kind, _) in enumerate(SAMPLES)]
)
def test_each_spelling_has_its_meaning(meaning: type[OrcaError], words: str) -> None:
    assert type(classify(words)) is meaning


@pytest.mark.parametrize("pool", ["quota", "stockout", "quotaexceeded", "forbidden-fruit", "rate-limit"])
def test_a_pools_name_is_no_word_of_googles(pool: str) -> None:
    said = f"googleapi: Error 409: The resource 'projects/p/zones/us-central1-a/instances/orca-{pool}-1' already exists, alreadyExists"
    assert type(classify(said)) is Conflict


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            "Error 403: Compute Engine API has not been used in project 42",
            "gcloud services enable compute.googleapis.com",
        ),
        ("google: could not find default credentials", "gcloud auth application-default login"),
        ("Error 403: Required 'compute.instances.create' permission", "roles/compute.instanceAdmin.v1"),
        (
            "Invalid value for field 'resource.machineType': 'zones/z/machineTypes/x'",
            "gcloud compute machine-types list",
        ),
        ("The resource 'projects/p/zones/moon-east1-a' was not found", "gcloud compute zones list"),
        ("Error resolving image name 'x': Could not find image or family x", "gcloud compute images list"),
        ("Quota 'CPUS' exceeded.  Limit: 24.0", "iam-admin/quotas"),
    ],
)
def test_the_sentence_has_the_remedy(words: str, remedy: str) -> None:
    error = classify(words)
    assert remedy in str(error)
    assert "\n" not in str(error)


def test_what_is_said_is_bounded() -> None:
    assert len(str(classify("x" * 100_000))) < 1000
