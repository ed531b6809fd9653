"""The textual application of `pacekeeper top`: tables of ranks and incidents, and key bindings.

Queries and acts run in worker threads through a `DataSource`, so that the screen never blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class JobView:
    """The newest answer of the controller, and what of it is on the screen.

    Attributes:
        job_name: job to show; the first one if no job has this name.
        sort_key: order of the ranks.
        is_reversed: whether that order is reversed.
        text: filter of the ranks.
    """

    job_name: str = ""
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(jobs=()))
    sort_key: SortKey = SortKey.SLOWDOWN
    is_reversed: bool = False
    text: str = ""

    @property
    def job_index(self) -> int:
        """Place of the job among all jobs."""
        names = [job.name for job in self.snapshot.jobs]
        return names.index(self.job_name) if self.job_name in names else 0

    @property
    def job(self) -> Any:
        """The job on the screen; None without jobs."""
        return self.snapshot.jobs[self.job_index] if self.snapshot.jobs else None

    @property
    def ranks(self) -> list[Any]:
        """The ranks of the job that match the filter, in order."""
        ranks = [] if self.job is None else self.job.ranks
        return select_ranks(ranks, self.text, self.sort_key, is_reversed=self.is_reversed)[
            :MAX_ROWS
        ]

    @property
    def incidents(self) -> list[Any]:
        """The newest incidents of the job, open ones first."""
        job = self.job
        found = [one for one in self.snapshot.incidents if job is not None and one.job == job.name]
        found.sort(key=lambda one: (one.HasField("closed_unix_s"), -one.incident_id))
        return found[:MAX_ROWS]

    def select_job(self, by: int) -> None:
        """Select the job that is `by` places after the one on the screen."""
        jobs = self.snapshot.jobs
        if jobs:
            self.job_name = jobs[(self.job_index + by) % len(jobs)].name

    def header(self) -> Text | str:
        """The lines above the tables."""
        if self.job is None:
            return "no jobs"
        return header_text(self.job, self.job_index, len(self.snapshot.jobs), self.snapshot.orders)

    def throughput_line(self, width: int) -> str:
        """The newest rates of the job as bars in `width` characters."""
        pace = self.snapshot.pace
        bars = "" if pace is None else sparkline(list(pace.tokens_per_s), width=width - 12)
        return f"tokens/s {bars}"


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
        self._source, self._view, self._period_s = source, JobView(job), period_s
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
        self._view.sort_key = self._view.sort_key.next
        self._show_message(f"sorted by {self._view.sort_key}")
        self._draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._view.is_reversed = not self._view.is_reversed
        self._draw()

    def action_filter(self) -> None:
        """Open the filter."""
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_leave(self) -> None:
        """Clear the filter and focus the ranks."""
        self._view.text = self.query_one("#filter", Input).value = ""
        self.query_one("#filter", Input).remove_class("open")
        self._ranks.focus()
        self._draw()

    def action_job(self, by: int) -> None:
        """Show the next or previous job."""
        self._view.select_job(by)
        self._draw()
        self.poll()

    def action_incidents(self) -> None:
        """Move the focus between ranks and incidents."""
        (self._ranks if self._incidents.has_focus else self._incidents).focus()

    def action_cordon(self) -> None:
        """Cordon or uncordon the rank at the cursor."""
        job, rows = self._view.job, self._view.ranks
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
        job = self._view.job
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
        is_on = all(order.kind != OrderKind.DRY_RUN for order in self._view.snapshot.orders)
        question = f"Switch the dry run {'on' if is_on else 'off'} for all jobs?"
        self._act(question, lambda: self._source.order(OrderKind.DRY_RUN, "", is_on=is_on))

    def action_answer(self, is_approved: bool) -> None:
        """Approve or deny the pending proposal."""
        job = self._view.job
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
        self._view.text = event.value
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Focus the ranks and keep the filter."""
        self.query_one("#filter", Input).set_class(bool(self._view.text), "open")
        self._ranks.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Explain the selected incident."""
        if event.data_table is not self._incidents or event.cursor_row < 0:
            return
        incidents = self._view.incidents
        if event.cursor_row < len(incidents):
            number = incidents[event.cursor_row].incident_id
            self.run_worker(lambda: self._explain(number), thread=True)

    @property
    def _ranks(self) -> DataTable[Text]:
        return self.query_one("#ranks", DataTable)

    @property
    def _incidents(self) -> DataTable[Text]:
        return self.query_one("#incidents", DataTable)

    def _fetch(self) -> None:
        try:
            shown: Snapshot | str = self._source.fetch(self._view.job_name)
        except PacekeeperError as error:
            shown = str(error)
        self.call_from_thread(self._fetched, shown)

    def _fetched(self, shown: Snapshot | str) -> None:
        """Show the answer, or the text of the error; the error goes with the next answer."""
        self._is_polling = False
        if isinstance(shown, str):
            self._is_unreachable = True
            self._show_message(shown)
            return
        if self._is_unreachable:
            self._show_message("")
        self._is_unreachable = False
        self._view.snapshot = shown
        self._draw()

    def _draw(self) -> None:
        view = self._view
        self.query_one("#head", Static).update(view.header())
        if view.job is None:
            return
        self.query_one("#throughput", Static).update(view.throughput_line(self.size.width))
        _fill(self._ranks, [rank_cells(rank) for rank in view.ranks])
        _fill(self._incidents, [incident_cells(one) for one in view.incidents])

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
