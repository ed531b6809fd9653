"""The textual application of `pacekeeper top`: tables of ranks and incidents, and key bindings.

Queries and acts run in worker threads through a `DataSource`, so that the screen never blocks.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from pacekeeper.cli.common.sparkline import sparkline
from pacekeeper.cli.observe.explain_text import explanation_lines
from pacekeeper.cli.top.rows import (
    INCIDENT_COLUMNS,
    MAX_ROWS,
    RANK_COLUMNS,
    SortKey,
    header_text,
    incident_cells,
    rank_cells,
    select_ranks,
)
from pacekeeper.cli.top.source import Snapshot
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.incidents.operator_orders import OrderKind, rank_subject


class DataSource(Protocol):
    """Queries and acts that the screen needs; implemented by `source.ControllerSource`."""

    def fetch(self, job: str) -> Snapshot: ...
    def explain(self, incident_id: int) -> Any: ...
    def answer(self, proposal_id: int, *, is_approved: bool) -> str: ...
    def order(self, kind: OrderKind, subject: str, *, is_on: bool) -> str: ...


class ExplanationScreen(ModalScreen[None]):
    """Shows the explanation of one incident."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Back"),
    ]

    def __init__(self, explanation: Any) -> None:
        super().__init__()
        self._explanation = explanation

    def compose(self) -> ComposeResult:
        """Compose the text of `pacekeeper explain`."""
        with VerticalScroll():
            yield Static(Text.from_markup("\n".join(explanation_lines(self._explanation))))
        yield Footer()


class ConfirmScreen(ModalScreen[bool]):
    """Asks for confirmation of an act."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Compose the question and its keys."""
        yield Static(f"{self._question}\n\ny: yes   n: no", id="question", markup=False)


