"""What tests of connections in memory are given, and what tests of a whole server must leave as it was."""

import asyncio
import gc
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import uvloop

from server.observing.logs import LogHandler
from server.wire.limits import ConnectionLimits
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.memory_connection import Serve
from tests.server.running_server import LIMIT_S
from tests.server.simulated_server import SimulatedServer
from tests.server.virtual_loop import VirtualTimeLoop


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on the loop that serves."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    uvloop.run(asyncio.wait_for(test(**arguments), LIMIT_S))
    return True


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[MemoryServer] = []

    def start(handler: Callable[[HttpStream], object], limits: ConnectionLimits | None = None) -> MemoryServer:
        servers.append(MemoryServer(handler, limits, takes_upgrade=True))  # type: ignore[arg-type] # any handler, also a failing one
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def _keep_interpreter_settings() -> Iterator[None]:
    """A server sets these for its whole process."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.fixture
def _keep_signal_handlers() -> Iterator[None]:
    """A server that has ended leaves its signals ignored, and so would the processes that later tests start."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def _restore_loggers() -> Iterator[None]:
    """After configure_logging."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    yield
    for handler in root.handlers:
        if isinstance(handler, LogHandler):
            handler.close()
    root.handlers[:] = handlers


@pytest.fixture
def server() -> Iterator[SimulatedServer]:
    with closing(SimulatedServer()) as server:
        yield server
