"""The screen of `pacekeeper top`: a table of ranks, one of incidents, and keys."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from pacekeeper.cli.common.sparkline import spark
from pacekeeper.cli.observe.explain_text import explain
from pacekeeper.cli.top.rows import (
    INCIDENT_HEADS,
    MOST_ROWS,
    RANK_HEADS,
    Order,
    chosen,
    head_text,
    incident_cells,
    rank_cells,
)
from pacekeeper.cli.top.source import Shown
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.incidents.operator_orders import OrderKind, rank_subject


class Asked(Protocol):
    """Where it all comes from, and what may be done: `source.Source`."""

    def look(self, job: str) -> Shown: ...
    def explain(self, incident_id: int) -> Any: ...
    def answer(self, proposal_id: int, *, is_approved: bool) -> str: ...
    def order(self, kind: OrderKind, subject: str, *, is_on: bool) -> str: ...


class Explained(ModalScreen[None]):
    """One incident, over everything else."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Back"),
    ]

    def __init__(self, explanation: Any) -> None:
        super().__init__()
        self._explanation = explanation

    def compose(self) -> ComposeResult:
        """The words of `pacekeeper explain`."""
        with VerticalScroll():
            yield Static(Text.from_markup("\n".join(explain(self._explanation))))
        yield Footer()


class Sure(ModalScreen[bool]):
    """Asks once more."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question, and how to answer it."""
        yield Static(f"{self._question}\n\ny: yes   n: no", id="question", markup=False)


