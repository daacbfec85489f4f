"""The Kubernetes client against a real API server."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.doctor import examine
from orca_infra.errors import AuthFailed, Conflict, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.kube.client import Kube
from orca_infra.kube.errors import Expired, KindMissing, NamespaceMissing, ObjectMissing
from orca_infra.kube.kinds import CRD, JOB, NAMESPACE, POD, RESOURCE_QUOTA, SECRET, SERVICE, Kind, Object, Ref, ref_of
from orca_infra.kube.watching import Change, Gone, Heard, Relisted, Seen, Trouble
from orca_infra.testing.cluster import TestCluster

WaitUntil = Callable[..., None]


@pytest.fixture
def kube(cluster: TestCluster) -> Iterator[Kube]:
    with Kube.connect(kubeconfig=cluster.kubeconfig) as connected:
        yield connected


@pytest.fixture
def connect(cluster: TestCluster, tmp_path: Path) -> Callable[..., Kube]:
    """The same cluster as somebody else, or in another way."""

    def connect_as(cluster_keys: dict[str, Any] | None = None, **user: Any) -> Kube:
        reached = {"server": cluster.server, "certificate-authority": str(cluster.ca_file)}
        content = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": reached if cluster_keys is None else cluster_keys}],
            "users": [{"name": "u", "user": user or {"token": cluster.token}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(content))
        return Kube.connect(kubeconfig=path)

    return connect_as


def pod(namespace: str, name: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "registry.example/image:1"}
    whole = {"restartPolicy": "Never", "containers": [container], **spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": whole,
    }


def secret(namespace: str, name: str, **labels: str) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": "s3cr3t"}}


def uid_of(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def test_an_object_is_made_found_changed_and_deleted(kube: Kube, namespace: str) -> None:
    made = kube.create(secret(namespace, "one", a="b"))
    ref = ref_of(made)
    assert kube.get(ref) == made
    changed = kube.patch(ref, {"metadata": {"labels": {"a": None, "c": "d"}}})
    assert changed["metadata"]["labels"] == {"c": "d"}
    assert kube.delete(ref) is True
    assert kube.get(ref) is None
    assert kube.delete(ref) is False
    with pytest.raises(ObjectMissing):
        kube.patch(ref, {"metadata": {"labels": {"a": "b"}}})


def test_a_name_that_is_taken_is_a_conflict(kube: Kube, namespace: str) -> None:
    kube.create(secret(namespace, "one"))
    with pytest.raises(Conflict, match=f"create Secret {namespace}/one"):
        kube.create(secret(namespace, "one"))


def test_apply_makes_adopts_and_does_not_take_from_another_manager(kube: Kube, namespace: str) -> None:
    made = kube.apply(secret(namespace, "one", a="1"), manager="orca-infra-s")
    same = kube.apply(secret(namespace, "one", a="1"), manager="orca-infra-s")
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    fewer = kube.apply(secret(namespace, "one"), manager="orca-infra-s")
    assert (uid_of(fewer), "labels" in fewer["metadata"]) == (uid_of(made), False)

    kube.create(secret(namespace, "made-by-hand", a="1"))
    adopted = kube.apply(secret(namespace, "made-by-hand", a="1"), manager="orca-infra-s")
    assert {entry["manager"] for entry in adopted["metadata"]["managedFields"]} >= {"orca-infra-s"}
    with pytest.raises(Conflict, match="labels") as caught:
        kube.apply(secret(namespace, "made-by-hand", a="2"), manager="another")
    assert "s3cr3t" not in str(caught.value)
    forced = kube.apply(secret(namespace, "made-by-hand", a="2"), manager="another", force=True)
    assert forced["metadata"]["labels"] == {"a": "2"}


def test_apply_with_another_uid_makes_nothing(kube: Kube, namespace: str) -> None:
    wanted = secret(namespace, "one")
    wanted["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(Conflict):
        kube.apply(wanted, manager="m")
    assert kube.get(ref_of(wanted)) is None


def test_only_the_very_object_is_deleted_or_changed(kube: Kube, namespace: str) -> None:
    """R3: a sweep of what is gone must not touch its successor."""
    first = kube.create(secret(namespace, "one"))
    ref = ref_of(first)
    assert kube.delete(ref, uid=uid_of(first)) is True
    assert kube.delete(ref, uid=uid_of(first)) is False
    second = kube.create(secret(namespace, "one"))
    assert kube.delete(ref, uid=uid_of(first)) is False
    with pytest.raises(Conflict):
        kube.patch(ref, {"metadata": {"labels": {"a": "b"}}}, uid=uid_of(first))
    assert kube.get(ref) == second
    changed = kube.patch(
        ref,
        {"metadata": {"labels": {"a": "b"}}},
        uid=uid_of(second),
        resource_version=second["metadata"]["resourceVersion"],
    )
    with pytest.raises(Conflict):
        kube.patch(ref, {"type": "x"}, resource_version=second["metadata"]["resourceVersion"])
    assert kube.get(ref) == changed
    assert kube.delete(ref, uid=uid_of(second)) is True


def test_what_a_job_owns_goes_with_it(kube: Kube, namespace: str, wait_until: WaitUntil) -> None:
    """R3: nothing is orphaned, since the propagation is stated."""
    template = {"spec": pod(namespace, "x")["spec"]}
    metadata = {"name": "driver", "namespace": namespace}
    job = kube.create({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}})
    wait_until(lambda: kube.list(POD, namespace=namespace).items)
    assert kube.delete(ref_of(job), uid=uid_of(job)) is True
    wait_until(lambda: not kube.list(POD, namespace=namespace).items, 30)
    assert kube.get(Ref(kind=JOB, namespace=namespace, name="driver")) is None


ANOTHER = "00000000-0000-0000-0000-000000000000"
WIDGET = Kind(api_version="kube-client.example/v1", kind="Widget", plural="widgets")


def test_a_uid_holds_for_every_kind_and_for_its_status(kube: Kube, namespace: str, wait_until: WaitUntil) -> None:
    """The API server itself passes over the uid in a patch of a custom resource's status."""
    open_schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}, "schema": open_schema}
    names = {"plural": WIDGET.plural, "kind": WIDGET.kind}
    spec = {"group": WIDGET.group, "scope": "Namespaced", "names": names, "versions": [version]}
    crd = {"apiVersion": CRD.api_version, "kind": CRD.kind, "metadata": {"name": f"{WIDGET.plural}.{WIDGET.group}"}}
    kube.apply({**crd, "spec": spec}, manager="test")
    wait_until(lambda: is_served(kube, WIDGET, namespace))

    metadata = {"name": "one", "namespace": namespace}
    template = {"spec": pod(namespace, "x")["spec"]}
    widget = kube.create({"apiVersion": WIDGET.api_version, "kind": WIDGET.kind, "metadata": metadata}, kind=WIDGET)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"suspend": True, "template": template},
    }
    for made, kind in ((widget, WIDGET), (kube.create(job), JOB), (kube.create(pod(namespace, "one")), POD)):
        ref = ref_of(made, kind)
        note = {"metadata": {"annotations": {"a": "b"}}}
        with pytest.raises(Conflict):
            kube.patch(ref, note, uid=ANOTHER)
        with pytest.raises(Conflict):
            kube.patch(ref, {"status": {"reason": "x"}}, uid=ANOTHER, subresource="status")
        with pytest.raises(Conflict):
            kube.apply({**made, "metadata": {**metadata, "uid": ANOTHER}}, manager="m", force=True, kind=kind)
        assert kube.delete(ref, uid=ANOTHER) is False
        assert uid_of(kube.patch(ref, note, uid=uid_of(made))) == uid_of(made)
        gone = Ref(kind=kind, namespace=namespace, name="gone")
        with pytest.raises(ObjectMissing):
            kube.patch(gone, {"status": {}}, uid=ANOTHER, subresource="status")
    patched = kube.patch(ref_of(widget, WIDGET), {"status": {"note": "x"}}, uid=uid_of(widget), subresource="status")
    assert patched["status"] == {"note": "x"}


