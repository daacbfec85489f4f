"""What the engine's outputs mean, on recordings of the real one: tests/engine/record_samples.py makes them anew."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import EngineFailed, OrcaError, OutcomeUnknown, SetupError, StackLocked, StateBroken, Transient
from orca_infra.stack.command import Completed
from orca_infra.stack.outcome import NO_EVENTS, Events, ResourceChange, StackMissing, raise_for, read_events

SAMPLES = Path(__file__).parent / "samples" / "engine"
STACK = "urn:pulumi:test.machines.p::orca-infra"
MACHINE = f"{STACK}::orca:index:Machine::"


def sample(name: str) -> tuple[Completed, Events]:
    recorded: dict[str, Any] = json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    completed = Completed(code=recorded["code"], stdout=recorded["stdout"], stderr=recorded["stderr"])
    return completed, read_events(recorded["events"])


def error_of(name: str) -> OrcaError:
    with pytest.raises(OrcaError) as caught:
        raise_for(*sample(name), "up test.machines.p")
    return caught.value


@pytest.mark.parametrize("name", ["up-made", "up-same", "destroy-done", "refresh-gone"])
def test_what_ended_well_raises_nothing(name: str) -> None:
    raise_for(*sample(name), "up test.machines.p")


def test_a_made_resource_is_reported_with_its_id_and_outputs() -> None:
    _, events = sample("up-made")
    [made] = [change for change in events.changes if change.urn.startswith(MACHINE)]
    assert (made.op, made.name, made.type, made.id) == ("create", "m-1", "orca:index:Machine", "m-1")
    assert re.fullmatch(r"[0-9a-f]{32}", made.outputs["uid"])
    assert "environment" not in made.outputs


def test_an_unchanged_resource_is_reported_with_what_it_is() -> None:
    _, events = sample("up-same")
    [same] = [change for change in events.changes if change.urn.startswith(MACHINE)]
    assert (same.op, same.id) == ("same", "m-1")
    assert same.outputs["uid"]


def test_a_deleted_resource_is_reported_as_deleted() -> None:
    _, events = sample("destroy-done")
    changes = {c.name: c.op for c in events.changes if c.urn.startswith(MACHINE)}
    assert changes.pop("m-5") == "delete"
    assert set(changes.values()) <= {"same"}


def test_a_resource_that_a_refresh_did_not_find_is_reported_as_deleted() -> None:
    _, events = sample("refresh-gone")
    assert [(c.op, c.name) for c in events.changes if c.urn.startswith(MACHINE)] == [("delete", "m-1")]


def test_a_stack_that_is_not_there_is_told_apart() -> None:
    error = error_of("stack-missing")
    assert isinstance(error, StackMissing)
    assert str(error) == "up test.machines.p: no stack named 'test.machines.none' found"


@pytest.mark.parametrize("name", ["locked", "locked-postgres"])
def test_a_lock_is_told_with_its_key_its_host_and_its_process(name: str) -> None:
    error = error_of(name)
    assert isinstance(error, StackLocked)
    [lock] = error.locks
    assert (lock.host, lock.pid) == ("host-1", 4242)
    assert re.fullmatch(r"\.pulumi/locks/organization/orca-infra/test\.machines\.p/lock-uuid\.json", lock.key)


@pytest.mark.parametrize(
    "text",
    [
        "error: unexpected end of JSON input",
        "error: could not create stack: unexpected end of JSON input",
        "error: could not import deployment: invalid character '\\x00' looking for beginning of value",
    ],
)
def test_a_lock_that_is_not_whole(text: str) -> None:
    completed = Completed(code=1, stdout="", stderr=f"{text}\n")
    with pytest.raises(StackLocked, match="up s: a lock of the stack is not whole") as caught:
        raise_for(completed, NO_EVENTS, "up s")
    assert caught.value.locks == ()
    assert not isinstance(caught.value, StateBroken)
    made = ResourceChange(op="create", urn="urn:x", type="t", id="i")
    with pytest.raises(EngineFailed):  # it had begun
        raise_for(completed, Events((made,), (), ()), "up s")


@pytest.mark.parametrize(
    ("name", "resource", "words"),
    [
        ("up-location-out-of-capacity", "m-2", "LOCATION_OUT_OF_CAPACITY: none of small here"),
        ("up-quota-exceeded", "m-2", "QUOTA_EXCEEDED: none of small here"),
        ("up-already-exists", "m-2", "ALREADY_EXISTS: a machine named m-1 exists; it is not made again"),
        (
            "up-check-failed",
            "m-2",
            "orca:index:Machine resource 'm-2' has a problem: location has to be a text that is not empty",
        ),
        ("destroy-failed", "m-1", "UNAVAILABLE: try later"),
    ],
)
def test_a_failed_resource_is_told_once_by_its_urn_and_in_its_providers_words(
    name: str, resource: str, words: str
) -> None:
    error = error_of(name)
    assert isinstance(error, EngineFailed)
    [failure] = error.failures
    assert (failure.urn, failure.message) == (MACHINE + resource, words)
    assert str(error) == f"up test.machines.p: {resource}: {words}"


def test_an_interrupted_operation_is_unknown_even_if_its_last_step_was_carried_out() -> None:
    _, events = sample("interrupted")
    assert [(c.op, c.name) for c in events.changes if c.urn.startswith(MACHINE)] == [("create", "m-slow")]
    assert isinstance(error_of("interrupted"), OutcomeUnknown)


@pytest.mark.parametrize("name", ["passphrase-wrong", "passphrase-wrong-in-a-step"])
def test_a_wrong_passphrase_names_the_variable_and_no_resource(name: str) -> None:
    error = error_of(name)
    assert isinstance(error, SetupError)
    assert "incorrect passphrase" in str(error)
    assert "PULUMI_CONFIG_PASSPHRASE_FILE has to name the file this state was made with" in str(error)


def test_a_missing_plugin_says_who_knows_how_to_get_it() -> None:
    error = error_of("plugin-missing")
    assert isinstance(error, SetupError)
    assert "no resource plugin 'pulumi-resource-nosuch' found" in str(error)
    assert "orca-infra doctor" in str(error)


@pytest.mark.parametrize("name", ["state-unreachable", "state-socket-gone"])
def test_a_state_that_cannot_be_reached_may_pass_and_shows_no_password(name: str) -> None:
    error = error_of(name)
    assert isinstance(error, Transient)
    assert "failed to ping PostgreSQL" in str(error)
    assert "s3cr3t" not in str(error)


@pytest.mark.parametrize("said", ["failed to load checkpoint: EOF", "place 1: unexpected end of JSON input"])
def test_a_state_that_is_empty_or_cut_off_is_broken_when_it_is_to_be_removed(said: str) -> None:
    completed = Completed(code=255, stdout="", stderr=f"error: {said}\n")
    with pytest.raises(StateBroken, match=f": {said}$"):
        raise_for(completed, Events((), (), ()), "stack rm test.runs.1")


def test_a_connection_to_the_state_that_ends_is_no_broken_state() -> None:
    completed = Completed(
        code=255, stdout="", stderr="error: failed to load checkpoint: read tcp 127.0.0.1:5432: EOF\n"
    )
    with pytest.raises(OrcaError) as caught:
        raise_for(completed, Events((), (), ()), "stack rm test.runs.1")
    assert not isinstance(caught.value, StateBroken)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("state-broken", "refusing to use it: child resource .*::m-1 refers to missing parent .*::m-0$"),
        ("state-broken-seen", "refusing to use it: child resource .*::m-1 refers to missing parent .*::m-0$"),
        ("state-cut-off", "failed to load checkpoint: place 1: unexpected end of JSON input$"),
    ],
)
def test_a_state_that_the_engine_refuses_is_told_in_one_line_and_without_the_environment(name: str, words: str) -> None:
    completed, events = sample(name)
    said = completed.stderr.replace("file:///tmp/home/state", "postgres://u:s3cr3t@db/state")
    with pytest.raises(StateBroken, match=words) as caught:
        raise_for(replace(completed, stderr=said), events, "up test.machines.p")
    assert "s3cr3t" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said_as_one() -> None:
    error = "error: open /state/.pulumi/locks/x.json: no space left on device"
    with pytest.raises(Transient, match="the disk of the engine's state or of its work folder is full"):
        raise_for(Completed(code=255, stdout="", stderr=error), Events((), (), ()), "up s")


def test_of_an_engine_that_panics_its_first_words_are_told_and_not_its_trace() -> None:
    trace = (
        "panic: runtime error: index out of range [1]\n\ngoroutine 1 [running]:\nmain.main()\n\t/src/main.go:67 +0x6d\n"
    )
    with pytest.raises(EngineFailed, match=r"^up s: panic: runtime error: index out of range \[1\]$"):
        raise_for(Completed(code=2, stdout="", stderr=trace), Events((), (), ()), "up s")


def test_a_program_that_raised_failed_without_a_resource() -> None:
    error = error_of("program-raised")
    assert isinstance(error, EngineFailed)
    assert error.failures == ()
    assert "a mistake of the program" in str(error)


def test_a_state_that_could_not_be_written_after_a_step_leaves_the_outcome_unknown() -> None:
    # Made up after the engine's source (pkg/engine/deployment_executor.go): a full disk is hard to record.
    line = json.dumps(
        {
            "diagnosticEvent": {
                "urn": MACHINE + "m-1",
                "severity": "error",
                "message": "post-step event returned an error: failed to save snapshot: no space left on device\n",
            }
        }
    )
    events = read_events([line])
    assert events.failures == ()
    with pytest.raises(OutcomeUnknown, match="no space left on device"):
        raise_for(Completed(code=1, stdout="", stderr=""), events, "up test.machines.p")


@pytest.mark.parametrize("word", ["debug", "error", "resOutputsEvent", "ephemeral"])
def test_a_resource_is_reported_whatever_words_are_among_its_values(word: str) -> None:
    outputs = {"spec": {"env": [{"name": "LOG_LEVEL", "value": word}]}, word: {word: word}}
    new = {"id": "m-1", "outputs": outputs}
    step = {"op": "create", "urn": MACHINE + "m-1", "type": "orca:index:Machine", "new": new}
    lines = [json.dumps({what: {"metadata": step}}) for what in ("resourcePreEvent", "resOutputsEvent")]
    events = read_events(lines)
    assert [(change.id, change.outputs) for change in events.changes] == [("m-1", outputs)]
    assert (events.failures, events.errors) == ((), ())


def test_what_the_api_server_refuses_is_said_in_its_words_alone() -> None:
    urn = "urn:pulumi:test.runtimes.4::orca-infra::kubernetes:core/v1:Pod::pod:n:orca-runtime-p-5"
    words = 'Pod "orca-runtime-p-5" is invalid: spec.nodeSelector: Invalid value: "x y"'
    message = f'resource "{urn}" was not successfully created by the Kubernetes API server: {words}'
    line = json.dumps({"diagnosticEvent": {"urn": urn, "severity": "error", "message": message}})
    assert [failure.message for failure in read_events([line]).failures] == [words]


def test_a_cut_off_event_log_is_read_as_far_as_it_goes() -> None:
    lines = json.loads((SAMPLES / "up-made.json").read_text(encoding="utf-8"))["events"]
    whole = read_events(lines)
    assert read_events([*lines, lines[0][: len(lines[0]) // 2], ""]) == whole


def test_a_failure_without_a_word_is_said_as_such() -> None:
    with pytest.raises(EngineFailed, match="the engine gave no reason"):
        raise_for(Completed(code=255, stdout="", stderr="\n"), Events((), (), ()), "up test.machines.p")


def test_samples_name_neither_this_machine_nor_a_secret() -> None:
    import socket

    for path in SAMPLES.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "s3cr3t" not in text, path
        assert f'"{socket.gethostname()}"' not in text, path
        assert "/work/" not in text, path
        assert "/root/" not in text, path
