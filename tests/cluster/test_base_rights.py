"""What the loop and the API may do: enough for all that they do, and each right, taken away, makes something fail."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orca_infra.config import parse_config
from orca_infra.errors import AuthFailed, EngineFailed, OrcaError, Transient
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import (
    CRD,
    EVENT,
    JOB,
    NAMESPACE,
    NODE,
    POD,
    RUNTIME_ENVIRONMENT,
    RUNTIME_POOL,
    SECRET,
    SERVICE,
    Kind,
    Ref,
)
from orca_infra.kube.labels import JOB_UID_PLACEHOLDER
from orca_infra.kube.watching import Trouble
from orca_infra.log import make_log
from orca_infra.loop.scopes import Scopes
from orca_infra.runs.model import RunSpec, Sizes
from orca_infra.runs.render import RunSettings, render
from orca_infra.runtimes.callers import ReviewedTokens
from orca_infra.runtimes.crds import runtime_pool_crd
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.living import end_runtime
from orca_infra.settings import read_settings
from orca_infra.stack.base_model import API, LOOP, Base, Deployed
from orca_infra.stack.base_rights import CLUSTER, RIGHTS, RUNS, RUNTIMES, rights_objects
from orca_infra.stack.cohorts import OpenObject, cohort_program
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.surroundings import open_surroundings
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_files import kubeconfig
from orca_infra.testing.definitions import define_runtimes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

STACK_ID = "astackofrights23"
KEY = "a key of the tests, 32 bytes long"
SIZES = Sizes(
    driver_cpu="100m",
    head_cpu="100m",
    worker_cpu="100m",
    driver_millis=100,
    head_millis=100,
    worker_millis=100,
    memory="64Mi",
)
DENIED = (AuthFailed, EngineFailed)
ROLES = "/apis/rbac.authorization.k8s.io/v1"


@dataclass
class Accounts:
    """The rights of a base in a cluster, and somebody in each of its accounts."""

    cluster: TestCluster
    base: Base
    admin: Kube
    folder: Path
    wait_until: Callable[..., None]
    kubeconfigs: dict[str, Path] = field(default_factory=dict)
    kubes: dict[str, Kube] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def path(self, account: str, place: str) -> str:
        """Of the role of an account in a place."""
        if place == CLUSTER:
            return f"{ROLES}/clusterroles/{account}-{STACK_ID}"
        return f"{ROLES}/namespaces/{self.namespace(place)}/roles/{account}"

    def namespace(self, place: str) -> str:
        named = {RUNS: self.base.runs_namespace, RUNTIMES: self.base.runtimes_namespace}.get(place)
        return named or ""

    def take_away(self, right: Any, verb: str) -> Callable[[], None]:
        """Take one verb of one right away; gives what brings it back."""
        path = self.path(right.account, right.place)
        rules = self.cluster.api.call("GET", path)["rules"]
        less = [
            {**rule, "verbs": [v for v in rule["verbs"] if v != verb]}
            if rule["resources"] == [right.resource]
            else rule
            for rule in rules
        ]
        less = [rule for rule in less if rule["verbs"]]
        assert less != rules
        self.cluster.api.call("PATCH", path, {"rules": less})
        self.wait_until(lambda: not self.may(right, verb), 20, "the right is gone")

        def back() -> None:
            self.cluster.api.call("PATCH", path, {"rules": rules})
            self.wait_until(lambda: self.may(right, verb), 20, "the right is back")

        return back

    def may(self, right: Any, verb: str) -> bool:
        """As the API server has it now."""
        resource, _, part = right.resource.partition("/")
        attributes = {
            "verb": verb,
            "group": right.group,
            "resource": resource,
            "subresource": part,
            "namespace": self.namespace(right.place),
            "name": "kube-system" if right.names else "",
        }
        user = f"system:serviceaccount:{self.base.system_namespace}:{right.account}"
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": attributes},
        }
        answer = self.cluster.api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def name(self) -> str:
        return f"probe-{next(self.numbers)}"

    def make(self, kind: Kind, namespace: str | None, **more: Any) -> dict[str, Any]:
        """An object of the admin's, to be acted on."""
        metadata = {"name": self.name(), **({"namespace": namespace} if namespace else {})}
        manifest = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **more}
        return {**manifest, **self.admin.create(manifest, kind=kind)}

    def engine_up(self, place: str, kind: str) -> None:
        """A cohort with one object of this kind, made by the real engine and provider as the loop."""
        number = next(self.numbers)
        spec = RunSpec(run=number, start=1, pipeline="p", image="registry.example/p:1", workers=1)
        settings = RunSettings(
            namespace=self.namespace(place),
            binary="orca",
            secret="orca-db",
            dista_port=6390,
            deadline_seconds=600,
            sizes=SIZES,
        )
        rendered = next(o for o in render(spec, settings, STACK_ID) if o["kind"] == kind)
        text = json.dumps(rendered).replace(JOB_UID_PLACEHOLDER, "")
        manifest = json.loads(text)
        manifest["metadata"].pop("ownerReferences", None)
        item = OpenObject(
            namespace=self.namespace(place),
            kind=kind,
            name=manifest["metadata"]["name"],
            rendered=manifest,
            run=None,
            start=None,
            pod=None,
            job_uid=None,
        )
        stack = f"test.runs.{number}"
        try:
            self.engine.up_new(stack, cohort_program([item], STACK_ID), deadline_seconds=120, on_start=lambda _: None)
        finally:
            self.engine.drop(stack)

    @property
    def engine(self) -> Engine:
        (self.folder / "passphrase").write_text("a passphrase of the tests")
        (self.folder / "state").mkdir(exist_ok=True)
        config = EngineConfig(
            backend_url=(self.folder / "state").as_uri(),
            passphrase_file=self.folder / "passphrase",
            folder=self.folder / "engine",
        )
        return Engine(config, {"KUBECONFIG": str(self.kubeconfigs[LOOP])})


