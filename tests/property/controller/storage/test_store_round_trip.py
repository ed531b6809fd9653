"""Whatever is saved comes back equal, from a store that was closed and opened again."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.state.state import JobRecord, RankRecord, RankStatus
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.incidents.rank_failures import RankFailures
from pacekeeper.core.incidents.rank_ranges import to_ranges
from support.examples import examples
from support.layouts import layouts

numbers = st.integers(0, 2**32 - 1)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
times = st.floats(0, 1e12)
findings = st.builds(
    Finding,
    kind=st.sampled_from(FindingKind),
    tier=st.sampled_from(Tier),
    rank=numbers,
    slowdown=st.floats(0, allow_nan=False),
    onset_step=numbers,
    step=numbers,
    reason=words,
    cause=words,
    probe=words,
    role=words,
)
deaths = st.builds(
    RankFailures,
    ranks=st.sets(numbers, max_size=4).map(to_ranges),
    reason=words,
    step=numbers,
    unix_s=times,
    closed_unix_s=st.none() | times,
    closed_step=st.none() | numbers,
)
incidents = st.builds(
    Incident,
    incident_id=st.integers(1, 2**40),
    job=words,
    finding=findings,
    opened_unix_s=times,
    closed_unix_s=st.none() | times,
    closed_step=st.none() | numbers,
    actions=st.lists(words, max_size=3).map(tuple),
    rank_failures=st.lists(deaths, max_size=3).map(tuple),
    nodes=st.lists(words, max_size=3).map(tuple),
)
jobs = st.builds(
    JobRecord,
    name=words,
    newest_generation=numbers,
    step=st.integers(-1, 2**32 - 1),
    layout=st.none() | layouts(),
    layout_reason=words,
    desired=st.none() | layouts(),
    baseline=st.none() | layouts(),
    run_id=st.integers(0, 2**42),
    ranks=st.lists(
        st.builds(RankRecord, rank=numbers, pid=numbers, status=st.sampled_from(RankStatus)),
        max_size=3,
    ).map(tuple),
)


@settings(max_examples=examples(25), deadline=None)  # each one waits for the disk
@given(
    st.lists(jobs, max_size=3, unique_by=lambda job: job.name),
    st.lists(incidents, max_size=4, unique_by=lambda incident: incident.incident_id),
)
def test_what_is_saved_comes_back(saved_jobs: list[JobRecord], saved: list[Incident]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        store = Store.open(path)
        with store.transaction():
            for job in saved_jobs:
                store.save_job(job)
                if job.layout is not None:
                    store.save_layout(job.name, job.layout, job.layout_reason, 1.0)
            for incident in saved:
                store.save_incident(incident)
        store.close()
        store = Store.open(path)
        loaded_jobs, loaded, next_id = store.load()
        assert loaded_jobs == tuple(sorted(saved_jobs, key=lambda job: job.name.encode()))
        names = {job.name for job in saved_jobs}
        own = [incident for incident in saved if incident.job in names]
        assert loaded == tuple(sorted(own, key=lambda incident: incident.incident_id))
        assert next_id == max((i.incident_id for i in saved), default=0) + 1
        for job in saved_jobs:
            if job.layout is not None:
                stored = store.layout(job.name, job.layout.generation)
                assert stored == (job.layout, job.layout_reason)
        store.close()
