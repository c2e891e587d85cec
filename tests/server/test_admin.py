"""What operators may see and do under /admin, on the simulated server."""

import hashlib
from typing import Any

import numpy as np
import pytest

from core.kv_cache import BlockCopies
from core.plan import DeviceError
from core.turns import Begun
from core.types import ClearCache, Inspect, StoreState
from server.engine_client import LOOK_S, MOST_LOOKS
from server.gate.identity import Scope
from server.gate.tenants import Tenant
from tests.fakes import raising_runner
from tests.server.fakes import OPERATOR
from tests.server.simulated_server import STREAM, SimulatedServer, answers, completion, request

KEY = "Authorization: Bearer s3cret"


@pytest.fixture(autouse=True)
def _is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.server.fakes.PEER", OPERATOR)


def engine_of(server: SimulatedServer) -> Any:
    answer = server.ask(request("GET", "/admin/engine"), "GET")
    assert answer.status == 200
    return answer.json


def test_idle_engine_shows_empty_queues_and_all_blocks_empty(server: SimulatedServer) -> None:
    shown = engine_of(server)
    assert shown["queues"] == shown["running"] == shown["tenants"] == []
    assert shown["blocks"] == {
        "num_tokens_each": 4,
        "num_all": 64,
        "num_held": 0,
        "num_shared": 0,
        "num_cached": 0,
        "num_empty": 64,
    }
    assert shown["step_cost"]["is_ready"] is False
    assert shown["last_step"]["predicted_s"] is None
    assert shown["counters"]["num_steps"] == 0


def test_busy_engine_shows_who_runs_who_waits_and_what_the_step_was_made_of(server: SimulatedServer) -> None:
    for _ in range(9):  # for eight slots
        server.send(completion(prompt=[5] * 9, max_tokens=40, **STREAM))
    server.run_until(lambda: server.stats.num_running == 8 and server.stats.num_steps > 30)
    asked = server.send(request("GET", "/admin/engine"))
    server.run_until(lambda: bool(asked.received))
    (answer,) = answers(bytes(asked.received), "GET")
    shown = answer.json
    assert [line["num_sequences"] for line in shown["queues"]] == [1]
    assert shown["queues"][0]["num_tokens"] == 9
    assert shown["queues"][0]["oldest_s"] > 0
    assert [one["request_id"] for one in shown["running"]] == [f"r{i}" for i in range(1, 9)]
    assert all(one["num_prompt_tokens"] == 9 < one["num_tokens"] for one in shown["running"])
    assert shown["last_step"]["num_decoded_tokens"] == 8
    assert shown["last_step"]["num_prompt_tokens"] == 0
    assert shown["last_step"]["measured_s"] > 0
    blocks = shown["blocks"]
    assert blocks["num_held"] + blocks["num_cached"] + blocks["num_empty"] == blocks["num_all"]
    assert 0 < blocks["num_shared"] < blocks["num_held"]  # the prompt's
    (tenant,) = shown["tenants"]
    assert (tenant["num_requests"], tenant["num_running"]) == (9, 8)
    assert tenant["served_s"] > 0
    assert shown["counters"]["num_waiting"] == 1


def test_prompts_are_not_shown(server: SimulatedServer) -> None:
    server.send(completion(prompt="The engine", max_tokens=40, **STREAM))
    asked = server.send(request("GET", "/admin/engine"))
    server.run()
    assert b"r1" in asked.received
    assert b"The engine" not in asked.received


def test_cleared_cache_finds_nothing_of_before(server: SimulatedServer) -> None:
    prompt = completion(prompt=[5] * 30, max_tokens=1)
    server.ask(prompt)
    assert server.ask(prompt).usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.ask(request("POST", "/admin/cache/clear")).json == {"status": "cleared"}
    assert engine_of(server)["blocks"]["num_cached"] == 0
    assert server.ask(prompt).usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_cleared_cache_forgets_the_turns_of_chats(server: SimulatedServer) -> None:
    turns: Any = server.generations.reader.turns
    for _ in range(2):
        turns.add(Begun(("tenant:a", ""), "Hi", np.array([72, 105], np.int32)), [33])
        server.ask(request("POST", "/admin/cache/clear"))
        assert (turns._turns, turns._num_ids) == ({}, {})


def test_cache_is_told_to_be_cleared_once_the_engine_has_done_it(server: SimulatedServer) -> None:
    asked = server.send(request("POST", "/admin/cache/clear"))
    assert [type(message) for message in server.posted] == [ClearCache, Inspect]
    assert not asked.received
    server.run()
    assert answers(bytes(asked.received))[0].status == 200


