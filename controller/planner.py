"""Decisions are made beside the event loop: one thread, one after the other, oldest first.

At 60 layers of 256 experts on 256 ranks one decision takes seconds; agents and those who ask must
be answered meanwhile. What the decision is worth when it is made, the machine judges.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state_machine.events import AskDecision, DecisionMade, Event
from pacekeeper.core.config.controller import PolicyConfig


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")


@dataclass(slots=True, eq=False, kw_only=True)
class Planner:
    """Answers each question with one event, whatever happens. Use from one event loop."""

    policy: PolicyConfig
    put: Callable[[Event], Awaitable[None]]
    on_failure: Callable[[str, Exception], None]
    _pool: ThreadPoolExecutor = field(default_factory=_one_thread)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def ask(self, question: AskDecision) -> None:
        """Begin; the answer goes to `put`."""
        task = asyncio.create_task(self._answer(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Nothing more is answered. A decision in the making ends by itself, for nobody."""
        for task in self._tasks:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, question: AskDecision) -> None:
        decision = None
        loop = asyncio.get_running_loop()
        try:
            decision = await loop.run_in_executor(self._pool, decide, question.view, self.policy)
        except Exception as error:
            # Our bug: said and counted like that of an event; the machine may ask anew later.
            self.on_failure(f"no decision: job={question.job}", error)
        await self.put(DecisionMade(job=question.job, asked=question.asked, decision=decision))