@pytest.fixture(scope="module")
def accounts(
    cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory, wait_until: Callable[..., None]
) -> Iterator[Accounts]:
    folder = tmp_path_factory.mktemp("rights")
    base = Base(
        stack_id=STACK_ID,
        family="test",
        runs_namespace="rights-runs",
        runtimes_namespace="rights-runtimes",
        system_namespace="rights-system",
        deployed=Deployed(image="registry.example/orca-infra:1", loop_replicas=1, api_replicas=1),
    )
    with Kube.connect(kubeconfig=cluster.kubeconfig) as admin:
        one = Accounts(cluster, base, admin, folder, wait_until)
        define_runtimes(admin)
        for name in base.namespaces:
            admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": base.metadata(name)})
        for item in rights_objects(base):
            kind = item.manifest["kind"]
            plural = f"{kind.lower()}s"
            namespace = item.manifest["metadata"].get("namespace")
            root = ROLES if "Role" in kind else "/api/v1"
            cluster.api.call("POST", f"{root}/{f'namespaces/{namespace}/' if namespace else ''}{plural}", item.manifest)
        for account in (LOOP, API):
            path = f"/api/v1/namespaces/{base.system_namespace}/serviceaccounts/{account}/token"
            spec = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            token = cluster.api.call("POST", path, spec)["status"]["token"]
            one.kubeconfigs[account] = folder / f"{account}.kubeconfig"
            one.kubeconfigs[account].write_text(kubeconfig(cluster.server, token, cluster.ca_file.read_text()))
            one.kubes[account] = Kube.connect(kubeconfig=one.kubeconfigs[account])
        right = next(r for r in RIGHTS if r.resource == "runtime-pools")
        wait_until(lambda: one.may(right, "list"), 20)
        wait_until(lambda: _is_served(admin, base.runtimes_namespace or ""), 20)
        yield one
        for kube in one.kubes.values():
            kube.close()
        for name in base.namespaces:
            admin.delete(Ref(kind=NAMESPACE, name=name))
        for account in (LOOP, API):
            for plural in ("clusterroles", "clusterrolebindings"):
                cluster.api.call("DELETE", f"{ROLES}/{plural}/{account}-{STACK_ID}")


def _is_served(admin: Kube, namespace: str) -> bool:
    try:
        admin.list(RUNTIME_POOL, namespace=namespace)
    except OrcaError:
        return False
    return admin.get(Ref(kind=CRD, name=runtime_pool_crd()["metadata"]["name"])) is not None


