"""`steploop replay`: runs recorded requests again and compares their tokens. Thread: main, blocking.

Over HTTP, against the server of --url, or one that is started in this process with the model that is named. A recorded
request is sent as it came, with its seed, and is asked for its tokens (`timings`).
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any

from core.errors import ExitCode, StartupError
from server.commands.chat import ChatClient, asked_server, check_url
from server.commands.console import take_interrupts
from server.config import ServerConfig
from server.observing.recorder import REPLAY_HEADER, RecordedRequest, read_records

DIFFERS = 1  # the exit code
NAMES = {"model_digest": "model", "settings_digest": "settings", "version": "version"}
DROPPED = ("deadlines", "response_fields")  # of a body: they may cut the answer, or hide what is compared
# A body's fields by all their names, the first of which every surface knows
SEEDS = ("seed", "sampling_seed", "random_seed")
MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
LEAST_TOKENS = ("min_tokens", "min_new_tokens")
POLICIES = ("context_policy", "truncation")  # how much of a prompt they cut depends on the most tokens


class Incomparable(Exception):
    """Why a request's tokens cannot be compared."""


def run(arguments: argparse.Namespace, config: ServerConfig) -> int:
    """Raises StartupError: nothing is recorded there, or the server cannot be reached or started."""
    check_url(arguments)
    records = [record for path in arguments.records for record in read_records(path, print)]
    if arguments.request is not None:
        records = [record for record in records if record.request_id == arguments.request]
    elif num_replays := sum(record.is_replay for record in records):
        print(f"{num_replays} records were made by replays and are skipped (--request ID replays one)")
        records = [record for record in records if not record.is_replay]
    if not records:
        raise StartupError(
            "the records contain no request", "name a file of --record, or its directory", ExitCode.USAGE
        )
    if arguments.url is None and all(record.body is None for record in records):
        raise StartupError("the records contain no request bodies", "record with --record-bodies", ExitCode.USAGE)
    take_interrupts()
    with asked_server(arguments, config, {record.model for record in records}) as client:
        client.headers[REPLAY_HEADER] = "1"
        return _replay(client, records, arguments.anyway)


def _replay(client: ChatClient, records: Sequence[RecordedRequest], is_forced: bool) -> int:
    counts = {"same": 0, "differs": 0, "skipped": 0}
    others: dict[tuple[str, ...], str] = {}  # what answers of another identity cannot be compared for
    for record in records:
        identity = tuple(getattr(record, name) for name in NAMES)
        try:
            if record.body is None or record.token_ids is None:
                raise Incomparable("its body is not recorded: --record-bodies")
            if identity in others:
                raise Incomparable(others[identity])
            told = _told_of(client, record, _body_of(record, json.loads(record.body)))
            wrong = [
                f"{name}: {was} recorded, {told.get(key)} now"
                for (key, name), was in zip(NAMES.items(), identity, strict=True)
                if told.get(key) != was
            ]
            if wrong and not is_forced:
                others[identity] = f"another {', '.join(wrong)} (--anyway compares)"
                raise Incomparable(others[identity])
            difference = _difference(record, told)
        except Incomparable as why:
            counts["skipped"] += 1
            print(f"skipped {record.request_id}: {why}")
            continue
        counts["same" if difference is None else "differs"] += 1
        num_tokens = sum(record.num_tokens)
        print(
            f"same    {record.request_id}: {num_tokens} tokens"
            if difference is None
            else f"differs {record.request_id}: {difference}",
            flush=True,
        )
    print(", ".join(f"{num} {what}" for what, num in counts.items()))
    if counts["differs"]:
        return DIFFERS
    return ExitCode.UNREACHABLE if counts["skipped"] else ExitCode.OK


def _told_of(client: ChatClient, record: RecordedRequest, body: dict[str, Any]) -> dict[str, Any]:
    """The `timings` of another run. Raises Incomparable: the server refuses it, or its answer breaks off."""
    with ExitStack() as stack:
        response = stack.enter_context(client.exchange("POST", record.path, body))
        answer = response.read().decode(errors="replace")
    if response.status_code != 200:
        raise Incomparable(f"refused with {response.status_code}: {answer[:200].strip()}")
    told: dict[str, Any] | None = None
    for line in answer.splitlines():  # one document, events, or a document a line
        event = _parsed(line.removeprefix("data:"))
        for holder in (event, event.get("response")):
            if isinstance(holder, dict) and "token_ids" in (holder.get("timings") or {}):
                told = holder["timings"]
    if told is None:
        raise Incomparable(f"its answer is incomplete, or lacks token ids: {answer[-200:].strip()}")
    return told


def _body_of(record: RecordedRequest, body: dict[str, Any]) -> dict[str, Any]:
    """What is sent: the recorded body, with its seed. Of a request that was cut off, no more tokens are computed."""
    if record.path.startswith("/api/"):  # Ollama's options are fields as the others are
        body |= body.pop("options", None) or {}
    own: dict[str, Any] = {"seed": record.seed, "timings": {"tokens": True}}
    dropped = {*DROPPED, *SEEDS}
    if record.was_cut and not any(body.get(name) for name in POLICIES):
        own["max_tokens"] = most = max(1, *record.num_tokens)
        own |= {name: min(least, most) for name in LEAST_TOKENS if (least := body.get(name)) is not None}
        dropped |= {*MOST_TOKENS}
    return {name: value for name, value in body.items() if name not in dropped} | own


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _difference(record: RecordedRequest, told: dict[str, Any]) -> str | None:
    """Where the tokens differ first; None: nowhere. Raises Incomparable: the prompt was another."""
    if told["prompt_digest"] != record.prompt_digest:
        raise Incomparable(
            "its prompt was tokenized differently: it continued a chat that the server remembered, its template shows"
            " the time, or its tenant's context policy cut it (--deterministic tokenizes each chat from its text alone)"
        )
    assert record.token_ids is not None
    pairs: Iterable[tuple[list[int], list[int]]] = zip_longest(record.token_ids, told["token_ids"], fillvalue=[])
    for choice, (was, now) in enumerate(pairs):
        known = now[: len(was)] if record.was_cut else now
        for i, (one, other) in enumerate(zip_longest(was, known)):
            if one != other:
                return f"choice {choice}, token {i} of {len(was)}: {_shown(one)} recorded, {_shown(other)} now"
    return None


def _shown(token: int | None) -> str:
    return "none" if token is None else str(token)
