"""Our port to the Kubernetes API: plain JSON objects in and out, and errors by their meaning.

Quick to import: the HTTP client (0.2 s) is loaded by the first `connect`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orca_infra.errors import Conflict, Transient
from orca_infra.kube import options, reading, watching
from orca_infra.kube.answers import Call
from orca_infra.kube.deadlines import Deadlines
from orca_infra.kube.errors import ObjectMissing
from orca_infra.kube.kinds import EVENT, NAMESPACE, POD, Kind, Object, Ref, ref_of
from orca_infra.kube.reading import Listing, Selection

if TYPE_CHECKING:
    from orca_infra.kube.transport import Transport

_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"  # JSON is YAML


_VERSION = Kind(api_version="v1", kind="version", plural="version", namespaced=False)


class Kube:
    """One cluster's API server. Any number of threads may share it.

    Every method raises an OrcaError by its meaning: AuthFailed (401, or an RBAC denial), QuotaExceeded, NamespaceMissing,
    KindMissing, Refused (anything else that the same request would get again), Conflict, ObjectMissing, Busy (with
    retry_after_seconds), Expired, and Transient for all that may pass. Reads are tried a few times within their deadline;
    writes never are, and a Transient from a write does not say whether it was carried out.

    Attributes:
        server: the API server's URL, for people and logs.

    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.server = transport.server

    @classmethod
    def connect(
        cls, *, kubeconfig: Path | None = None, context: str | None = None, deadlines: Deadlines | None = None
    ) -> Kube:
        """The cluster that a kubeconfig names. Nothing is sent yet.

        Args:
            kubeconfig: the file; None: KUBECONFIG, then the Pod's own account, then ~/.kube/config.
            context: of the kubeconfig; None: its current one.
            deadlines: of each request; None: 5 s to connect, 15 s to answer, 60 s for the whole answer.

        Raises:
            SetupError: there is none, or it cannot be used.

        """
        from orca_infra.kube import credentials, transport  # 0.2 s, for those who do contact a cluster

        login = credentials.find_login(kubeconfig, context)
        return cls(transport.Transport(login, deadlines or Deadlines()))

    def get(self, ref: Ref) -> Object | None:
        """The object; None only when the API server says that this very object is not there."""
        call = Call(verb="get", kind=ref.kind, namespace=ref.namespace, name=ref.name)
        try:
            return reading.read(self._transport, call, ref.path)
        except ObjectMissing:
            return None

    def list(
        self,
        kind: Kind,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        label_exists: Collection[str] = (),
        page: int = 500,
        from_cache: bool = False,
        metadata_only: bool = False,
    ) -> Listing:
        """All objects of a kind, as they were at one moment; never a part of them.

        A list whose continuation expires is begun anew, the last time in one piece. A namespace that is not there has an
        empty list: that is the API server's answer.

        Args:
            kind: of what.
            namespace: where; None: everywhere.
            labels: what the objects' labels are.
            label_exists: which labels they have, whatever the value.
            page: how many the API server sends at once.
            from_cache: as the API server's own cache has it at once, which lags behind its store by milliseconds. Otherwise
                it waits until its cache has come to the present: up to 0.1 s while others write (measured with 1.36).
            metadata_only: the objects have nothing but their metadata.

        """
        selection = Selection(
            kind=kind, namespace=namespace, labels=labels, label_exists=label_exists, metadata_only=metadata_only
        )
        return reading.read_list(self._transport, selection, page=page, from_cache=from_cache)

    def events(self, namespace: str, uid: str) -> tuple[Object, ...]:
        """What has been said of the object of this uid lately, in no order."""
        call = Call(verb="list", kind=EVENT, namespace=namespace)
        params = {"fieldSelector": f"involvedObject.uid={uid}"}
        return tuple(reading.read(self._transport, call, EVENT.path(namespace), params=params).get("items") or ())

    def create(self, obj: Object, *, kind: Kind | None = None) -> Object:
        """Makes an object. `kind` where it is none that kinds.py names.

        Raises:
            Conflict: another object has the name.

        """
        ref = ref_of(obj, kind)
        call = Call(verb="create", kind=ref.kind, namespace=ref.namespace, name=ref.name)
        params = {"fieldValidation": "Strict"}
        return self._write(call, "POST", ref.kind.path(ref.namespace), params=params, body=obj)

    def apply(self, obj: Object, *, manager: str, force: bool = False, kind: Kind | None = None) -> Object:
        """Makes an object, or adopts the one that has its name: a server-side apply.

        Args:
            obj: the fields that this manager wants; those that it had and no longer wants are removed.
            manager: whose fields they are.
            force: takes fields from other managers.
            kind: where it is none that kinds.py names.

        Raises:
            Conflict: another manager has one of the fields at another value, or the uid stated is another.

        """
        ref = ref_of(obj, kind)
        call = Call(verb="apply", kind=ref.kind, namespace=ref.namespace, name=ref.name)
        params = {"fieldManager": manager, "force": "true" if force else "false", "fieldValidation": "Strict"}
        return self._write(call, "PATCH", ref.path, params=params, body=obj, content_type=_APPLY)

    def patch(
        self,
        ref: Ref,
        patch: Mapping[str, Any],
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Object:
        """Changes an object by a JSON merge patch (RFC 7386: null removes).

        Args:
            ref: the object.
            patch: the changes.
            uid: the object has to be this very one.
            resource_version: it must not have been changed since.
            subresource: `status`, for one. With a uid the object is read first: of a custom resource's status the API
                server passes over the uid (tried with 1.36), so its version has to hold that.

        Raises:
            Conflict: it is another one, or was changed; ObjectMissing: there is none.

        """
        if subresource is not None and uid is not None and resource_version is None:
            resource_version = self._version(ref, uid)
        body = options.with_conditions(patch, uid=uid, resourceVersion=resource_version)
        call = Call(verb="patch", kind=ref.kind, namespace=ref.namespace, name=ref.name)
        path = f"{ref.path}/{subresource}" if subresource else ref.path
        return self._write(call, "PATCH", path, body=body, content_type=_MERGE)

    def delete(
        self,
        ref: Ref,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: str = "Background",
        grace_seconds: int | None = None,
    ) -> bool:
        """Has an object deleted; it may stay for a while, going away. False: it was gone, or another has its name.

        Args:
            ref: the object.
            uid: only this very one.
            resource_version: only as it was at this version; another uid is a Conflict then, too.
            propagation: what becomes of the objects that it owns: Background, Foreground or Orphan.
            grace_seconds: how long a Pod gets to end; None: as its spec says.

        Raises:
            Conflict: this very object is there and cannot be deleted now, or was changed.

        """
        body = options.delete_options(
            propagation=propagation, grace_seconds=grace_seconds, uid=uid, resourceVersion=resource_version
        )
        call = Call(verb="delete", kind=ref.kind, namespace=ref.namespace, name=ref.name)
        try:
            self._transport.request(call, "DELETE", ref.path, body=body)
        except ObjectMissing:
            return False
        except Conflict:  # another uid, or something else; what is there now says which
            if resource_version is not None:
                raise
            found = self.get(ref) if uid is not None else {}
            if found is not None and (uid is None or found["metadata"].get("uid") == uid):
                raise
            return False
        return True

    def watch(
        self,
        kind: Kind,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        label_exists: Collection[str] = (),
        resource_version: str,
        silence_seconds: float,
        stop: threading.Event,
    ) -> Iterator[watching.Event]:
        """What happens after `resource_version`, for as long as one connection lives.

        Ends quietly when the API server closes it or `stop` is set. The API server is asked to close it soon enough that a
        healthy connection is never silent for `silence_seconds`.

        Raises:
            Expired: the version is too old; list anew. Silent: nothing was heard for so long.

        """
        selection = Selection(kind=kind, namespace=namespace, labels=labels, label_exists=label_exists)
        return watching.watch(
            self._transport, selection, version=resource_version, silence_seconds=silence_seconds, stop=stop
        )

    def follow(
        self,
        kind: Kind,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        label_exists: Collection[str] = (),
        silence_seconds: float,
        stop: threading.Event,
    ) -> Iterator[watching.Change]:
        """What is there and all that happens to it, until `stop` is set; no fault ends it (watching.follow)."""
        selection = Selection(kind=kind, namespace=namespace, labels=labels, label_exists=label_exists)
        return watching.follow(self._transport, selection, silence_seconds=silence_seconds, stop=stop)

    def logs(
        self,
        namespace: str,
        pod: str,
        *,
        container: str | None = None,
        follow: bool = False,
        previous: bool = False,
        since_time: str | None = None,
        timestamps: bool = False,
        limit_bytes: int | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[bytes]:
        """A container's log in pieces as they come, which are not lines.

        Args:
            namespace: the Pod's.
            pod: its name; which of those that had it, the log does not say.
            container: needed where there are several.
            follow: goes on until the container ends; a quiet log is no fault.
            previous: of the container's run before.
            since_time: RFC 3339; only what came then or later.
            timestamps: each line begins with its time.
            limit_bytes: how much at most.
            stop: ends it quietly.

        Raises:
            ContainerWaiting: it has not started yet. ObjectMissing: no such Pod. Transient: cut short.

        """
        ref = Ref(kind=POD, namespace=namespace, name=pod)
        params = options.log_params(
            container=container,
            follow=follow,
            previous=previous,
            sinceTime=since_time,
            timestamps=timestamps,
            limitBytes=limit_bytes,
        )
        call = Call(verb="logs", kind=POD, namespace=namespace, name=pod)
        silence = None if follow else self._transport.deadlines.read_seconds
        return self._transport.stream(call, f"{ref.path}/log", params=params, silence_seconds=silence, stop=stop)

    def cluster_uid(self) -> str:
        """What tells this cluster from every other: the uid of its kube-system namespace.

        Raises:
            Transient: there is none yet; the cluster is just being made.

        """
        found = self.get(Ref(kind=NAMESPACE, name="kube-system"))
        if found is None:
            raise Transient(f"{self.server} has no namespace kube-system yet")
        return str(found["metadata"]["uid"])

    def version(self) -> str:
        """What the API server says that it is, such as `v1.34.2`."""
        call = Call(verb="get", kind=_VERSION)
        silence = self._transport.deadlines.read_seconds
        # No object of the API: it has no kind.
        answer = b"".join(self._transport.stream(call, "/version", params={}, silence_seconds=silence, stop=None))
        found = re.search(rb'"gitVersion": *"([^"]+)"', answer)
        if found is None:
            raise Transient(f"{self.server} does not say its version")
        return found[1].decode(errors="replace")

    def close(self) -> None:
        """Ends all that is open, from any thread: watches and logs too."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _version(self, ref: Ref, uid: str) -> str:
        found = self.get(ref)
        if found is None:
            raise ObjectMissing(f"cannot patch {ref}: it is not there")
        if found["metadata"].get("uid") != uid:
            raise Conflict(f"cannot patch {ref}: another object has its name")
        return str(found["metadata"]["resourceVersion"])

    def _write(self, call: Call, method: str, path: str, **particulars: Any) -> Object:
        return reading.checked(call, self._transport.request(call, method, path, **particulars))