Probe = Callable[[Accounts], object]
_POD_SPEC = {"containers": [{"name": "c", "image": "registry.example/c:1"}]}
_JOB_SPEC = {"template": {"spec": {"restartPolicy": "Never", **_POD_SPEC}}}
_SERVICE_SPEC = {"clusterIP": "None", "ports": [{"port": 80}]}
_SPECS: dict[str, dict[str, Any]] = {
    "pods": {"spec": _POD_SPEC},
    "jobs": {"spec": _JOB_SPEC},
    "services": {"spec": _SERVICE_SPEC},
    "secrets": {"data": {}},
    "runtime-pools": {"spec": {"environment": "e", "size": 0}},
    "runtime-environments": {"spec": {"dockerImage": "registry.example/r:1", "title": "R", "language": "python"}},
}
_KINDS = {
    kind.plural: kind for kind in (POD, JOB, SERVICE, SECRET, RUNTIME_POOL, RUNTIME_ENVIRONMENT, NODE, NAMESPACE, EVENT)
}


def probe_of(right: Any, verb: str) -> Probe:
    """What the product does with this verb, done as the account."""
    resource, _, part = right.resource.partition("/")
    kind = _KINDS.get(resource)

    def kube(a: Accounts) -> Kube:
        return a.kubes[right.account]

    def ref(a: Accounts) -> tuple[Ref, str]:
        made = a.make(kind, a.namespace(right.place) or None, **_SPECS[resource])  # type: ignore[arg-type]
        metadata = made["metadata"]
        return Ref(kind=kind, namespace=metadata.get("namespace"), name=metadata["name"]), metadata["uid"]  # type: ignore[arg-type]

    by_engine = right.account == LOOP and verb in {"create", "patch"} and resource in {"jobs", "pods", "services"}
    if by_engine and not part:
        return lambda a: a.engine_up(right.place, {"jobs": "Job", "pods": "Pod", "services": "Service"}[resource])
    if resource == "tokenreviews":
        return lambda a: _review(kube(a))
    assert kind is not None
    if part == "log":
        return lambda a: _read_log(kube(a), ref(a)[0])
    if part == "status" or (resource == "runtime-pools" and verb == "get"):
        return lambda a: _write_status(kube(a), *ref(a))
    if verb == "list":
        return lambda a: kube(a).list(kind, namespace=a.namespace(right.place) or None)
    if verb == "watch":
        return lambda a: _watch(kube(a), kind, a.namespace(right.place))
    if verb == "get" and right.names:
        return lambda a: kube(a).cluster_uid()
    if verb == "get":
        return lambda a: kube(a).get(ref(a)[0])
    if verb == "delete":
        return lambda a: kube(a).delete(ref(a)[0])
    if verb == "patch":
        return lambda a: _patch(kube(a), *ref(a))
    if resource == "events":
        return lambda a: kube(a).create(_event(a), kind=EVENT)
    assert verb == "create"
    return lambda a: kube(a).create(
        {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": a.name(), "namespace": a.namespace(right.place)},
            **_SPECS[resource],
        }
    )


def _patch(kube: Kube, ref: Ref, uid: str) -> None:
    kube.patch(ref, {"metadata": {"annotations": {"touched": "yes"}}}, uid=uid)


def _write_status(kube: Kube, ref: Ref, uid: str) -> None:
    kube.patch(ref, {"status": {"warm": 0}}, uid=uid, subresource="status")


def _watch(kube: Kube, kind: Kind, namespace: str) -> None:
    """Follow until what is there was heard and a second has passed without trouble; raises the trouble."""
    stop = threading.Event()
    threading.Timer(1.5, stop.set).start()
    for change in kube.follow(kind, namespace=namespace, silence_seconds=30, stop=stop):
        if isinstance(change, Trouble):
            stop.set()
            raise change.error


def _read_log(kube: Kube, ref: Ref) -> None:
    """The node is none that has logs: what is asked is whether the API server lets it be read."""
    try:
        list(kube.logs(str(ref.namespace), ref.name))
    except AuthFailed:
        raise
    except OrcaError:
        pass


def _review(kube: Kube) -> None:
    try:
        ReviewedTokens(kube, ()).find("a token of nobody")
    except Transient as error:
        assert "AuthFailed" in str(error)
        raise AuthFailed(str(error)) from error


def _event(a: Accounts) -> dict[str, Any]:
    name = a.name()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": a.namespace(RUNTIMES)},
        "involvedObject": {"kind": "RuntimePool", "name": name, "namespace": a.namespace(RUNTIMES)},
        "reason": "Test",
        "message": "a test",
        "type": "Normal",
    }


ALL = [(right, verb) for right in RIGHTS for verb in right.verbs]


