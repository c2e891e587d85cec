"""Log lines: a request id in each, one access line, nothing forged."""

import importlib.util
import io
import json
import logging
import os
import sys
import threading
import warnings

import pytest
from msgspec.structs import replace

from server.observing.logs import (
    AccessRecord,
    access_line,
    access_logger,
    configure_logging,
    current_request_id,
    log_access,
    log_everything,
    num_lines_dropped,
    tell,
)

pytestmark = pytest.mark.usefixtures("_restore_loggers")

ACCESS = AccessRecord(
    request_id="req-1",
    method="POST",
    path="/v1/chat/completions",
    status=200,
    duration_ms=1234.56,
    ttft_ms=45.12,
    num_prompt_tokens=12,
    num_completion_tokens=34,
    finish_reason="stop",
)


def test_text_records_bear_the_request_id_of_their_context() -> None:
    stream = io.StringIO()
    log = configure_logging("info", "text", stream)
    logger = logging.getLogger("server.some")
    logger.info("before")
    token = current_request_id.set("req-7")
    logger.warning("queue of %d", 3)
    current_request_id.reset(token)
    logger.info("known better", extra={"request_id": "req-8"})
    log.flush()
    tails = [text.split(" ", 1)[1] for text in stream.getvalue().splitlines()]
    assert tails == [
        "INFO server.some [-] before",
        "WARNING server.some [req-7] queue of 3",
        "INFO server.some [req-8] known better",
    ]


def test_text_time_is_utc_with_milliseconds() -> None:
    stream = io.StringIO()
    log = configure_logging("info", "text", stream)
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "levelno": 20, "msg": "m", "created": 1.5})
    logging.getLogger().handle(record)
    log.flush()
    assert stream.getvalue() == "1970-01-01T00:00:01.500Z INFO a [-] m\n"


def test_json_records_are_one_object_a_line_even_with_traceback_and_surrogates() -> None:
    stream = io.StringIO()
    log = configure_logging("info", "json", stream)
    try:
        raise ValueError("two\nlines \ud800")
    except ValueError:
        logging.getLogger("server.some").exception("it\nfailed \udcff")
    log.flush()
    (text,) = stream.getvalue().splitlines()
    record = json.loads(text)
    assert record["message"] == "it\nfailed \\udcff"
    assert "ValueError" in record["exception"]
    assert (record["level"], record["logger"], record["request_id"]) == ("error", "server.some", "-")


def test_json_access_record_has_fields_beside_the_line() -> None:
    stream = io.StringIO()
    log = configure_logging("info", "json", stream)
    log_access(ACCESS)
    log.flush()
    record = json.loads(stream.getvalue())
    assert record["logger"] == "server.access"
    assert record["message"] == access_line(ACCESS)
    assert (record["request_id"], record["status"], record["ttft_ms"]) == ("req-1", 200, 45.12)
    assert "num_cached_tokens" not in record


def test_access_line_leaves_out_what_never_came() -> None:
    assert access_line(ACCESS) == (
        "POST /v1/chat/completions 200 1234.6ms ttft=45.1ms prompt=12 completion=34 finish=stop"
    )
    refused = AccessRecord(request_id="r", method="GET", path="/x", status=404, duration_ms=0.2, error_code="not_found")
    assert access_line(replace(refused, client="[::1]:5000")).endswith(" error=not_found client=[::1]:5000")
    assert access_line(refused) == "GET /x 404 0.2ms error=not_found"


@pytest.mark.parametrize("path", ["/a\nINFO forged", "/\x1b[31m", "/a b", "/\u2028", "/\x85", "/é"])
def test_a_path_cannot_break_out_of_its_word(path: str) -> None:
    record = AccessRecord(request_id="r", method="GET", path=path, status=200, duration_ms=1.0)
    line = access_line(record)
    assert line.isascii()
    assert line.isprintable()
    assert len(line.split(" ")) == 4


def test_level_silences_what_is_below() -> None:
    stream = io.StringIO()
    log = configure_logging("warning", "text", stream)
    log_access(ACCESS)
    logging.getLogger("server.some").info("quiet")
    log.flush()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("level", "told"), [("debug", "iw"), ("info", "iw"), ("warning", "w"), ("error", "")])
def test_level_is_for_our_loggers_and_others_only_warn(level: str, told: str) -> None:
    stream = io.StringIO()
    log = configure_logging(level, "text", stream)
    for name in ("elsewhere.connection", "gpu.runner"):
        logging.getLogger(name).info("i")
        logging.getLogger(name).warning("w")
    log.flush()
    lines = [line.split(" ")[2:] for line in stream.getvalue().splitlines()]
    assert [word for name, _, word in lines if name == "gpu.runner"] == list(told)
    assert [word for name, _, word in lines if name != "gpu.runner"] == list(told)[-1:]


def test_reader_that_stalls_holds_nobody_up_and_what_it_missed_is_counted_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.observing.logs.MAX_WAITING_BYTES", 10_000)
    reading, writing = os.pipe()
    with open(reading) as reader, open(writing, "w") as stream:
        log = configure_logging("info", "json", stream)
        num_sent = 0
        while not log.num_dropped:  # the pipe takes 64 KiB, and then we
            logging.getLogger("server.some").info("x" * 1000)
            num_sent += 1
        assert num_lines_dropped() == log.num_dropped == 1
        lines = [json.loads(reader.readline()) for _ in range(num_sent)]
        assert [line["message"] for line in lines[:-1]] == ["x" * 1000] * (num_sent - 1)
        assert lines[-1]["message"].startswith("1 log lines are lost")
        logging.getLogger("server.some").info("after")
        assert json.loads(reader.readline())["message"] == "after"
        log.close()


def test_end_waits_for_no_reader_longer_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.observing.logs.FLUSH_S", 0.01)
    reading, writing = os.pipe()
    with open(reading) as reader, open(writing, "w") as stream:
        log = configure_logging("info", "text", stream)
        for _ in range(100):
            logging.getLogger("server.some").info("x" * 1000)
        log.flush()
        log.close()
        logging.getLogger("server.some").info("late")  # is not waited for either
        while "x" in reader.readline():  # lets the thread end
            if not log._thread.is_alive():
                break


def test_warnings_and_what_fails_in_threads_are_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    stream = io.StringIO()
    log = configure_logging("info", "json", stream)
    log_everything()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("old", stacklevel=1)
        thread = threading.Thread(target=lambda: {}["absent"])
        thread.start()
        thread.join()
    finally:
        logging.captureWarnings(False)
    log.flush()
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert "old" in first["message"]
    assert "KeyError: 'absent'" in second["exception"]


def test_what_is_said_whatever_the_level_is_json_beside_json() -> None:
    stream, other = io.StringIO(), io.StringIO()
    log = configure_logging("error", "json", stream)
    tell(["steploop", "  URL"], other)
    log.flush()
    assert json.loads(other.getvalue())["message"] == "steploop\n  URL"
    assert stream.getvalue() == ""


def test_no_module_logs_by_the_name_of_the_access_log() -> None:
    assert importlib.util.find_spec(access_logger.name) is None
