"""What is fetched from a hub, held against a stand-in of its HTTP API."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from core.errors import ExitCode, StartupError
from server.commands.hub import Hub, NotFetched, cached, cached_models, environment_hub, fetch
from server.values import HubId
from tests.server.hub_stand_in import LISTING, HubStandIn, running
from tests.server.tiny_model import write_tiny_model

WEIGHTS = bytes(range(256)) * 40
TINY = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}' * 400,
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"hi",
    "additional_chat_templates/tools.jinja": b"tools",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "modeling_tiny.py": b"import os",
    "README.md": b"# Tiny",
}
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
SHARDED = {
    **{name: TINY[name] for name in ("config.json", "tokenizer.json")},
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": WEIGHTS[::-1],
}
MODEL = HubId("org/tiny")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    monkeypatch.setenv("NO_PROXY", "*")
    with running(HubStandIn({"org/tiny": dict(TINY), "org/sharded": dict(SHARDED)})) as hub:
        yield hub
    huggingface_hub.close_session()


@pytest.fixture
def hub(stand_in: HubStandIn, tmp_path: Path) -> Hub:
    return Hub(stand_in.endpoint, tmp_path / "hub")


def no_report(done: int, total: int) -> None: ...


def refusal(hub: Hub, model: HubId = MODEL) -> StartupError:
    with pytest.raises(StartupError) as caught:
        fetch(hub, model, no_report)
    assert caught.value.exit_code == ExitCode.MODEL
    return caught.value


def break_at_3000(stand_in: HubStandIn) -> None:
    """The model's weights stop there, and the next attempt brings nothing."""
    sizes = [len(TINY[name]) for name in TINY if name.endswith((".json", ".jinja"))]
    stand_in.breaks_after = [*sizes, 3000, 0]


def test_only_what_is_served_is_fetched_and_only_once(hub: Hub, stand_in: HubStandIn) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch(hub, MODEL, lambda done, total: seen.append((done, total)))
    found = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {
        name: content
        for name, content in TINY.items()
        if name not in ("consolidated.safetensors", "pytorch_model.bin", "modeling_tiny.py", "README.md")
    }
    assert len(stand_in.files_asked) == len(found)
    assert seen == sorted(seen)
    assert seen[-1] == (sum(map(len, found.values())),) * 2
    assert fetch(hub, MODEL, no_report) == path
    assert len(stand_in.files_asked) == len(found)
    # other programs find them in the cache
    assert huggingface_hub.try_to_load_from_cache("org/tiny", "config.json", hub.cache) == str(path / "config.json")
    assert [repo.repo_id for repo in huggingface_hub.scan_cache_dir(hub.cache).repos] == ["org/tiny"]
    assert cached_models(hub) == [(MODEL, path)]


def test_shards_are_those_of_the_index(hub: Hub, stand_in: HubStandIn) -> None:
    path = fetch(hub, HubId("org/sharded"), no_report)
    assert (path / "model-2.safetensors").read_bytes() == WEIGHTS[::-1]
    assert sorted(stand_in.files_asked) == sorted(SHARDED)


@pytest.mark.parametrize("name", ["../../model.safetensors", "/etc/passwd", "model.bin", 7])
def test_an_index_may_not_lead_elsewhere(name: object, hub: Hub, stand_in: HubStandIn) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    stand_in.repos["org/sharded"]["model.safetensors.index.json"] = index
    assert repr(name) in refusal(hub, HubId("org/sharded")).cause


@pytest.mark.parametrize("revision", ["v1", "main", "refs/pr/1"])
def test_a_revision_is_remembered_by_its_name(revision: str, hub: Hub, stand_in: HubStandIn) -> None:
    path = fetch(hub, HubId("org/tiny", revision), no_report)
    assert path.name == stand_in.commit("org/tiny")
    assert fetch(replace(hub, is_offline=True), HubId("org/tiny", revision), no_report) == path
    assert fetch(replace(hub, is_offline=True), HubId("org/tiny", path.name), no_report) == path
    assert [str(name) for name, _ in cached_models(hub)] == [f"org/tiny@{revision}".removesuffix("@main")]


