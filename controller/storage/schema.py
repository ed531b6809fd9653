"""How the tables of an older version become those of the next one: plain numbered steps. Pure.

The steps to version 16 are of SQLite only: no earlier version was ever in PostgreSQL. Each later
version has one for each engine. Their text is frozen; the tables of today are in `tables.py`.
"""

OLDEST_VERSION = 8  # that is taken over
APPLICATION_ID = 0x70616365  # "pace" in the file's header: no other program's database is touched

_JOBS = """
CREATE TABLE jobs (
    name TEXT PRIMARY KEY, newest_generation INTEGER NOT NULL, step INTEGER NOT NULL,
    layout BLOB, layout_reason TEXT NOT NULL, desired BLOB, home BLOB, ranks TEXT NOT NULL,
    life INTEGER NOT NULL, is_makeshift INTEGER NOT NULL);
"""
_LAYOUTS = """
CREATE TABLE layouts (
    job TEXT NOT NULL, generation INTEGER NOT NULL, layout BLOB NOT NULL, reason TEXT NOT NULL,
    unix_s REAL NOT NULL, PRIMARY KEY (job, generation));
"""
_INCIDENT_COLUMNS_OF_14 = """
    incident_id INTEGER PRIMARY KEY, job TEXT NOT NULL, kind TEXT NOT NULL, tier TEXT NOT NULL,
    rank INTEGER, slowdown REAL, onset_step INTEGER NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, opened_unix_s REAL NOT NULL, closed_unix_s REAL, closed_step INTEGER,
    actions TEXT NOT NULL, cause TEXT NOT NULL, probe TEXT NOT NULL, role TEXT NOT NULL,
    deaths TEXT NOT NULL, nodes TEXT NOT NULL"""
_INCIDENTS = f"""
CREATE TABLE incidents ({_INCIDENT_COLUMNS_OF_14}, is_persistent INTEGER NOT NULL,
    normal_signals TEXT NOT NULL, missing_signals TEXT NOT NULL);
"""
_DECISIONS = """
CREATE TABLE decisions (
    decision_id INTEGER PRIMARY KEY, unix_s REAL NOT NULL,
    job TEXT NOT NULL, step INTEGER NOT NULL, rung TEXT NOT NULL, reason TEXT NOT NULL,
    current_step_s REAL NOT NULL, planned_step_s REAL NOT NULL, fluid_step_s REAL NOT NULL,
    cost_s REAL NOT NULL, moved_bytes INTEGER NOT NULL);
"""
_PROPOSALS = """
CREATE TABLE proposals (
    proposal_id INTEGER PRIMARY KEY, job TEXT NOT NULL, answer TEXT NOT NULL, rung TEXT NOT NULL,
    reason TEXT NOT NULL, current_step_s REAL NOT NULL, planned_step_s REAL NOT NULL,
    fluid_step_s REAL NOT NULL, cost_s REAL NOT NULL, moved_bytes INTEGER NOT NULL,
    plan BLOB NOT NULL, base BLOB NOT NULL, slow TEXT NOT NULL, incident_ids TEXT NOT NULL,
    made_unix_s REAL NOT NULL, expires_unix_s REAL NOT NULL, said_by TEXT NOT NULL,
    note TEXT NOT NULL);
"""
_COPY = "CREATE TABLE copy (name TEXT NOT NULL, term INTEGER NOT NULL);"
# A random name, as `secrets.token_hex(8)` makes it.
_NAME_COPY = "INSERT INTO copy VALUES (lower(hex(randomblob(8))), 0);"
_KEPT = """
CREATE TABLE courses (incident_id INTEGER PRIMARY KEY, job TEXT NOT NULL, course BLOB NOT NULL);
CREATE TABLE paces (job TEXT PRIMARY KEY, pace BLOB NOT NULL, newest_unix_s REAL NOT NULL);
CREATE TABLE orders (
    kind TEXT NOT NULL, subject TEXT NOT NULL, said_by TEXT NOT NULL, reason TEXT NOT NULL,
    since_unix_s REAL NOT NULL, life INTEGER NOT NULL, PRIMARY KEY (kind, subject));
"""
_STRIKES = """
CREATE TABLE strikes (
    incident_id INTEGER PRIMARY KEY, node TEXT NOT NULL, device_uuid TEXT NOT NULL,
    job TEXT NOT NULL, kind TEXT NOT NULL, slowdown REAL NOT NULL, unix_s REAL NOT NULL);
"""
# What retention asks for, oldest first: a column behind a blob is read through all of the blob.
_INCIDENTS_BY_AGE = """
CREATE INDEX incidents_by_age ON incidents (closed_unix_s) WHERE closed_unix_s IS NOT NULL;
"""
_BY_AGE = f"""
CREATE INDEX layouts_by_age ON layouts (unix_s, job, generation);
{_INCIDENTS_BY_AGE}
CREATE INDEX decisions_by_age ON decisions (unix_s);
CREATE INDEX proposals_by_age ON proposals (made_unix_s, answer);
CREATE INDEX paces_by_age ON paces (newest_unix_s);
"""

