"""The HTTP face described in OpenAPI 3.1, as /openapi.json serves it. Pure."""

from __future__ import annotations

from typing import Any

from orca_infra import __version__

_TIME = {"type": "string", "format": "date-time"}
_TEXT = {"type": "string"}
_ID = {"type": "string", "format": "uuid"}
_MAP = {"type": "object", "additionalProperties": _TEXT}

LAUNCH_FIELDS: dict[str, dict[str, Any]] = {
    "environment": {**_TEXT, "description": "The RuntimeEnvironment, by name."},
    "user": {**_TEXT, "description": "For whom; a token that is no launcher's can only name its own user, or nobody."},
    "resources": {
        "type": "object",
        "additionalProperties": {"type": ["string", "number"]},
        "description": 'What the Pod requests at least: {"cpu": "500m", "memory": "1Gi"}.',
    },
    "node_selector": {**_MAP, "description": "Labels of the node; left out: whatever the pool has."},
    "pool": {**_TEXT, "description": "Only from this pool."},
    "secrets": {**_MAP, "description": "Given to the runtime beside the user's own; these win. Kept nowhere else."},
    "idempotency_key": {**_TEXT, "description": "The same key of a user gives the same runtime."},
}
_LAUNCH = {
    "type": "object",
    "required": ["environment"],
    "additionalProperties": False,
    "properties": LAUNCH_FIELDS,
}
_RUNTIME: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": _ID,
        "user": _TEXT,
        "environment": _TEXT,
        "pod": _TEXT,
        "namespace": _TEXT,
        "address": {"type": ["string", "null"], "description": "Of the Pod; null until it is known."},
        "warm": {"type": "boolean", "description": "Whether it was taken from a pool; else a Pod is made for it."},
        "state": {"type": "string", "enum": ["starting", "ready", "ending", "ended"]},
        "expires_at": {**_TIME, "type": ["string", "null"], "description": "When it is culled; null: never."},
        "pool": {"type": ["string", "null"]},
        "assigned_at": _TIME,
        "ended_at": {**_TIME, "type": ["string", "null"]},
        "burning_rate": {"type": "number", "description": "Credits a second."},
        "credits": {"type": "number", "description": "What it has cost up to now."},
        "message": {**_TEXT, "description": "Why it is not ready yet, or why it ended."},
    },
}
_RUNTIME["required"] = list(_RUNTIME["properties"])  # whatever the answer
_LINE = {
    "type": "object",
    "description": "What one runtime has cost: exactly once it has ended, up to now while it runs.",
    "properties": {
        "runtime": _ID,
        "user": _TEXT,
        "environment": _TEXT,
        "pool": {"type": ["string", "null"], "description": "That its Pod waited in; null: a cold start."},
        "warm": {"type": "boolean"},
        "assigned_at": _TIME,
        "ended_at": {**_TIME, "type": ["string", "null"], "description": "When its end began; null: it runs."},
        "seconds": {"type": "number", "description": "Since it could be used."},
        "burning_rate": {"type": "number", "description": "Credits a second."},
        "credits": {"type": "number"},
        "reason": {**_TEXT, "description": "Why it ended; empty while it runs."},
    },
}
_USAGE = {
    "type": "object",
    "properties": {
        "user": _TEXT,
        "credits": {"type": "number"},
        "seconds": {"type": "number"},
        "running": {"type": "integer"},
        "runtimes": {"type": "array", "items": _LINE},
    },
}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"kind": _TEXT, "message": _TEXT}}},
}
_SAID = {
    "400": "the body or a parameter is none",
    "401": "the token is missing, or nobody's",
    "403": "the token is not for this user",
    "404": "there is no such runtime of this user",
    "413": "the body is too large",
    "422": "it can never be had so; the message says why",
    "429": "a quota of the cluster is full",
    "503": "try again; Retry-After says when",
}


def _answers(good: dict[str, dict[str, Any]], *bad: str) -> dict[str, Any]:
    errors = {
        code: {"description": _SAID[code], "content": _json({"$ref": "#/components/schemas/Error"})} for code in bad
    }
    return {**good, **errors}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _gives(schema: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": _json({"$ref": f"#/components/schemas/{schema}"})}


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


_OF_ONE = [{"name": "id", "in": "path", "required": True, "schema": _ID}]
_USER = _query("user", _TEXT, "Whose; a launcher's token may name anybody, others only their own user.")
_WAIT = _query("wait", {"type": "number", "minimum": 0, "maximum": 300}, "Seconds to wait for it to be ready.")
_KEY = {"name": "Idempotency-Key", "in": "header", "schema": _TEXT, "description": "As idempotency_key in the body."}


def _many() -> dict[str, Any]:
    listed = {
        "description": "The runtimes that live, the oldest first.",
        "content": _json(
            {
                "type": "object",
                "properties": {"runtimes": {"type": "array", "items": {"$ref": "#/components/schemas/Runtime"}}},
            }
        ),
    }
    return {
        "get": {
            "summary": "List",
            "parameters": [_USER],
            "responses": _answers({"200": listed}, "400", "401", "403", "503"),
        },
        "post": {
            "summary": "Launch",
            "parameters": [_WAIT, _KEY],
            "requestBody": {"required": True, "content": _json({"$ref": "#/components/schemas/Launch"})},
            "responses": _answers(
                {"201": _gives("Runtime", "It was launched, or is the one that the key stands for.")},
                *("400", "401", "403", "413", "422", "429", "503"),
            ),
        },
    }


def _one() -> dict[str, Any]:
    return {
        "get": {
            "summary": "Look",
            "parameters": [*_OF_ONE, _WAIT],
            "responses": _answers({"200": _gives("Runtime", "The runtime.")}, "400", "401", "404", "503"),
        },
        "delete": {
            "summary": "Stop",
            "parameters": _OF_ONE,
            "responses": _answers({"204": {"description": "It burns no credits from now on."}}, "401", "404", "503"),
        },
    }


def openapi() -> dict[str, Any]:
    """The whole document."""
    extend = {
        "summary": "Extend",
        "parameters": _OF_ONE,
        "requestBody": {
            "required": True,
            "content": _json(
                {
                    "type": "object",
                    "required": ["seconds"],
                    "additionalProperties": False,
                    "properties": {
                        "seconds": {
                            "type": "number",
                            "description": "It lives at least so long from now on; unless the token is a launcher's, at most "
                            "its pool's cull.seconds.",
                        }
                    },
                }
            ),
        },
        "responses": _answers({"200": _gives("Runtime", "The runtime.")}, "400", "401", "404", "413", "422", "503"),
    }
    usage = {
        "summary": "Credits, exact for what has ended and current for what runs",
        "parameters": [_USER],
        "responses": _answers({"200": _gives("Usage", "What a user's runtimes cost.")}, "400", "401", "403", "503"),
    }
    caller = {
        "type": "object",
        "properties": {"user": _TEXT, "launcher": {"type": "boolean"}, "secret_label": _TEXT},
    }
    me = {
        "summary": "Whose token it is, and the label that the user's Secrets carry",
        "responses": _answers({"200": {"description": "The caller.", "content": _json(caller)}}, "401", "503"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "orca-infra runtimes", "version": __version__},
        "security": [{"bearer": []}],
        "paths": {
            "/v1/runtimes": _many(),
            "/v1/runtimes/{id}": _one(),
            "/v1/runtimes/{id}/extend": {"post": extend},
            "/v1/usage": {"get": usage},
            "/v1/me": {"get": me},
        },
        "components": {
            "schemas": {"Launch": _LAUNCH, "Runtime": _RUNTIME, "Usage": _USAGE, "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
