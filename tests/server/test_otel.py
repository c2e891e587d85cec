"""Traces, as a real OTLP receiver gets them: protobuf over HTTP."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from core.errors import StartupError
from server.observing.accounting import RequestRecord, TraceContext
from server.observing.otel import MAX_WAITING, TraceExporter
from server.observing.timing import Stage
from server.values import BadValueError, otlp_endpoint
from tests.server.running_server import Running, ask, closing, load_with, run
from tests.server.simulated_server import MODEL, STREAM, chat
from tests.server.test_flight_recorder import flight

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Receiver:
    """A collector that takes one request, on a thread of its own."""

    def __init__(self) -> None:
        self.spans: Future[list[Span]] = Future()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                assert self.headers["content-type"] == "application/x-protobuf"
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()
                scopes = [scope for resource in sent.resource_spans for scope in resource.scope_spans]
                receiver.spans.set_result([span for scope in scopes for span in scope.spans])

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def attributes(span: Span) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in span.attributes}


@pytest.mark.parametrize("is_ours", [False, True])
def test_generation_is_a_trace_with_a_span_for_each_stage(is_ours: bool, receiver: Receiver) -> None:
    data = closing(chat(**STREAM, max_tokens=5))
    if not is_ours:
        data = data.replace(b"\r\n", f"\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n".encode(), 1)

    async def scenario() -> list[Span]:
        running = Running(load_with(), otlp_endpoint=otlp_endpoint(receiver.url))
        await running.server.wait_ready()
        assert (await ask(running.server, data)).status == 200
        spans = await asyncio.wrap_future(receiver.spans)
        running.server.stop(0)
        await running.exit
        return spans

    found: list[list[Span]] = []

    async def keep() -> None:
        found.append(await scenario())

    run(keep)
    request, *stages = found[0]
    assert (request.name, request.kind) == (f"chat {MODEL}", Span.SPAN_KIND_SERVER)
    assert {span.trace_id for span in found[0]} == {request.trace_id}
    assert request.trace_id.hex() == TRACE or is_ours
    assert request.parent_span_id.hex() == ("" if is_ours else PARENT)
    assert all(span.parent_span_id == request.span_id for span in stages)
    assert len({span.span_id for span in found[0]}) == len(found[0])
    names = [span.name for span in stages]
    assert names[0] == Stage.HEAD
    assert names[-1] == Stage.LAST_FLUSH
    assert {Stage.QUEUE, Stage.PREFILL, Stage.DECODE} <= set(names)
    assert stages[0].start_time_unix_nano == request.start_time_unix_nano
    assert all(after.start_time_unix_nano >= before.start_time_unix_nano for before, after in pairwise(stages))
    told = attributes(request)
    expected = {"gen_ai.operation.name": "chat", "gen_ai.request.model": MODEL, "gen_ai.usage.output_tokens": 5}
    assert expected.items() <= told.items()
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["http.response.status_code"], told["url.path"]) == (200, "/v1/chat/completions")
    assert request.status.code == Status.STATUS_CODE_UNSET


def traced(is_sampled: bool = True, has_failed: bool = False) -> RequestRecord:
    return structs.replace(flight(1, has_failed=has_failed), trace=TraceContext(TRACE, "1" * 16, None, is_sampled))


def test_what_waits_at_the_end_is_sent_and_failures_are_marked(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.observing.otel.CLOSE_TIMEOUT_S", 30.0)  # importing OpenTelemetry takes its time

    async def scenario() -> None:
        exporter = TraceExporter(otlp_endpoint(receiver.url))
        exporter.put(traced(is_sampled=False))
        exporter.put(traced(has_failed=True))
        await exporter.close()

    run(scenario)
    (span,) = receiver.spans.result(0)
    assert (span.name, span.status.code) == ("chat m", Status.STATUS_CODE_ERROR)


def test_what_nobody_takes_is_dropped_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(TraceExporter, "_send", lambda *_: may_end.wait())  # a collector that takes its time

    async def scenario() -> None:
        exporter = TraceExporter("http://127.0.0.1:9/v1/traces")
        for _ in range(1 + MAX_WAITING + 5):  # one is on its way
            exporter.put(traced())
        may_end.set()
        await exporter.close()

    run(scenario)
    dropped = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert [message.split(" traces")[0] for message in dropped] == ["1", "2", "4"]


def test_missing_extra_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError) as caught:
        TraceExporter("http://127.0.0.1:4318/v1/traces")  # before it asks for a loop
    assert caught.value.fix.startswith(f"{sys.executable} -m pip install opentelemetry-sdk ")


def test_endpoint_without_a_path_gets_otlps() -> None:
    assert otlp_endpoint("http://collector:4318") == otlp_endpoint("http://collector:4318/")
    assert otlp_endpoint("http://collector:4318") == "http://collector:4318/v1/traces"
    assert otlp_endpoint("https://collector/otlp/v1/traces") == "https://collector/otlp/v1/traces"


@pytest.mark.parametrize("text", ["", "collector:4318", "grpc://collector", "http://", "http://a?b", "http://a#b"])
def test_endpoint_that_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(BadValueError):
        otlp_endpoint(text)
