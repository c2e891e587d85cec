"""Log lines: a request id in each, one access line, nothing forged."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from server.observing.logs import (
    OUR_LOGGERS,
    AccessRecord,
    access_line,
    configure_logging,
    current_request_id,
    log_access,
)

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


@pytest.fixture(autouse=True)
def _loggers_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    loggers = [root, *map(logging.getLogger, OUR_LOGGERS)]
    levels = [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_text_records_bear_the_request_id_of_their_context() -> None:
    stream = io.StringIO()
    configure_logging("info", "text", stream)
    logger = logging.getLogger("server.some")
    logger.info("before")
    token = current_request_id.set("req-7")
    logger.warning("queue of %d", 3)
    current_request_id.reset(token)
    logger.info("known better", extra={"request_id": "req-8"})
    tails = [text.split(" ", 1)[1] for text in stream.getvalue().splitlines()]
    assert tails == [
        "INFO server.some [-] before",
        "WARNING server.some [req-7] queue of 3",
        "INFO server.some [req-8] known better",
    ]


def test_text_time_is_utc_with_milliseconds() -> None:
    stream = io.StringIO()
    configure_logging("info", "text", stream)
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "levelno": 20, "msg": "m", "created": 1.5})
    logging.getLogger().handle(record)
    assert stream.getvalue() == "1970-01-01T00:00:01.500Z INFO a [-] m\n"


def test_json_records_are_one_object_a_line_even_with_traceback_and_surrogates() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    try:
        raise ValueError("two\nlines \ud800")
    except ValueError:
        logging.getLogger("server.some").exception("it\nfailed \udcff")
    (text,) = stream.getvalue().splitlines()
    record = json.loads(text)
    assert record["message"] == "it\nfailed \\udcff"
    assert "ValueError" in record["exception"]
    assert (record["level"], record["logger"], record["request_id"]) == ("error", "server.some", "-")


def test_json_access_record_has_fields_beside_the_line() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    log_access(ACCESS)
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
    configure_logging("warning", "text", stream)
    log_access(ACCESS)
    logging.getLogger("server.some").info("quiet")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("level", "told"), [("debug", "iw"), ("info", "iw"), ("warning", "w"), ("error", "")])
def test_level_is_for_our_loggers_and_others_only_warn(level: str, told: str) -> None:
    stream = io.StringIO()
    configure_logging(level, "text", stream)
    for name in ("elsewhere.connection", "gpu.runner"):
        logging.getLogger(name).info("i")
        logging.getLogger(name).warning("w")
    lines = [line.split(" ")[2:] for line in stream.getvalue().splitlines()]
    assert [word for name, _, word in lines if name == "gpu.runner"] == list(told)
    assert [word for name, _, word in lines if name != "gpu.runner"] == list(told)[-1:]
