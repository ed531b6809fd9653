"""Live view of the demo: one redrawn screen, or plain lines if the output is not a terminal."""

import math
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pacekeeper.cli.common.sparkline import sparkline
from pacekeeper.cli.demo.recorder import DemoEvent, Recorder
from pacekeeper.core.text import format_s

_STYLES = {
    "fault": "bold red",
    "kill": "bold red",
    "finding": "bold yellow",
    "plan": "bold cyan",
    "lift": "bold green",
    "recover": "bold green",
    "regroup": "bold cyan",
}


@dataclass(kw_only=True)
class LiveView:
    """Shows the state of a recorder."""

    console: Console
    recorder: Recorder
    title: str
    total_steps: int
    _live: Live | None = field(default=None, init=False)
    _num_printed: int = field(default=0, init=False)

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._screen())
            self._live.__exit__(None, None, None)

    def update(self) -> None:
        """Redraw the screen, or print the new events."""
        if self._live is not None:
            self._live.update(self._screen())
        else:
            for event in self.recorder.events[self._num_printed :]:
                self.console.print(_line(event), soft_wrap=True)
            self._num_printed = len(self.recorder.events)

    def _screen(self) -> RenderableType:
        steps = self.recorder.steps
        if not steps:
            return Panel(Text("starting controller, agents and ranks ..."), title=self.title)
        newest = steps[-1]
        head = Text()
        head.append(f"step {newest.step + 1:>4}/{self.total_steps}   ")
        head.append(f"{newest.tokens_per_s:>8,.0f} tokens/s   ", style="bold")
        head.append(f"generation {newest.generation}   ")
        if newest.loss is not None:
            head.append(f"loss {newest.loss:.3f}   ")
        head.append(newest.watch, style="green" if newest.watch == "healthy" else "yellow")
        width = max(20, min(100, self.console.width - 24))
        rates = [s.tokens_per_s for s in steps[-width:]]
        bars = sparkline(rates, width=width, between=(0.0, max(rates)))
        lines = [_line(h) for h in self.recorder.events[-9:]]
        line = Text("tokens/s  ") + Text(bars, style="cyan")
        return Panel(Group(head, line, self._rank_table(), *lines), title=self.title)

    def _rank_table(self) -> Table:
        newest = self.recorder.steps[-1]
        layout = self.recorder.layouts.get(newest.generation)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("rank", "observed", "expected", "slowdown", "", "batch", "replicas"):
            table.add_column(name, justify="left" if not name else "right")
        for i, rank in enumerate(newest.ranks):
            slowdown = newest.slowdown[i]
            share = layout[0].batch_share_of(rank) if layout else math.nan
            replicas = (
                sum(len(layout[0].experts_on(rank, x)) for x in range(layout[0].num_layers))
                if layout
                else 0
            )
            style = "bold red" if slowdown >= 1.1 else ""
            bar = "" if math.isnan(slowdown) else "#" * round(min(slowdown, 3.0) * 10)
            table.add_row(
                str(rank),
                format_s(newest.observed_s[i]),
                "..." if math.isnan(newest.expected_s[i]) else format_s(newest.expected_s[i]),
                "..." if math.isnan(slowdown) else f"x{slowdown:.2f}",
                bar,
                f"{share:.0%}",
                str(replicas),
                style=style,
            )
        return table


def _line(event: DemoEvent) -> Text:
    line = Text()
    line.append(f"step {event.step:>4}  ", style="dim")
    line.append(f"{event.kind:<8} ", style=_STYLES.get(event.kind, ""))
    line.append(event.text)
    return line
