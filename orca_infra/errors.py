"""What can go wrong, by meaning.

OrcaError                    the base; a message says what, which object and the next step, and never a secret
├── UserError                exit code 2: something the person who called has to mend
│   ├── ConfigError          orca.toml: names file, line, table and key
│   ├── SettingError         an environment variable: names it
│   └── SetupError           a tool, a database, a passphrase that is missing or does not fit
├── NoCapacity               a provider has none of this type in this location now; go on to the next
├── QuotaExceeded            a limit of the account; more locations do not help
├── Refused                  the request itself is wrong; the same request never succeeds
├── AuthFailed               credentials or rights are missing
├── Transient                a fault that may pass; try again later
├── Conflict                 something else holds the name, the lock or the row
│   └── StackLocked          another engine operation holds the stack's lock
│       └── StateBroken      the engine refuses the stack's state until somebody mended it
├── EngineFailed             an engine operation ended with an error, and says which resources failed
├── OutcomeUnknown           an engine operation ended without saying what it came to
└── NotLeader                another loop leads, or this one no longer does
"""

from __future__ import annotations

from datetime import datetime


class OrcaError(Exception):
    """The base of every error that this package raises on purpose."""


class UserError(OrcaError):
    """The caller has to mend something; commands end with exit code 2 and print the message alone."""


class ConfigError(UserError):
    """orca.toml cannot be used. The message begins with `file:line:` where the line is known."""


class SettingError(UserError):
    """An environment variable cannot be used; the message names it."""


class SetupError(UserError):
    """The surroundings are not complete (tool, database, passphrase); the message names the next step."""


class NoCapacity(OrcaError):
    """The provider has none of this type in this location now; the caller goes on to the next location."""


class QuotaExceeded(OrcaError):
    """A limit of the account is reached; the caller reports it and tries again at the next interval."""


class Refused(OrcaError):
    """The request itself is wrong; the caller reports it, since the same request never succeeds."""


class AuthFailed(OrcaError):
    """Credentials or rights are missing; the caller reports it."""


class Transient(OrcaError):
    """A fault that may pass; the caller tries again later."""


class Conflict(OrcaError):
    """Something else holds the name, the lock or the row; the caller observes anew."""


class StackLocked(Conflict):
    """Another engine operation holds the stack's lock.

    Attributes:
        locks: each holder as the engine's message names it.

    """

    def __init__(self, message: str, locks: tuple[StackLock, ...] = ()) -> None:
        super().__init__(message)
        self.locks = locks


class StateBroken(StackLocked):
    """The engine refuses a stack's state: like a lock, but until somebody mended it. Nothing was begun."""


class StackLock:
    """One lock of a stack: its key or file in the state backend, and who holds it."""

    __slots__ = ("host", "key", "pid", "taken_at")

    def __init__(self, *, key: str, host: str, pid: int, taken_at: datetime | None = None) -> None:
        self.key = key
        self.host = host
        self.pid = pid
        self.taken_at = taken_at


class OutcomeUnknown(OrcaError):
    """An engine operation was cut short; the caller reads the state before it believes anything."""


class NotLeader(OrcaError):
    """Another loop leads this stack family, or this one lost the lead; the caller stops writing."""


class EngineFailed(OrcaError):
    """An engine operation ended with an error of its program or of its resources, and says so itself.

    Attributes:
        failures: what went wrong with which resource, in the provider's words; empty when the program itself failed.
        changes: what was done all the same, as orca_infra.stack.outcome.ResourceChange.

    """

    def __init__(
        self, message: str, failures: tuple[ResourceFailure, ...] = (), changes: tuple[object, ...] = ()
    ) -> None:
        super().__init__(message)
        self.failures = failures
        self.changes = changes


class ResourceFailure:
    """One resource that an operation could not make, change or delete."""

    __slots__ = ("message", "urn")

    def __init__(self, *, urn: str, message: str) -> None:
        self.urn = urn
        self.message = message