class SlowStore:
    """A BlockStore whose files take two looks to be deleted, and some of them cannot be, until somebody mends that."""

    def __init__(self, num_undeleted: int = 0, num_looks: int = 2) -> None:
        self.num_undeleted = num_undeleted
        self._num_looks = num_looks
        self._num_to_come = 0
        self.num_drops = 0

    def drop(self, slots: list[int]) -> None:
        self.num_drops += 1
        self._num_to_come = self._num_looks

    @property
    def state(self) -> StoreState:
        self._num_to_come -= 1
        return StoreState(is_deleting=self._num_to_come >= 0, num_undeleted=self.num_undeleted)

    def keep(self, copies: BlockCopies | None) -> None:
        """Nothing."""


def test_cache_is_cleared_when_its_files_are_deleted() -> None:
    store = SlowStore()
    server = SimulatedServer(store=store)
    asked = server.send(request("POST", "/admin/cache/clear"))
    server.run()
    assert not asked.received
    server.run_for(3 * LOOK_S)
    assert answers(bytes(asked.received))[0].json == {"status": "cleared"}
    server.close()


def test_files_that_could_not_be_deleted_are_told_and_tried_again() -> None:
    store = SlowStore(num_undeleted=3, num_looks=0)
    server = SimulatedServer(store=store)
    answer = server.ask(request("POST", "/admin/cache/clear"))
    assert (answer.status, answer.json["error"]["code"]) == (500, "cache_files_undeleted")
    assert "3 of its files" in answer.json["error"]["message"]
    assert (
        b'\nsteploop_kv_undeleted_blocks{model_name="small"} 3\n' in server.ask(request("GET", "/metrics"), "GET").body
    )
    store.num_undeleted = 0
    assert server.ask(request("POST", "/admin/cache/clear")).status == 200
    assert store.num_drops == 2
    server.close()


def test_deletion_that_hangs_is_told() -> None:
    server = SimulatedServer(store=SlowStore(num_looks=10 * MOST_LOOKS))
    asked = server.send(request("POST", "/admin/cache/clear"))
    server.run_for((MOST_LOOKS + 1) * LOOK_S)
    (answer,) = answers(bytes(asked.received))
    assert (answer.status, answer.json["error"]["code"]) == (503, "cache_files_pending")
    assert answer.headers["retry-after"] == "10"
    server.close()


def test_several_who_ask_at_once_are_all_answered(server: SimulatedServer) -> None:
    asking = [server.send(request("GET", "/admin/engine")) for _ in range(3)]
    leaving = server.send(request("GET", "/admin/engine"))
    leaving.reset()
    server.run()
    assert [answers(bytes(one.received), "GET")[0].status for one in asking] == [200] * 3


def test_who_asks_a_failed_engine_hears_that_it_has_failed() -> None:
    server = SimulatedServer(runner=raising_runner(DeviceError("gone")))
    server.send(completion())
    asked = server.send(request("GET", "/admin/engine"))
    server.step()
    late = server.send(request("GET", "/admin/engine"))
    assert asked.received.startswith(b"HTTP/1.1 200")  # its snapshot came with the ends of all
    assert answers(bytes(late.received), "GET")[0].json["error"]["code"] == "engine_error"
    server.close()


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/admin/engine"), ("POST", "/admin/drain"), ("POST", "/admin/cache/clear")]
)
def test_only_an_administrators_key_may_ask(method: str, path: str) -> None:
    ask = request(method, path, None, KEY)
    plain = SimulatedServer(keys=("s3cret",))
    assert plain.ask(request(method, path), method).status == 401
    plain.close()
    server = SimulatedServer(tenants=(Tenant(name="acme", key_sha256=(_sha256("s3cret"),)),))
    answer = server.ask(ask, method)
    assert (answer.status, answer.json["error"]["code"]) == (403, "permission_denied")
    assert Scope.ADMIN in answer.json["error"]["message"]
    server.close()


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin/engine"), ("POST", "/admin/cache/clear")])
def test_before_the_model_is_loaded_there_is_no_engine_to_ask(method: str, path: str) -> None:
    server = SimulatedServer(is_ready=False)
    answer = server.ask(request(method, path), method)
    assert (answer.status, answer.json["error"]["code"]) == (503, "loading")
    server.close()


def test_a_draining_server_still_shows_its_engine(server: SimulatedServer) -> None:
    server.readiness.is_draining = True
    assert engine_of(server)["counters"]["num_running"] == 0


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
