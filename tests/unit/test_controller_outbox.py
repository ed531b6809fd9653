"""What waits for one node: in order, the newest of a kind only, never more than its capacity."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from pacekeeper.controller import server
from pacekeeper.controller.events import Event, NodeReported
from pacekeeper.controller.server import AgentControl, Outbox
from pacekeeper.protos import control_pb2, control_pb2_grpc, telemetry_pb2, wire


def offer(job: str, generation: int) -> control_pb2.AttachResponse:
    return control_pb2.AttachResponse(
        offer_plan=control_pb2.OfferPlan(job=job, generation=generation)
    )


def drained(outbox: Outbox) -> list[tuple[str, int]]:
    """Closes the outbox and reads what it still held."""

    async def read() -> list[tuple[str, int]]:
        outbox.close()
        messages = []
        while (message := await outbox.get()) is not None:
            messages.append((message.offer_plan.job, message.offer_plan.generation))
        return messages

    return asyncio.run(read())


def test_a_newer_message_of_the_same_job_and_kind_takes_over() -> None:
    outbox = Outbox()
    outbox.put(("a", "plan"), offer("a", 2))
    outbox.put(("b", "plan"), offer("b", 7))
    outbox.put(("a", "plan"), offer("a", 3))
    assert drained(outbox) == [("b", 7), ("a", 3)]


def test_other_kinds_of_the_same_job_stay() -> None:
    outbox = Outbox()
    outbox.put(("a", "plan"), offer("a", 2))
    outbox.put(("a", "deaths"), offer("a", 99))
    assert drained(outbox) == [("a", 2), ("a", 99)]


def test_beyond_the_capacity_the_oldest_goes() -> None:
    outbox = Outbox(capacity=3)
    for job in "abcde":
        outbox.put((job, "plan"), offer(job, 1))
    assert drained(outbox) == [("c", 1), ("d", 1), ("e", 1)]


def test_who_waits_is_woken_by_a_message_and_by_the_end() -> None:
    async def scene() -> None:
        outbox = Outbox()
        waiting = asyncio.create_task(outbox.get())
        await asyncio.sleep(0)
        outbox.put(("a", "plan"), offer("a", 1))
        assert await waiting == offer("a", 1)
        waiting = asyncio.create_task(outbox.get())
        await asyncio.sleep(0)
        outbox.close()
        assert await waiting is None

    asyncio.run(scene())


def never(what: str, error: Exception) -> None:
    raise AssertionError(what) from error


def test_a_bug_in_taking_a_report_in_is_counted_and_ends_that_stream() -> None:
    failures: list[str] = []

    async def put(event: Event) -> None:
        if isinstance(event, NodeReported):
            raise ZeroDivisionError

    async def scene() -> grpc.aio.AioRpcError:
        service = grpc.aio.server()
        control = AgentControl(
            put=put, on_rejected=lambda: None, on_failure=lambda what, _: failures.append(what)
        )
        control_pb2_grpc.add_AgentControlServiceServicer_to_server(control, service)
        port = service.add_insecure_port("127.0.0.1:0")
        await service.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call: Any = control_pb2_grpc.AgentControlServiceStub(channel).Attach(timeout=20.0)
                hello = control_pb2.Hello(protocol_version=wire.PROTOCOL_VERSION, node="n")
                await call.write(control_pb2.AttachRequest(hello=hello))
                assert (await call.read()).HasField("welcome")
                report = telemetry_pb2.NodeReport(sequence=1)
                await call.write(control_pb2.AttachRequest(report=report))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while await call.read() is not grpc.aio.EOF:
                        pass
                return caught.value
        finally:
            await service.stop(None)

    assert asyncio.run(scene()).code() is grpc.StatusCode.INTERNAL
    assert failures == ["node=n reader failed"]


def test_a_stream_that_never_says_hello_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HELLO_WITHIN_S", 0.05)
    events: list[Event] = []
    refused: list[None] = []

    async def put(event: Event) -> None:
        events.append(event)

    async def scene() -> grpc.aio.AioRpcError:
        service = grpc.aio.server()
        control = AgentControl(put=put, on_rejected=lambda: refused.append(None), on_failure=never)
        control_pb2_grpc.add_AgentControlServiceServicer_to_server(control, service)
        port = service.add_insecure_port("127.0.0.1:0")
        await service.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = control_pb2_grpc.AgentControlServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Attach(timeout=20.0).read()
                return caught.value
        finally:
            await service.stop(None)

    error = asyncio.run(scene())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the first message must be Hello"
    assert events == [] and len(refused) == 1
