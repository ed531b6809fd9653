"""Pauses a rank's clock, and publishes its phase, while torch.distributed waits for other ranks.

Collectives of a foreign trainer are called in its own code and in torch's. All of them pass one of
four places: a method of a process group (where NCCL runs synchronous ones), `Work.wait`, the
operator that waits for a functional collective (called from C++ in backward passes), and the end of
a backward pass, where DistributedDataParallel waits in C++ for all gradients. While a
`WaitAwareClock` is attached, these pause it; they are not changed otherwise.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as c10d

from pacekeeper.core.telemetry.sign_of_life import SAVING, STEPPING, WAITING
from pacekeeper.trainer.adapters.instrumentation.module_passes import (
    at_end_of_backward,
    is_in_backward,
)
from pacekeeper.trainer.hooks.compute_timers import (
    ComputeTime,
    CpuClock,
    LateClock,
    PipelineClock,
    SegmentClock,
)

# Of torch 2.6 to 2.13; a version may lack some.
_METHODS = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "allreduce", "allreduce_coalesced"),
    *("all_to_all_single", "alltoall", "alltoall_base", "barrier", "monitored_barrier"),
    *("broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "send"),
)
_FUNCTIONAL = "_c10d_functional"
_RUNS = "_engine_run_backward"  # of torch.autograd, called by `backward` and `grad`
Call = Callable[..., Any]
_listening: "list[WaitAwareClock]" = []  # of this process; usually one
_INHERITED = object()
# Owner, name, previous value of its `__dict__`: `getattr` of a C++ class would give another one.
_replaced: list[tuple[Any, str, Any]] = []


class WaitAwareClock:
    """A clock that pauses while torch waits for other ranks, also within an explicit `waiting`.

    Waits in other threads, or on other streams than the one of the pass, overlap with compute and
    do not pause it. Threads of autograd belong to the pass. Waits and `torch.save` of the thread
    that made this clock are published as phases of the rank, also outside of passes.

    Args:
        clock: The clock that is paused.
        count_error: Called with errors.
        enter_phase: `Ring.enter_phase` of the rank.
    """

    def __init__(
        self,
        clock: SegmentClock,
        count_error: Callable[[Exception], None],
        enter_phase: Callable[[int], int] = lambda phase: STEPPING,
    ) -> None:
        self.thread = 0  # that computes a pass of a micro-batch; 0: none
        self.enter_phase = enter_phase
        self.home = get_ident()
        self._before = STEPPING  # phase before the wait
        self.is_in_run = False  # a backward pass runs; after its own pass it waits for gradients
        self._clock = clock
        self._suspendable = cast(PipelineClock, clock)
        self._count_error = count_error
        self._has_streams = not isinstance(clock, CpuClock)  # that is a thread's
        self._stream: Any = None
        self._depth = 0  # nesting of waits
        self._is_waiting = False  # as overheard

    def attach(self, *more: tuple[Any, str]) -> None:
        """Patch torch.distributed, and `more`: (class, method) pairs that wait for other ranks."""
        try:
            if not _listening:
                _replace_all()
            for owner, name in more:
                if not any(known[:2] == (owner, name) for known in _replaced):
                    _replace(owner, name)
            _listening.append(self)
        except Exception as error:
            self._count_error(error)

    def detach(self) -> None:
        """Stop; the last one to detach restores torch.distributed."""
        with contextlib.suppress(ValueError):
            _listening.remove(self)
        if not _listening:
            while _replaced:
                owner, name, before = _replaced.pop()
                if before is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

    def begin(self) -> None:
        self._depth, self._is_waiting = 0, False
        self._clock.begin()
        self.thread = get_ident()
        if self._has_streams:
            self._stream = _current_stream()

    def pause(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._clock.pause()

    def resume(self) -> None:
        if self._depth:  # a wait left open by an error may end in the next micro-batch
            self._depth -= 1
            if self._depth == 0:
                self._clock.resume()

    def suspend(self) -> Any:
        if self._is_waiting:
            self.end_wait()
        self.thread = 0
        return self._suspendable.suspend()

    def resume_suspended(self, aside: Any) -> None:
        self._depth, self._is_waiting = 0, False
        self._suspendable.resume_suspended(aside)
        self.thread = get_ident()
        if self._has_streams:
            self._stream = _current_stream()

    def time_of(self, aside: Any) -> ComputeTime | None:
        return self._suspendable.time_of(aside)

    def end(self) -> ComputeTime | None:
        self.close_pass()
        return self._clock.end()

    def close_pass(self) -> None:
        """End the pass, possibly within a wait at the end of a backward pass."""
        if self._is_waiting:
            self.end_wait()
        self.thread = 0

    def known(self) -> list[ComputeTime]:
        """Return the times of a late clock that were not returned before."""
        return self._clock.known() if isinstance(self._clock, LateClock) else []

    @contextlib.contextmanager
    def wait_block(self) -> Iterator[None]:
        """Context manager of a wait; nested waits count once."""
        is_ours = self.begin_wait()
        try:
            yield
        finally:
            if is_ours:
                self.end_wait()

    def begin_final_wait(self) -> None:
        """Start the wait at the end of a backward pass, once all its gradients are computed."""
        if self.begin_wait():
            at_end_of_backward(self.end_wait)  # after that: DistributedDataParallel's wait

    def begin_wait(self) -> bool:
        """Start a wait; return False if another thread waits, or it lies within another wait."""
        is_ours = False
        try:
            if self._is_waiting:
                return False
            if self.thread:
                if self._is_of_pass():
                    is_ours = self._is_waiting = True
                    self.pause()
            elif get_ident() == self.home:
                is_ours = self._is_waiting = True
            if is_ours:
                self._before = self.enter_phase(WAITING)
        except Exception as error:
            self._count_error(error)
        return is_ours

    def end_wait(self) -> None:
        """End the wait, if there is one."""
        if not self._is_waiting:
            return
        self._is_waiting = False
        try:
            self.resume()
            self.enter_phase(self._before)
        except Exception as error:
            self._count_error(error)

    def _is_of_pass(self) -> bool:
        if get_ident() != self.thread and not is_in_backward():
            return False
        return not self._has_streams or bool(_current_stream() == self._stream)


def waits_of_fsdp() -> list[tuple[Any, str]]:
    """Return the methods where FSDP2 waits by streams: for parameters, and at the end."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:
        return []
    return [(FSDPParamGroup, "wait_for_unshard"), (FSDPParamGroup, "finalize_backward")]


