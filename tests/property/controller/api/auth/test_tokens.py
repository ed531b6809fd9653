"""Tokens: what is kept comes back; only the secret itself, in its time, is believed."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.api.auth.rbac import Role
from pacekeeper.controller.api.auth.tokens import (
    TokenRecord,
    authenticate_token,
    decode_tokens,
    encode_tokens,
    format_token,
    secret_digest,
)

hex_digits = st.text("0123456789abcdef", min_size=8, max_size=8)
secrets = st.text(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", min_size=43, max_size=43
)
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20)
moments = st.floats(0.0, 1e10)


@st.composite
def tokens(draw: st.DrawFn) -> tuple[TokenRecord, str]:
    """A token's record and its secret."""
    secret, (begins, ends) = draw(secrets), sorted((draw(moments), draw(moments)))
    record = TokenRecord(
        token_id=draw(hex_digits),
        secret_sha256=secret_digest(secret),
        role=draw(st.sampled_from([Role.VIEWER, Role.OPERATOR, Role.AGENT])),
        name=draw(names),
        created_unix_s=begins,
        expires_unix_s=ends,
    )
    return record, secret


many = st.lists(tokens(), max_size=6, unique_by=lambda one: one[0].token_id)


@given(many)
def test_what_is_kept_comes_back_and_no_secret_is_in_it(
    kept: list[tuple[TokenRecord, str]],
) -> None:
    data = encode_tokens(record for record, _ in kept)
    assert set(decode_tokens(data)) == {record for record, _ in kept}
    assert all(secret not in data.decode() for _, secret in kept)


@given(many.filter(bool), moments)
def test_a_token_counts_until_it_ends(
    kept: list[tuple[TokenRecord, str]], now_unix_s: float
) -> None:
    records = [record for record, _ in kept]
    for record, secret in kept:
        found = authenticate_token(format_token(record.token_id, secret), records, now_unix_s)
        if now_unix_s < record.expires_unix_s:
            assert found.role is record.role
            assert found.node == (record.name if record.role is Role.AGENT else "")
        else:
            assert found.role is Role.ANONYMOUS and "expired" in found.why


@given(many.filter(bool), st.data())
def test_another_secret_is_nobodys(
    kept: list[tuple[TokenRecord, str]], data: st.DataObject
) -> None:
    records = [record for record, _ in kept]
    record, secret = data.draw(st.sampled_from(kept))
    other = data.draw(secrets.filter(lambda one: one != secret))
    assert (
        authenticate_token(format_token(record.token_id, other), records, 0.0).role
        is Role.ANONYMOUS
    )
    assert authenticate_token(format_token(record.token_id, secret), [], 0.0).role is Role.ANONYMOUS


@given(st.text(max_size=80))
def test_what_is_no_token_is_nobodys(shown: str) -> None:
    assert authenticate_token(shown, (), 0.0).role is Role.ANONYMOUS


@given(many.filter(bool), st.data())
def test_a_damaged_file_is_a_value_error_or_says_what_may_be_said(
    kept: list[tuple[TokenRecord, str]], data: st.DataObject
) -> None:
    raw = bytearray(encode_tokens(record for record, _ in kept))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_tokens(bytes(raw))
    except ValueError:
        return
    assert all(record.role in (Role.VIEWER, Role.OPERATOR, Role.AGENT) for record in found)


@given(
    st.sampled_from(["open", "nobody", "root", "", None, 3]),
    st.sampled_from(["role"]),
)
def test_no_file_gives_a_role_that_tokens_have_not(role: object, key: str) -> None:
    plain = {
        "token_id": "0" * 8, "secret_sha256": "0" * 64, "role": role, "name": "x",
        "created_unix_s": 0.0, "expires_unix_s": 1.0,
    }  # fmt: skip
    try:
        decode_tokens(json.dumps({"format": 1, "tokens": [plain]}).encode())
    except ValueError:
        return
    raise AssertionError(f"{key} {role!r} was taken")