def test_a_broken_connection_goes_on_where_it_broke(hub: Hub, stand_in: HubStandIn) -> None:
    stand_in.repos["org/tiny"] = {name: TINY[name] for name in ("model.safetensors", "config.json", "tokenizer.json")}
    sizes = [len(TINY["config.json"]), len(TINY["tokenizer.json"])]
    stand_in.breaks_after = [*sizes, 3000, 2000]
    path = fetch(hub, MODEL, no_report)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [asked.range for asked in stand_in.asked if asked.path.startswith("/cdn/") and "model" in asked.path]
    assert ranges == [None, "bytes=3000-", "bytes=5000-"]


def test_a_hub_that_stops_is_told_and_the_next_start_goes_on_with_room_for_the_rest(
    hub: Hub, stand_in: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at_3000(stand_in)
    error = refusal(hub)
    assert "model.safetensors stopped at 2.9 KiB of 10 KiB" in error.cause
    assert error.fix == "start again: the download continues from there"
    stand_in.asked.clear()
    free = shutil.disk_usage(hub.cache)._replace(free=len(WEIGHTS) - 3000)
    monkeypatch.setattr("server.commands.hub.shutil.disk_usage", lambda folder: free)
    assert (fetch(hub, MODEL, no_report) / "model.safetensors").read_bytes() == WEIGHTS
    assert [asked.range for asked in stand_in.asked if asked.path.startswith("/cdn/")] == ["bytes=3000-"]
    stand_in.repos["org/tiny"]["model.safetensors"] = WEIGHTS[:-1]
    assert "more in" in refusal(hub).cause


def test_a_hub_without_ranges_begins_again(hub: Hub, stand_in: HubStandIn) -> None:
    stand_in.has_ranges = False
    stand_in.breaks_after = [1000, 2000]
    stand_in.repos["org/tiny"] = {name: TINY[name] for name in ("tokenizer.json", "config.json", "model.safetensors")}
    path = fetch(hub, MODEL, no_report)
    assert (path / "tokenizer.json").read_bytes() == TINY["tokenizer.json"]
    (path / "tokenizer.json").resolve().unlink()
    stand_in.breaks_after = [1000, 1000]
    assert "stopped" in refusal(hub).cause


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_hash_is_refused_and_nothing_is_kept(name: str, hub: Hub, stand_in: HubStandIn) -> None:
    stand_in.corrupted = {name}
    error = refusal(hub)
    assert f"{name} is not what the hub lists" in error.cause
    kept = {blob.read_bytes() for blob in hub.cache.glob("models--org--tiny/blobs/*")}
    assert kept < set(TINY.values()) - {TINY[name]}
    assert refusal(replace(hub, is_offline=True)).cause.startswith("model org/tiny is not in")
    stand_in.corrupted = set()
    assert (fetch(hub, MODEL, no_report) / name).read_bytes() == TINY[name]


def test_a_model_that_is_not_there_is_told_with_what_lies_near(hub: Hub) -> None:
    error = refusal(hub, HubId("org/tyni"))
    assert str(hub.cache) in error.cause
    assert hub.endpoint in error.cause
    assert error.fix.endswith("the cache has no model")
    fetch(hub, MODEL, no_report)
    assert "org/tiny has no revision 'v3'" in refusal(hub, HubId("org/tiny", "v3")).cause
    for near in (HubId("org/tyni"), HubId("gro/Tiny"), HubId("org/tiny", "v3")):
        assert refusal(hub, near).fix.endswith("did you mean org/tiny?")
    for other in (HubId("meta/other"), HubId("org/both")):
        assert refusal(hub, other).fix.endswith("the cache has org/tiny")


def test_without_the_hub_the_cache_serves(hub: Hub, tmp_path: Path) -> None:
    unreachable = Hub("http://127.0.0.1:1", hub.cache)  # RFC 6335: port 1 is tcpmux, which nobody runs
    assert "http://127.0.0.1:1 cannot be reached" in refusal(unreachable).cause
    assert "HF_HUB_OFFLINE" in refusal(replace(hub, is_offline=True)).cause
    path = fetch(hub, MODEL, no_report)
    assert fetch(unreachable, MODEL, no_report) == path
    (path / "model.safetensors").unlink()
    assert "cannot be reached" in refusal(unreachable).cause


def test_the_token_is_shown_to_the_hub_alone(hub: Hub, stand_in: HubStandIn) -> None:
    stand_in.token = "hf_secret"
    assert "only with a token" in refusal(hub).cause
    stand_in.asked.clear()
    fetch(replace(hub, token="hf_secret"), MODEL, no_report)
    shown = {asked.path.startswith("/cdn/"): asked.authorization for asked in stand_in.asked}
    assert shown == {False: "Bearer hf_secret", True: None}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_out_of_order_is_told_and_the_cache_serves(status: int, hub: Hub, stand_in: HubStandIn) -> None:
    stand_in.refused = {LISTING: (status, "")}
    assert refusal(hub).cause.endswith(f"answered {status}")
    stand_in.refused = {}
    path = fetch(hub, MODEL, no_report)
    stand_in.refused = {LISTING: (status, "")}
    assert fetch(hub, MODEL, no_report) == path


@pytest.mark.parametrize(
    ("refused", "token", "cause", "fix"),
    [
        ({"config.json": (401, "GatedRepo")}, None, "org/tiny is gated: .* no token is given", "accept its terms at"),
        ({"config.json": (403, "GatedRepo")}, "hf_other", "the token given .* has not accepted them", "/org/tiny, and"),
        ({LISTING: (403, "")}, None, "answered 403", "HF_TOKEN=hf_"),
        ({LISTING: (401, "")}, None, "shown only with a token", "check the name"),
        ({LISTING: (401, "")}, "hf_other", "hidden from the token given", "check the name"),
    ],
)
def test_a_model_that_this_token_may_not_read_is_told(
    refused: dict[str, tuple[int, str]], token: str | None, cause: str, fix: str, hub: Hub, stand_in: HubStandIn
) -> None:
    stand_in.refused = refused
    error = refusal(replace(hub, token=token))
    assert re.search(cause, error.cause)
    assert fix in error.fix


def test_a_login_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_bytes(b"\xff")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(StartupError, match=str(tmp_path / "token")):
        environment_hub()


def test_what_is_not_fetched_yet_is_none_of_what_serve_would_refuse(hub: Hub) -> None:
    with pytest.raises(NotFetched, match="steploop models pull org/tiny"):
        cached(hub, MODEL)
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE") as caught:
        cached(replace(hub, is_offline=True), MODEL)
    assert not isinstance(caught.value, NotFetched)
    path = fetch(hub, MODEL, no_report)
    assert cached(hub, MODEL) == path


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"../.."])
def test_a_reference_that_is_none_is_as_no_model(content: bytes, hub: Hub) -> None:
    fetch(hub, MODEL, no_report)
    (hub.cache / "models--org--tiny" / "refs" / "main").write_bytes(content)
    assert cached_models(hub) == []
    assert "is not in" in refusal(replace(hub, is_offline=True)).cause