class TopApp(App[None]):
    """`source` is asked every `period_s`, beside the screen; one that is away is said."""

    TITLE = "pacekeeper"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 3; padding: 0 1; }
    #pace { height: 1; padding: 0 1; color: $accent; }
    #message { height: 1; padding: 0 1; color: $warning; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    DataTable { height: 1fr; }
    #incidents { height: 6; border-top: solid $surface-lighten-2; }
    #incidents { scrollbar-size-horizontal: 0; }
    Explained { align: center middle; }
    Explained VerticalScroll { border: round $accent; padding: 0 1; background: $surface; }
    Sure { align: center middle; }
    #question { width: 60; height: auto; padding: 1 2; background: $surface; }
    #question { border: round $warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("slash", "filter", "Filter"),
        Binding("j,right", "job(1)", "Job"),
        Binding("k,left", "job(-1)", "Job before", show=False),
        Binding("i", "incidents", "Incidents"),
        Binding("c", "cordon", "Cordon"),
        Binding("p", "pause", "Pause"),
        Binding("y", "dry_run", "Dry run"),
        Binding("a", "answer(True)", "Approve"),
        Binding("d", "answer(False)", "Deny"),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, source: Asked, *, job: str = "", period_s: float = 1.0) -> None:
        super().__init__()
        self._source, self._job, self._period_s = source, job, period_s
        self._shown = Shown(jobs=())
        self._order, self._is_reversed, self._wanted = Order.SLOWDOWN, False, ""
        self._is_looking = self._is_away = False

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Static(id="head")
        yield Static(id="pace", markup=False)
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        yield Input(id="filter", placeholder="rank, node or state; Enter keeps it", compact=True)
        yield DataTable(id="incidents", cursor_type="row")
        yield Static(id="message", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Begin to look."""
        self._ranks.add_columns(*RANK_HEADS)
        self._incidents.add_columns(*INCIDENT_HEADS)
        self._ranks.focus()
        self.set_interval(self._period_s, self.look)
        self.look()

    def look(self) -> None:
        """Ask anew, unless the last answer is still awaited."""
        if not self._is_looking:
            self._is_looking = True
            self.run_worker(self._look, thread=True)

    def action_sort(self) -> None:
        """By the next column."""
        self._order = self._order.next
        self._say(f"sorted by {self._order}")
        self._draw()

    def action_reverse(self) -> None:
        """The other way round."""
        self._is_reversed = not self._is_reversed
        self._draw()

    def action_filter(self) -> None:
        """Type what to see."""
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_leave(self) -> None:
        """Back to the ranks, all of them."""
        self._wanted = self.query_one("#filter", Input).value = ""
        self.query_one("#filter", Input).remove_class("open")
        self._ranks.focus()
        self._draw()

    def action_job(self, by: int) -> None:
        """The next job, or the one before."""
        jobs = self._shown.jobs
        if jobs:
            self._job = jobs[(self._at + by) % len(jobs)].name
            self._draw()
            self.look()

    def action_incidents(self) -> None:
        """To the incidents, and back; Enter there explains one."""
        (self._ranks if self._incidents.has_focus else self._incidents).focus()

    def action_cordon(self) -> None:
        """Take the work from the rank at the cursor, or give it back."""
        job, rows = self._present, self._rows
        at = self._ranks.cursor_row
        if job is None or not 0 <= at < len(rows):
            return
        rank = rows[at]
        subject, is_on = rank_subject(job.name, rank.rank), not rank.is_cordoned
        verb = "Take the work from" if is_on else "Take the cordon back of"
        self._act(
            f"{verb} rank {rank.rank} on {rank.node}?",
            lambda: self._source.order(OrderKind.CORDON_RANK, subject, is_on=is_on),
        )

    def action_pause(self) -> None:
        """Make no plans for this job, or make them again."""
        job = self._present
        if job is None:
            return
        name, is_on = job.name, all(order.kind != OrderKind.PAUSE for order in job.orders)
        verb = "Make no plans for" if is_on else "Make plans again for"
        self._act(f"{verb} {name}?", lambda: self._source.order(OrderKind.PAUSE, name, is_on=is_on))

    def action_dry_run(self) -> None:
        """Offer no plans of any job, or offer them again."""
        is_on = all(order.kind != OrderKind.DRY_RUN for order in self._shown.orders)
        question = "Make plans and offer none, of any job?" if is_on else "Offer plans again?"
        self._act(question, lambda: self._source.order(OrderKind.DRY_RUN, "", is_on=is_on))

    def action_answer(self, is_approved: bool) -> None:
        """Approve or deny the plan that waits."""
        job = self._present
        if job is None or not job.HasField("proposal") or job.proposal.answer != "waiting":
            self._say("no plan waits")
            return
        number, verb = job.proposal.proposal_id, "Approve" if is_approved else "Deny"
        self._act(
            f"{verb} plan {number}? {job.proposal.reason}",
            lambda: self._source.answer(number, is_approved=is_approved),
        )

    def on_input_changed(self, event: Input.Changed) -> None:
        """The filter holds while it is typed."""
        self._wanted = event.value
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Back to the ranks, the filter stays."""
        self.query_one("#filter", Input).set_class(bool(self._wanted), "open")
        self._ranks.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter on an incident explains it."""
        if event.data_table is not self._incidents or event.cursor_row < 0:
            return
        incidents = self._listed
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
    def _at(self) -> int:
        names = [job.name for job in self._shown.jobs]
        return names.index(self._job) if self._job in names else 0

    @property
    def _present(self) -> Any:
        """The job that is shown; None: there is none."""
        return self._shown.jobs[self._at] if self._shown.jobs else None

    @property
    def _rows(self) -> list[Any]:
        job = self._present
        ranks = [] if job is None else job.ranks
        return chosen(ranks, self._wanted, self._order, is_reversed=self._is_reversed)[:MOST_ROWS]

    @property
    def _listed(self) -> list[Any]:
        """The newest incidents of this job, open ones first."""
        job = self._present
        found = [one for one in self._shown.incidents if job is not None and one.job == job.name]
        found.sort(key=lambda one: (one.HasField("closed_unix_s"), -one.incident_id))
        return found[:MOST_ROWS]

    def _look(self) -> None:
        try:
            shown = self._source.look(self._job)
        except PacekeeperError as error:
            self.call_from_thread(self._missed, str(error))
        else:
            self.call_from_thread(self._seen, shown)

    def _missed(self, text: str) -> None:
        self._is_looking, self._is_away = False, True
        self._say(text)

    def _seen(self, shown: Shown) -> None:
        if self._is_away:
            self._say("")
        self._is_looking = self._is_away = False
        self._shown = shown
        self._draw()

    def _draw(self) -> None:
        job = self._present
        head = self.query_one("#head", Static)
        if job is None:
            head.update("no jobs yet")
            return
        head.update(head_text(job, self._at, len(self._shown.jobs), self._shown.orders))
        self.query_one("#pace", Static).update(self._pace())
        _fill(self._ranks, [rank_cells(rank) for rank in self._rows])
        _fill(self._incidents, [incident_cells(one) for one in self._listed])

    def _pace(self) -> str:
        pace = self._shown.pace
        bars = "" if pace is None else spark(list(pace.tokens_per_s), width=self.size.width - 12)
        return f"tokens/s {bars}"

    def _say(self, text: str) -> None:
        self.query_one("#message", Static).update(text)

    def _act(self, question: str, do: Callable[[], str]) -> None:
        """Ask once more, then do it beside the screen, and say what came of it."""

        def done() -> None:
            try:
                text = do()
            except PacekeeperError as error:
                text = str(error)
            self.call_from_thread(self._say, text)
            self.call_from_thread(self.look)

        def answered(is_sure: bool | None) -> None:
            if is_sure:
                self.run_worker(done, thread=True)

        self.push_screen(Sure(question), answered)

    def _explain(self, number: int) -> None:
        try:
            explanation = self._source.explain(number)
        except PacekeeperError as error:
            self.call_from_thread(self._say, str(error))
        else:
            self.call_from_thread(self.push_screen, Explained(explanation))


def _fill(table: DataTable[Text], rows: list[list[Text]]) -> None:
    """Other rows in the same place: cursor and scrolling stay where they were."""
    row, scrolled = table.cursor_row, table.scroll_y
    table.clear()
    for cells in rows:
        table.add_row(*cells)
    table.move_cursor(row=min(row, len(rows) - 1), animate=False, scroll=False)
    table.scroll_to(y=scrolled, animate=False)