def is_served(kube: Kube, kind: Kind, namespace: str) -> bool:
    with contextlib.suppress(KindMissing):
        return kube.list(kind, namespace=namespace).items == ()
    return False


def test_a_list_of_many_pages_is_whole(kube: Kube, namespace: str) -> None:
    for number in range(25):
        kube.create(
            secret(namespace, f"s-{number:02}", parity=str(number % 2), **({"third": "x"} if number % 3 == 0 else {}))
        )
    whole = kube.list(SECRET, namespace=namespace, page=10)
    assert [item["metadata"]["name"] for item in whole.items] == [f"s-{number:02}" for number in range(25)]
    assert {(item["apiVersion"], item["kind"]) for item in whole.items} == {("v1", "Secret")}
    assert int(whole.resource_version) > 0
    some = kube.list(SECRET, namespace=namespace, labels={"parity": "0"}, label_exists=["third"], page=2)
    assert [item["metadata"]["name"] for item in some.items] == [f"s-{number:02}" for number in range(0, 25, 6)]
    everywhere = kube.list(SECRET, labels={"parity": "1"}, page=5)
    assert len([item for item in everywhere.items if item["metadata"]["namespace"] == namespace]) == 12
    assert kube.list(SERVICE, namespace=namespace).items == ()


def test_a_list_of_metadata_has_nothing_else(kube: Kube, namespace: str) -> None:
    metadata = {"name": "one", "namespace": namespace}
    kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": "v4lue"}})
    for from_cache in (False, True):
        [item] = kube.list(SECRET, namespace=namespace, metadata_only=True, from_cache=from_cache).items
        assert (item["kind"], item["apiVersion"], item["metadata"]["name"]) == ("Secret", "v1", "one")
        assert set(item) == {"kind", "apiVersion", "metadata"}


