"""What a runtime is given when it is assigned: the user's Secrets, merged. Values are nowhere but here and in Kubernetes."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping

from orca_infra.errors import Refused
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import SECRET
from orca_infra.runtimes.render import USER_LABEL, user_label

#: All values of one Secret together (kubernetes, pkg/apis/core: MaxSecretSize).
SECRET_BYTES = 1 << 20
# k8s.io/apimachinery, util/validation: IsConfigMapKey
_KEY = re.compile(r"(?!\.\.?\Z)(?!\.\.)[-._a-zA-Z0-9]{1,253}", re.ASCII)


def gather_secrets(kube: Kube, namespace: str, user: str, sent: Mapping[str, str]) -> dict[str, str]:
    """The data of the runtime's Secret, base64: the user's Secrets in name order, then what was sent; the later wins.

    Raises:
        Refused: a key that cannot be one, or too much of it; nothing was claimed yet. And what reading the cluster raises.

    """
    for key in sent:
        if not _KEY.fullmatch(key):
            raise Refused(f"a secret cannot be called {key!r}: letters, digits, '-', '_' and '.', at most 253 of them")
    # The API server that cannot keep its cache fresh could not make the runtime's Secret either.
    found = kube.list(SECRET, namespace=namespace, labels={USER_LABEL: user_label(user)}, from_cache=True).items
    data: dict[str, str] = {}
    for item in sorted(found, key=lambda item: str(item["metadata"]["name"])):
        data.update(item.get("data") or {})
    data.update({key: base64.b64encode(value.encode()).decode() for key, value in sent.items()})
    size = sum(_bytes_of(value) for value in data.values())
    if size > SECRET_BYTES:
        raise Refused(f"the secrets of {user!r} have {size} bytes together, more than the {SECRET_BYTES} of one Secret")
    return data


def _bytes_of(value: str) -> int:
    try:
        return len(base64.b64decode(value))
    except binascii.Error:
        return len(value)
