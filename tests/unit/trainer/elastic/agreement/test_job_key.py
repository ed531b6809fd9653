"""Values are accepted with the signature of this job, this run and this name only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.errors import DeniedError
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey

KEY = JobKey(b"a secret of a job")
RUN = KEY.of_session("run 2")


@given(st.text(), st.lists(st.binary(), min_size=1))
def test_appended_values_are_read_in_order(name: str, contents: list[bytes]) -> None:
    value = b"".join(KEY.sign(name, content) for content in contents)
    assert KEY.verify(name, value) == b"".join(contents)


@given(st.binary(), st.data())
def test_no_byte_can_be_changed_added_or_left_out(content: bytes, data: st.DataObject) -> None:
    value = KEY.sign("verdict/first", content)
    at = data.draw(st.integers(0, len(value) - 1))
    other = data.draw(st.integers(1, 255))
    changed = value[:at] + bytes([value[at] ^ other]) + value[at + 1 :]
    for wrong in (changed, value[:at], value[at + 1 :], value + b"\0"):
        with pytest.raises(DeniedError):
            KEY.verify("verdict/first", wrong)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"4@first,",
        JobKey(b"another secret....").sign("deaths", b"4@first,"),
        UNSIGNED.sign("deaths", b"4@first,"),
        KEY.sign("deaths", b"4@first,"),  # of no run
        KEY.of_session("run 1").sign("deaths", b"4@first,"),
        RUN.sign("finished", b"4@first,"),
        RUN.sign("deaths", b"4@first,") + b"5@first,",
    ],
)
def test_what_is_signed_otherwise_is_rejected_with_its_name(value: bytes) -> None:
    with pytest.raises(DeniedError, match=r"'deaths' is not signed .* --secret-file"):
        RUN.verify("deaths", value)


def test_a_secret_is_not_shown() -> None:
    assert "secret of" not in repr(KEY) + str(RUN)