class TopApp(App[None]):
    """The screen: polls `source` every `period_s` in a worker thread and shows its errors."""

    TITLE = "pacekeeper"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 3; padding: 0 1; }
    #throughput { height: 1; padding: 0 1; color: $accent; }
    #message { height: 1; padding: 0 1; color: $warning; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    DataTable { height: 1fr; }
    #incidents { height: 6; border-top: solid $surface-lighten-2; }
    #incidents { scrollbar-size-horizontal: 0; }
    ExplanationScreen { align: center middle; }
    ExplanationScreen VerticalScroll { border: round $accent; padding: 0 1; background: $surface; }
    ConfirmScreen { align: center middle; }
    #question { width: 60; height: auto; padding: 1 2; background: $surface; }
    #question { border: round $warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("slash", "filter", "Filter"),
        Binding("j,right", "job(1)", "Job"),
        Binding("k,left", "job(-1)", "Previous job", show=False),
        Binding("i", "incidents", "Incidents"),
        Binding("c", "cordon", "Cordon"),
        Binding("p", "pause", "Pause"),
        Binding("y", "dry_run", "Dry run"),
        Binding("a", "answer(True)", "Approve"),
        Binding("d", "answer(False)", "Deny"),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, source: DataSource, *, job: str = "", period_s: float = 1.0) -> None:
        super().__init__()
        self._source, self._job, self._period_s = source, job, period_s
        self._snapshot = Snapshot(jobs=())
        self._sort_key, self._is_reversed, self._filter = SortKey.SLOWDOWN, False, ""
        self._is_polling = self._is_unreachable = False

    def compose(self) -> ComposeResult:
        """Compose the widgets from top to bottom."""
        yield Static(id="head")
        yield Static(id="throughput", markup=False)
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        yield Input(
            id="filter", placeholder="rank, node or state; Enter keeps the filter", compact=True
        )
        yield DataTable(id="incidents", cursor_type="row")
        yield Static(id="message", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Add the columns and start polling."""
        self._ranks.add_columns(*RANK_COLUMNS)
        self._incidents.add_columns(*INCIDENT_COLUMNS)
        self._ranks.focus()
        self.set_interval(self._period_s, self.poll)
        self.poll()

    def poll(self) -> None:
        """Start a query unless one is running."""
        if not self._is_polling:
            self._is_polling = True
            self.run_worker(self._fetch, thread=True)

    def action_sort(self) -> None:
        """Sort by the next key."""
        self._sort_key = self._sort_key.next
        self._show_message(f"sorted by {self._sort_key}")
        self._draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._is_reversed = not self._is_reversed
        self._draw()

    def action_filter(self) -> None:
        """Open the filter."""
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_leave(self) -> None:
        """Clear the filter and focus the ranks."""
        self._filter = self.query_one("#filter", Input).value = ""
        self.query_one("#filter", Input).remove_class("open")
        self._ranks.focus()
        self._draw()

    def action_job(self, by: int) -> None:
        """Show the next or previous job."""
        jobs = self._snapshot.jobs
        if jobs:
            self._job = jobs[(self._job_index + by) % len(jobs)].name
            self._draw()
            self.poll()

    def action_incidents(self) -> None:
        """Move the focus between ranks and incidents."""
        (self._ranks if self._incidents.has_focus else self._incidents).focus()

    def action_cordon(self) -> None:
        """Cordon or uncordon the rank at the cursor."""
        job, rows = self._current_job, self._rows
        at = self._ranks.cursor_row
        if job is None or not 0 <= at < len(rows):
            return
        rank = rows[at]
        subject, is_on = rank_subject(job.name, rank.rank), not rank.is_cordoned
        verb = "Cordon" if is_on else "Uncordon"
        self._act(
            f"{verb} rank {rank.rank} on {rank.node}?",
            lambda: self._source.order(OrderKind.CORDON_RANK, subject, is_on=is_on),
        )

    def action_pause(self) -> None:
        """Pause or resume planning for this job."""
        job = self._current_job
        if job is None:
            return
        name, is_on = job.name, all(order.kind != OrderKind.PAUSE for order in job.orders)
        verb = "Pause" if is_on else "Resume"
        self._act(
            f"{verb} planning for {name}?",
            lambda: self._source.order(OrderKind.PAUSE, name, is_on=is_on),
        )

    def action_dry_run(self) -> None:
        """Switch the dry run of all jobs on or off."""
        is_on = all(order.kind != OrderKind.DRY_RUN for order in self._snapshot.orders)
        question = f"Switch the dry run {'on' if is_on else 'off'} for all jobs?"
        self._act(question, lambda: self._source.order(OrderKind.DRY_RUN, "", is_on=is_on))

    def action_answer(self, is_approved: bool) -> None:
        """Approve or deny the pending proposal."""
        job = self._current_job
        if job is None or not job.HasField("proposal") or job.proposal.answer != "waiting":
            self._show_message("no proposal awaits approval")
            return
        number, verb = job.proposal.proposal_id, "Approve" if is_approved else "Deny"
        self._act(
            f"{verb} proposal {number}? {job.proposal.reason}",
            lambda: self._source.answer(number, is_approved=is_approved),
        )

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter while it is typed."""
        self._filter = event.value
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Focus the ranks and keep the filter."""
        self.query_one("#filter", Input).set_class(bool(self._filter), "open")
        self._ranks.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Explain the selected incident."""
        if event.data_table is not self._incidents or event.cursor_row < 0:
            return
        incidents = self._listed_incidents
        if event.cursor_row < len(incidents):
            number = incidents[event.cursor_row].incident_id
            self.run_worker(lambda: self._explain(number), thread=True)

    @property
    def _ranks(self) -> DataTable[Text]:
        return self.query_one("#ranks", DataTable)

    @property
    def _incidents(self) -> DataTable[Text]:
        return self.query_one("#incidents", DataTable)

    @property
    def _job_index(self) -> int:
        names = [job.name for job in self._snapshot.jobs]
        return names.index(self._job) if self._job in names else 0

    @property
    def _current_job(self) -> Any:
        """The job on the screen; None without jobs."""
        return self._snapshot.jobs[self._job_index] if self._snapshot.jobs else None

    @property
    def _rows(self) -> list[Any]:
        job = self._current_job
        ranks = [] if job is None else job.ranks
        return select_ranks(ranks, self._filter, self._sort_key, is_reversed=self._is_reversed)[
            :MAX_ROWS
        ]

    @property
    def _listed_incidents(self) -> list[Any]:
        """The newest incidents of this job, open ones first."""
        job = self._current_job
        found = [one for one in self._snapshot.incidents if job is not None and one.job == job.name]
        found.sort(key=lambda one: (one.HasField("closed_unix_s"), -one.incident_id))
        return found[:MAX_ROWS]

    def _fetch(self) -> None:
        try:
            shown = self._source.fetch(self._job)
        except PacekeeperError as error:
            self.call_from_thread(self._fetch_failed, str(error))
        else:
            self.call_from_thread(self._fetched, shown)

    def _fetch_failed(self, text: str) -> None:
        self._is_polling, self._is_unreachable = False, True
        self._show_message(text)

    def _fetched(self, shown: Snapshot) -> None:
        if self._is_unreachable:
            self._show_message("")
        self._is_polling = self._is_unreachable = False
        self._snapshot = shown
        self._draw()

    def _draw(self) -> None:
        job = self._current_job
        head = self.query_one("#head", Static)
        if job is None:
            head.update("no jobs")
            return
        head.update(
            header_text(job, self._job_index, len(self._snapshot.jobs), self._snapshot.orders)
        )
        self.query_one("#throughput", Static).update(self._throughput_line())
        _fill(self._ranks, [rank_cells(rank) for rank in self._rows])
        _fill(self._incidents, [incident_cells(one) for one in self._listed_incidents])

    def _throughput_line(self) -> str:
        pace = self._snapshot.pace
        bars = (
            "" if pace is None else sparkline(list(pace.tokens_per_s), width=self.size.width - 12)
        )
        return f"tokens/s {bars}"

    def _show_message(self, text: str) -> None:
        self.query_one("#message", Static).update(text)

    def _act(self, question: str, do: Callable[[], str]) -> None:
        """Run `do` in a worker after confirmation and show its result."""

        def done() -> None:
            try:
                text = do()
            except PacekeeperError as error:
                text = str(error)
            self.call_from_thread(self._show_message, text)
            self.call_from_thread(self.poll)

        def on_answer(is_sure: bool | None) -> None:
            if is_sure:
                self.run_worker(done, thread=True)

        self.push_screen(ConfirmScreen(question), on_answer)

    def _explain(self, number: int) -> None:
        try:
            explanation = self._source.explain(number)
        except PacekeeperError as error:
            self.call_from_thread(self._show_message, str(error))
        else:
            self.call_from_thread(self.push_screen, ExplanationScreen(explanation))


def _fill(table: DataTable[Text], rows: list[list[Text]]) -> None:
    """Replace the rows of a table; cursor and scroll position stay."""
    row, scrolled = table.cursor_row, table.scroll_y
    table.clear()
    for cells in rows:
        table.add_row(*cells)
    table.move_cursor(row=min(row, len(rows) - 1), animate=False, scroll=False)
    table.scroll_to(y=scrolled, animate=False)
