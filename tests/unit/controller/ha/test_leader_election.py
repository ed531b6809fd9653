"""The right to command in one term, and when it is given up."""

from typing import Any

import pytest

from pacekeeper.controller.ha.leader_election import LeaseLeadership
from pacekeeper.controller.ha.lease import ElectionMember, Timing

TIMING = Timing(duration_s=4.0, renew_s=1.0, margin_s=1.0)
MEMBER = ElectionMember(name="a", run_id="a1", address="a:1", timing=TIMING)


class Renewer:
    """Leads in term 7, and counts resignations."""

    resignations = 0

    def term(self) -> int | None:
        return None if self.resignations else 7

    def resign(self) -> None:
        self.resignations += 1


@pytest.mark.parametrize(("waits_s", "resigns"), [(0.0, False), (2.9, False), (3.0, True)])
def test_a_leader_resigns_once_a_write_has_waited_as_long_as_a_renewal_may(
    waits_s: float, resigns: bool
) -> None:
    renewer: Any = Renewer()
    leadership = LeaseLeadership(renewer, 7, MEMBER)
    leadership.check_write(waits_s)
    leadership.check_write(waits_s)
    assert (leadership.has_resigned, renewer.resignations) == (resigns, int(resigns))
    assert leadership.term() == (None if resigns else 7)