def test_a_kind_that_is_not_served_is_no_empty_list(kube: Kube, namespace: str) -> None:
    for kind in (
        Kind(api_version="nobody.example/v1", kind="Nothing", plural="nothings"),
        Kind(api_version="v1", kind="Nothing", plural="nothings"),
    ):
        ref = Ref(kind=kind, namespace=namespace, name="x")
        with pytest.raises(KindMissing, match="is its CRD installed"):
            kube.list(kind, namespace=namespace)
        with pytest.raises(KindMissing):
            kube.get(ref)
        with pytest.raises(KindMissing):
            kube.delete(ref)


def test_a_namespace_that_is_missing_or_going_away_is_told_apart(kube: Kube, wait_until: WaitUntil) -> None:
    namespace = f"test-{secrets.token_hex(4)}"
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    with pytest.raises(NamespaceMissing):
        kube.create(secret("not-there", "one"))
    with pytest.raises(NamespaceMissing):
        kube.apply(secret("not-there", "one"), manager="m")
    assert kube.get(Ref(kind=SECRET, namespace="not-there", name="one")) is None
    held = secret(namespace, "held")
    held["metadata"]["finalizers"] = ["orca.example/held"]
    made = kube.create(held)
    assert kube.delete(Ref(kind=NAMESPACE, name=namespace)) is True
    with pytest.raises(NamespaceMissing):
        kube.create(secret(namespace, "one"))
    with pytest.raises(NamespaceMissing):
        kube.apply(secret(namespace, "one"), manager="m")
    kube.patch(ref_of(made), {"metadata": {"finalizers": None}})
    wait_until(lambda: kube.get(Ref(kind=NAMESPACE, name=namespace)) is None, 30)


def test_a_full_quota_is_a_quota(kube: Kube, namespace: str, wait_until: WaitUntil) -> None:
    metadata = {"name": "q", "namespace": namespace}
    spec = {"hard": {"pods": "1", "secrets": "1"}}
    quota = kube.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec})

    def counted() -> bool:
        found = kube.get(ref_of(quota))
        return found is not None and "used" in found.get("status", {})

    wait_until(counted)
    assert quota["kind"] == RESOURCE_QUOTA.kind
    kube.create(pod(namespace, "one"))
    kube.create(secret(namespace, "one"))
    with pytest.raises(QuotaExceeded, match="exceeded quota: q"):
        kube.create(pod(namespace, "two"))
    with pytest.raises(QuotaExceeded, match="exceeded quota: q"):
        kube.apply(secret(namespace, "two"), manager="m")


