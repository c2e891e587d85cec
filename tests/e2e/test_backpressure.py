"""Readers that stop for good: after the stall timeout they are cut off, and their blocks are free."""

from collections.abc import Callable
from pathlib import Path

import pytest
from h2.errors import ErrorCodes

from tests.certificates import make_certificate, needs_openssl
from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import connected, post_bytes
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_http2 import ENDLESS, RealClient, metric

RECEIVE_BUFFER_BYTES = 4096
LONG = {"model": MODEL, "prompt": "go on", "stream": True, "ignore_eos": True, "max_tokens": 1500, "n": 4}


def test_reader_that_stops_over_http1_is_cut_off(strict_server: ServerProcess) -> None:
    before = strict_server.metrics(API_KEY)["steploop_disconnects_total"]
    with connected(strict_server.port, RECEIVE_BUFFER_BYTES) as client:
        client.send(post_bytes("/v1/completions", LONG, api_key=API_KEY))
        client.read_head()
        strict_server.wait_metric("steploop_disconnects_total", before + 1, API_KEY)
        strict_server.wait_quiet(API_KEY)
        assert b"[DONE]" not in client.read_to_end_or_reset()


@needs_openssl
@pytest.mark.parametrize("is_secure", [False, True], ids=["in the clear", "TLS"])
def test_readers_that_stop_over_http2_are_cut_off(
    spawn: Callable[..., ServerProcess], tmp_path: Path, is_secure: bool
) -> None:
    """One whose window is shut loses its stream, one whose socket is full its connection."""
    made, key = make_certificate(tmp_path)
    certificate = made if is_secure else None
    server = spawn("--stall-timeout", "500ms", *(("--tls-cert", str(made), "--tls-key", str(key)) if is_secure else ()))
    server.wait_ready()

    def wait_free(num_disconnects: int) -> None:
        def shown(name: str) -> float:
            return metric(server, name, certificate)

        wait_for(
            lambda: shown("steploop_disconnects_total") == num_disconnects and not shown("steploop_kv_blocks_used"),
            lambda: f"{num_disconnects} disconnects and free blocks\n{server.log_tail}",
        )

    with RealClient(server.port, window=100, certificate=certificate) as client:
        stalled = client.chat(ENDLESS)
        client.read_until(lambda: stalled in client.resets, acknowledges=False)
        assert client.resets[stalled] == ErrorCodes.CANCEL
        wait_free(1)
        going = client.chat(ENDLESS | {"max_tokens": 1, "stream": False})
        client.h2.increment_flow_control_window(2**20, going)
        client.flush()
        client.read_until(lambda: going in client.ended)
    with RealClient(server.port, 2**24, RECEIVE_BUFFER_BYTES, certificate) as client:
        client.h2.increment_flow_control_window(2**24)
        client.chat(ENDLESS | {"n": 4})
        wait_free(2)
