"""The few requests that starting a test cluster needs, and tests that ask the API server about what they did."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from orca_infra.errors import Transient

_TIMEOUT_SECONDS = 30.0


class ApiError(Exception):
    """The API server refused a request; `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Api:
    """Requests with the admin's token, past any proxy."""

    def __init__(self, server: str, token: str, ca_file: Path) -> None:
        self._server = server
        self._token = token
        context = ssl.create_default_context(cafile=str(ca_file))
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def text(self, method: str, path: str, body: object = None) -> str:
        """The answer as it came; a body of bytes is sent as it is.

        Raises:
            ApiError: the server refused it.
            Transient: the server cannot be reached.

        """
        request = urllib.request.Request(  # noqa: S310, the server is ours
            urljoin(self._server, path),
            method=method,
            data=body if body is None or isinstance(body, bytes) else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": _content_type(method)},
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, error.read().decode(errors="replace")) from error
        except (OSError, http.client.HTTPException) as error:
            raise Transient(f"the API server {self._server} cannot be reached ({error})") from error

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The answer's object. PATCH is a merge patch. Raises as `text` does."""
        answer: dict[str, Any] = json.loads(self.text(method, path, body))
        return answer


def _content_type(method: str) -> str:
    return "application/merge-patch+json" if method == "PATCH" else "application/json"