@pytest.mark.parametrize(
    ("files", "fix"),
    [
        (["pytorch_model.bin", "config.json", "tokenizer.json"], "pickled weights can run code"),
        (["tiny-Q8_0.gguf"], r"--model FILE\.gguf"),
        (["config.json"], r"a tokenizer\.json"),
    ],
)
def test_what_is_not_served_is_refused_before_it_is_fetched(
    files: list[str], fix: str, hub: Hub, stand_in: HubStandIn
) -> None:
    stand_in.repos["org/tiny"] = dict.fromkeys(files, b"content")
    with pytest.raises(StartupError, match=fix):
        fetch(hub, MODEL, no_report)
    assert stand_in.files_asked == []


@pytest.mark.parametrize(
    "changes",
    [
        {"sha": "../../main"},
        {"sha": None},
        {"siblings": None},
        {"siblings": [{"rfilename": "config.json", "size": 1, "blobId": "../x"}]},
        {"siblings": [{"rfilename": "config.json", "size": -1, "blobId": "0" * 40}]},
    ],
)
def test_a_listing_that_is_none_is_refused(changes: dict[str, object], hub: Hub, stand_in: HubStandIn) -> None:
    stand_in.listing_changes = changes
    assert "does not answer as a hub" in refusal(hub).cause


def test_a_model_of_the_hub_is_served_by_its_name(stand_in: HubStandIn, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    stand_in.repos["org/real"] = {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}
    environment = os.environ | {"HF_ENDPOINT": stand_in.endpoint, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "server", "chat", "-q", "hi", "--model", "org/real"]
    command += ["--device", "cpu", "--kv-memory", "4MiB"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(stand_in.files_asked)
