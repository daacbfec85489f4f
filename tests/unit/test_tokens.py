import hashlib
import re
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from orca_infra.machines.tokens import token_hash, worker_token

KEY = b"0123456789abcdef"


def test_the_token_is_a_known_one() -> None:
    # Any leader of any version renders the same token for a machine that lives: RFC 2104 over sha256, written out here.
    text = b"abcdefghijklmnop/orca-gpu-1"
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in KEY.ljust(64, b"\0")) + text).digest()
    expected = hashlib.sha256(bytes(b ^ 0x5C for b in KEY.ljust(64, b"\0")) + inner).hexdigest()
    assert worker_token(KEY, "abcdefghijklmnop", "orca-gpu-1") == expected


@given(st.binary(min_size=16), st.text("abc234", min_size=16, max_size=16), st.text("ab-12", min_size=1))
def test_a_token_is_64_hexadecimal_digits_and_the_same_each_time(key: bytes, stack_id: str, machine: str) -> None:
    token = worker_token(key, stack_id, machine)
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert worker_token(key, stack_id, machine) == token


def test_another_key_stack_or_machine_has_another_token() -> None:
    tokens = [
        worker_token(key, stack_id, machine)
        for key in (KEY, KEY + b"x")
        for stack_id in ("one", "two")
        for machine in ("orca-p-1", "orca-p-11", "orca-q-1")
    ]
    assert all(one != other for one, other in combinations(tokens, 2))


def test_the_hash_that_is_stored_is_that_of_the_tokens_text() -> None:
    token = worker_token(KEY, "stack", "orca-p-1")
    assert token_hash(token) == hashlib.sha256(token.encode("ascii")).digest()
    assert token not in token_hash(token).hex()