def _current_stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _replace_all() -> None:
    for name in _METHODS:
        if hasattr(c10d.ProcessGroup, name):
            _replace(c10d.ProcessGroup, name)
    _replace(c10d.Work, "wait")
    _replace(torch, "save", _saving)
    if hasattr(torch.autograd, _RUNS):
        _replace(torch.autograd, _RUNS, _pausing_at_end)
    _functional_kernels()


def _replace(owner: Any, name: str, by: "Callable[[Call], Call] | None" = None) -> None:
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, (by or _pausing)(getattr(owner, name)))
    _replaced.append((owner, name, before))


def _pausing(original: Call) -> Call:
    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        if not _listening or (args and getattr(args[-1], "asyncOp", False) is True):
            return original(*args, **kwargs)  # asynchronous: waited for later
        begun = [one for one in _listening if one.begin_wait()]
        try:
            return original(*args, **kwargs)
        finally:
            for one in begun:
                one.end_wait()

    return waiting


def _saving(original: Call) -> Call:
    @functools.wraps(original)
    def saving(*args: Any, **kwargs: Any) -> Any:
        here = get_ident()
        begun = [(one, one.enter_phase(SAVING)) for one in _listening if one.home == here]
        try:
            return original(*args, **kwargs)
        finally:
            for one, before in begun:
                one.enter_phase(before)

    return saving


def _pausing_at_end(run: Call) -> Call:
    """Wrap the engine's run of a backward pass, `run(outputs, ...)`, unless nested in another one
    (recomputation).
    """

    @functools.wraps(run)
    def running(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _listening:
            if one.thread and not is_in_backward():
                break
        else:
            mine = [one for one in _listening if not one.is_in_run]
            for one in mine:
                one.is_in_run = True
            try:
                return run(outputs, *args, **kwargs)
            finally:
                for one in mine:
                    one.is_in_run = False
                    if not one.thread:  # its pass is over
                        one.enter_phase(STEPPING)
        first = [True]

        def begun(gradient: Any) -> None:
            if first:  # queued, and so run, before any other callback
                first.clear()
                at_end_of_backward(_computed_all)

        with contextlib.ExitStack() as hooks:
            for output in outputs:
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    hooks.callback(output.register_hook(begun).remove)
            return run(outputs, *args, **kwargs)

    return running


def _computed_all() -> None:
    for one in _listening:
        one.begin_final_wait()


@functools.cache
def _functional_kernels() -> tuple[Any, ...]:
    """Replace the operators once per process: they cannot be restored, only passed through.

    The original is called by its key, which frees the interpreter's lock: a thread of gloo that
    wants it (to drop a Python object) would else never end what is waited for here.
    """
    if not hasattr(torch.library, "get_kernel"):
        return ()  # before torch 2.10: waits of functional collectives count as compute
    library = torch.library.Library(_FUNCTIONAL, "IMPL")
    wait: Any = getattr(torch.ops, _FUNCTIONAL).wait_tensor.default
    original = functools.partial(wait._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
    for device in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
        library.impl("wait_tensor", _pausing(original), device)
    return (library,)