def test_what_the_server_refuses_is_refused_in_its_words(kube: Kube, namespace: str) -> None:
    with pytest.raises(Refused, match=r"spec.containers.*Required value") as caught:
        kube.create(pod(namespace, "one", containers=[]))
    assert type(caught.value) is Refused
    with pytest.raises(Refused, match="unknown field"):
        kube.create(pod(namespace, "one", hostPath="x"))
    bad = {**secret(namespace, "one"), "stringData": {"not a key": "s3cr3t"}}
    with pytest.raises(Refused, match="data") as caught:
        kube.create(bad)
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(Refused) as caught:
        kube.create({**secret(namespace, "one"), "data": {"key": "s3cr3t, no base64"}})
    assert "s3cr3t" not in str(caught.value)
    assert kube.list(SECRET, namespace=namespace).items == ()


def test_what_a_policy_refuses_is_no_matter_of_rights(kube: Kube, namespace: str) -> None:
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    kube.patch(Ref(kind=NAMESPACE, name=namespace), label)
    with pytest.raises(Refused, match="violates PodSecurity"):
        kube.create(pod(namespace, "one"))


def test_a_wrong_token_and_missing_rights_are_said_as_such(
    cluster: TestCluster, kube: Kube, connect: Callable[..., Kube], namespace: str
) -> None:
    account = Kind(api_version="v1", kind="ServiceAccount", plural="serviceaccounts")
    kube.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "limited", "namespace": namespace}},
        kind=account,
    )
    path = f"{account.path(namespace)}/limited/token"
    token = cluster.api.call(
        "POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    )
    with connect(token="wrong") as stranger, pytest.raises(AuthFailed, match="Unauthorized"):
        stranger.get(Ref(kind=SECRET, namespace=namespace, name="one"))
    for user in ({"token": token["status"]["token"]}, {"token": cluster.token, "as": "jane"}):
        with connect(**user) as limited:
            for ask in denied(limited, namespace):
                with pytest.raises(AuthFailed, match="cannot"):
                    ask()


def denied(kube: Kube, namespace: str) -> list[Callable[[], object]]:
    one = Ref(kind=SECRET, namespace=namespace, name="one")
    return [
        lambda: kube.list(POD, namespace=namespace),
        lambda: kube.get(one),
        lambda: kube.apply(secret(namespace, "one"), manager="m"),
        lambda: kube.create(pod(namespace, "one")),
        lambda: kube.delete(one),
        lambda: list(kube.watch(POD, resource_version="", silence_seconds=5.0, stop=threading.Event())),
        lambda: list(kube.logs(namespace, "one")),
    ]


def test_a_server_that_cannot_be_verified_is_not_spoken_to(cluster: TestCluster, connect: Callable[..., Kube]) -> None:
    with connect({"server": cluster.server}) as unsure, pytest.raises(Transient, match="CERTIFICATE_VERIFY_FAILED"):
        unsure.cluster_uid()
    named = {"server": cluster.server, "certificate-authority": str(cluster.ca_file), "tls-server-name": "kubernetes"}
    with connect({**named, "tls-server-name": "elsewhere"}) as unsure, pytest.raises(Transient, match="CERTIFICATE"):
        unsure.cluster_uid()


def test_a_cluster_is_told_by_its_uid(kube: Kube) -> None:
    found = kube.get(Ref(kind=NAMESPACE, name="kube-system"))
    assert found is not None
    assert kube.cluster_uid() == uid_of(found)


def test_a_quiet_watch_is_not_taken_for_a_dead_one(kube: Kube, namespace: str) -> None:
    listing = kube.list(SECRET, namespace=namespace)
    began = time.monotonic()
    events = list(
        kube.watch(
            SECRET,
            namespace=namespace,
            resource_version=listing.resource_version,
            silence_seconds=10.0,
            stop=threading.Event(),
        )
    )
    assert {event.what for event in events} <= {"BOOKMARK"}
    assert time.monotonic() - began > 4  # and not after 10 s of silence, which were an error


def test_the_log_of_a_pod_that_is_not_there(kube: Kube, namespace: str) -> None:
    with pytest.raises(ObjectMissing):
        list(kube.logs(namespace, "nobody"))
    kube.create(pod(namespace, "one", schedulerName="nobody"))
    with contextlib.suppress(Transient, Refused):  # no node: nothing, or a word for it, but never a hang
        assert b"".join(kube.logs(namespace, "one", follow=True)) == b""


class Following:
    """A follow in a thread of its own."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.stop = threading.Event()
        self.changes: list[Change] = []
        self._thread = threading.Thread(target=self._run, args=(kube, namespace), daemon=True)
        self._thread.start()

    def _run(self, kube: Kube, namespace: str) -> None:
        for change in kube.follow(SECRET, namespace=namespace, silence_seconds=5.0, stop=self.stop):
            self.changes.append(change)

    def told(self) -> list[tuple[type, str]]:
        return [
            (type(change), change.object["metadata"]["name"])
            for change in self.changes
            if isinstance(change, Seen | Gone)
        ]

    def lists(self) -> list[Relisted]:
        return [change for change in self.changes if isinstance(change, Relisted)]

    def has(self, kind: type) -> bool:
        return any(isinstance(change, kind) for change in self.changes)

    def close(self) -> None:
        self.stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()


def test_a_follow_survives_the_api_servers_restart(
    cluster: TestCluster, kube: Kube, namespace: str, wait_until: WaitUntil
) -> None:
    kube.create(secret(namespace, "first"))
    with contextlib.closing(Following(kube, namespace)) as following:
        wait_until(following.lists)
        kube.create(secret(namespace, "second"))
        wait_until(lambda: (Seen, "second") in following.told())
        cluster.stop_server()
        try:
            wait_until(lambda: following.has(Trouble))
            with pytest.raises(Transient):
                kube.list(SECRET, namespace=namespace)
            with pytest.raises(OrcaError):
                kube.cluster_uid()
            assert (Gone, "first") not in following.told()
        finally:
            cluster.start_server()
        assert kube.delete(Ref(kind=SECRET, namespace=namespace, name="first")) is True
        kube.create(secret(namespace, "third"))

        def learned() -> set[str]:
            vanished = {obj["metadata"]["name"] for listing in following.lists()[1:] for obj in listing.vanished}
            return vanished | {name for what, name in following.told() if what is Gone}

        def appeared() -> set[str]:
            listed = {obj["metadata"]["name"] for listing in following.lists()[1:] for obj in listing.items}
            return listed | {name for what, name in following.told() if what is Seen}

        wait_until(lambda: "first" in learned() and "third" in appeared(), 30)
        assert learned() == {"first"}
        wait_until(lambda: following.has(Heard), 10)  # it is quiet now, and known to be
    with pytest.raises(Expired):  # a server that has just started knows nothing of what was before
        list(kube.watch(SECRET, resource_version="1", silence_seconds=5.0, stop=threading.Event()))


def test_the_doctor_says_which_cluster_is_used_and_what_it_lacks(
    cluster: TestCluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {
        "ORCA_STACK": "test",
        "ORCA_HOME": str(tmp_path),
        "ORCA_RUNNER": "kubernetes",
        "ORCA_RUNS_NAMESPACE": namespace,
        "ORCA_RUNTIMES_NAMESPACE": f"{namespace}-of-none",
        "KUBECONFIG": str(cluster.kubeconfig),
    }

    def found() -> list[tuple[str, str, str]]:
        about = [one for one in examine(environ) if one.what in {"cluster", "namespace"}]
        return [(one.what, one.found, one.remedy) for one in about]

    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        version = kube.version()
    assert version.startswith("v1.")
    namespaces = [
        ("namespace", namespace, ""),
        ("namespace", f"{namespace}-of-none is not there", "`pulumi up --refresh -s test` makes it"),
    ]
    assert found() == [("cluster", f"{version} at {cluster.server}", ""), *namespaces]
    monkeypatch.setattr(Kube, "version", lambda _: "v1.28.9-gke.1")
    assert found()[0] == ("cluster", f"v1.28.9-gke.1 at {cluster.server}", "Kubernetes 1.29 or newer is needed")
    environ["KUBECONFIG"] = str(tmp_path / "missing")
    [(_, said, remedy)] = found()
    assert "missing does not exist" in said
    assert "set KUBECONFIG" in remedy