@pytest.mark.parametrize(("right", "verb"), ALL, ids=[f"{r.account}-{r.place}-{r.resource}-{v}" for r, v in ALL])
def test_without_a_right_what_it_is_for_fails_and_with_it_that_works(accounts: Accounts, right: Any, verb: str) -> None:
    probe = probe_of(right, verb)
    probe(accounts)
    back = accounts.take_away(right, verb)
    try:
        with pytest.raises(DENIED) as denied:
            probe(accounts)
        said = str(denied.value).lower()
        assert "forbidden" in said or "may not" in said or "authfailed" in said, said
    finally:
        back()


def test_the_rights_are_enough_for_all_that_loop_and_api_do(
    accounts: Accounts, database_url: str, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "passphrase").write_text("a passphrase of the tests")
    (tmp_path / "state").mkdir()
    base = accounts.base
    environment = {
        "ORCA_STACK": "test",
        "ORCA_DB": database_url,
        "ORCA_HOME": str(tmp_path / "home"),
        "ORCA_TOKEN_KEY": KEY,
        "PULUMI_BACKEND_URL": (tmp_path / "state").as_uri(),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(tmp_path / "passphrase"),
        "ORCA_RUNNER": "kubernetes",
        "ORCA_RUNS_NAMESPACE": base.runs_namespace or "",
        "ORCA_RUNTIMES_NAMESPACE": base.runtimes_namespace or "",
        "ORCA_STRAY_GRACE_SECONDS": "0.5",
        "KUBECONFIG": str(accounts.kubeconfigs[LOOP]),
    }
    surroundings = open_surroundings(read_settings(environment), say=lambda _: None)
    database = surroundings.database
    for name in base.namespaces:
        accounts.admin.patch(
            Ref(kind=NAMESPACE, name=name), {"metadata": {"labels": {"orca.stack": surroundings.stack_id}}}
        )
    said = (tmp_path / "log").open("w+")
    scopes = Scopes(
        surroundings, lambda: parse_config("[pools]\n", "orca.toml"), lambda: None, make_log(said, form="json")
    )

    def rows(query: Any) -> list[dict[str, Any]]:
        with database.snapshot() as transaction:
            return transaction.dicts(query)

    def passes_until(predicate: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not predicate():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            scopes.run_once()

    metadata = {"name": "python", "namespace": base.runtimes_namespace}
    accounts.admin.create(
        {
            "apiVersion": "datalayer.io/v1",
            "kind": "RuntimeEnvironment",
            "metadata": metadata,
            **_SPECS["runtime-environments"],
        }
    )
    accounts.admin.create(
        {
            "apiVersion": "datalayer.io/v1",
            "kind": "RuntimePool",
            "metadata": metadata,
            "spec": {
                "environment": "python",
                "size": 1,
                "burningRate": 0.1,
                "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
            },
        }
    )
    with database.transaction() as transaction:
        transaction.run("insert into orca.pipelines (name, image, workers) values ('p', 'registry.example/p:1', 1)")
        transaction.run("insert into orca.runs (pipeline) values ('p')")
    passes_until(lambda: rows("select from orca.runtime_pods where ready_at is not null"))
    passes_until(lambda: rows("select from orca.run_clusters"))
    api = LaunchHands(
        database=database,
        kube=accounts.kubes[API],
        namespace=base.runtimes_namespace or "",
        stack_id=surroundings.stack_id,
        log=make_log(said, form="json"),
    )
    warm = launch(api, LaunchRequest(environment="python", user="jane", secrets={"A": "1"}))
    cold = launch(api, LaunchRequest(environment="python", user="jane", requests={"cpu": "2"}, secrets={"A": "1"}))
    assert (warm.warm, cold.warm) == (True, False)
    passes_until(
        lambda: len(rows("select from orca.runtime_pods where ready_at is not null and ended_at is null")) == 3
    )
    for one in (warm, cold):
        assert end_runtime(api, one.id)
    with database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'driver', true)")
        transaction.run("update orca.runs set state = 'succeeded', ended_at = now()")
    passes_until(lambda: rows("select from orca.run_clusters where ended_at is not null"))
    passes_until(lambda: len(rows("select from orca.runtime_pods where ended_at is not null")) == 2)
    said.flush()
    words = (tmp_path / "log").read_text()
    assert "forbidden" not in words.lower(), words
    assert "AuthFailed" not in words, words
    surroundings.close()