# What has no time in an older store is as old as its taking over.
_NOW = "CAST(strftime('%s', 'now') AS REAL)"
_WITH_TIMES = f"""
ALTER TABLE layouts RENAME TO older_layouts;
{_LAYOUTS}
INSERT INTO layouts SELECT job, generation, layout, reason, {_NOW} FROM older_layouts;
DROP TABLE older_layouts;
ALTER TABLE decisions RENAME TO older_decisions;
{_DECISIONS}
INSERT INTO decisions SELECT rowid, {_NOW}, * FROM older_decisions ORDER BY rowid;
DROP TABLE older_decisions;
{_BY_AGE}
"""

# One of death was about one rank, which its finding says.
_OF_MANY_RANKS = f"""
ALTER TABLE incidents RENAME TO older_incidents;
CREATE TABLE incidents ({_INCIDENT_COLUMNS_OF_14});
INSERT INTO incidents SELECT *, '[]', '[]' FROM older_incidents;
DROP TABLE older_incidents;
{_INCIDENTS_BY_AGE}
"""


def _move_signals(column: str, start: str) -> str:
    """The statement that moves the list after `start` from the end of `cause` to a column."""
    rest = f"substr(cause, instr(cause, '{start}') + {len(start)})"
    return f"""
UPDATE incidents SET {column} = '["' || replace({rest}, ', ', '","') || '"]',
    cause = substr(cause, 1, instr(cause, '{start}') - 1)
WHERE cause LIKE 'nothing seen%' AND instr(cause, '{start}') > 0;
"""


# Before, the text of the actions and of the cause held these values.
_FIELDS_FROM_TEXT = f"""
ALTER TABLE incidents RENAME TO older_incidents;
{_INCIDENTS}
INSERT INTO incidents SELECT *,
    instr(actions, '"persistent: it has lasted more than') > 0, '[]', '[]' FROM older_incidents;
DROP TABLE older_incidents;
{_move_signals("missing_signals", "; not told: ")}
{_move_signals("normal_signals", "; not unusual: ")}
{_INCIDENTS_BY_AGE}
"""

# Names of the field; the term of the store's copy becomes that of the lease.
_OWN_NAMES = """
ALTER TABLE jobs RENAME COLUMN home TO baseline;
ALTER TABLE jobs RENAME COLUMN life TO run_id;
ALTER TABLE jobs RENAME COLUMN is_makeshift TO is_provisional;
ALTER TABLE incidents RENAME COLUMN deaths TO rank_failures;
ALTER TABLE decisions RENAME COLUMN rung TO level;
ALTER TABLE proposals RENAME COLUMN rung TO level;
ALTER TABLE proposals RENAME COLUMN said_by TO operator;
ALTER TABLE orders RENAME COLUMN said_by TO operator;
ALTER TABLE orders RENAME COLUMN life TO run_id;
ALTER TABLE courses RENAME COLUMN course TO timeline;
ALTER TABLE courses RENAME TO incident_timelines;
ALTER TABLE paces RENAME COLUMN pace TO timeline;
ALTER TABLE paces RENAME TO job_timelines;
DROP INDEX paces_by_age;
CREATE INDEX job_timelines_by_age ON job_timelines (newest_unix_s);
CREATE TABLE leases (
    name TEXT NOT NULL, term INTEGER NOT NULL, run_id TEXT NOT NULL, holder TEXT NOT NULL,
    address TEXT NOT NULL, duration_s REAL NOT NULL, min_term INTEGER NOT NULL,
    renewals INTEGER NOT NULL, PRIMARY KEY (name), UNIQUE (name, term));
INSERT INTO leases SELECT 'controller', term, '', '', '', 0.0, 0, 0 FROM copy WHERE term > 0;
DROP TABLE copy;
"""

UPGRADES = {
    8: _PROPOSALS,
    9: _KEPT,
    10: _COPY + _NAME_COPY,
    11: _STRIKES,
    12: _WITH_TIMES,
    13: _OF_MANY_RANKS,
    14: _FIELDS_FROM_TEXT,
    15: _OWN_NAMES,
}
"""What makes of the tables of a version those of the next one, in SQLite."""
POSTGRES_UPGRADES: dict[int, str] = {}
"""The same in PostgreSQL, from version 16 on. The table `leases` must not change: controllers of
both versions elect one leader."""
