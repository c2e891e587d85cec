"""A hub on a loopback port: its API, its files with ranges and redirects, and what can go wrong with them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LISTING = "the list of files"
LARGE_BYTES = 4096  # files from here on are LFS's, and lie behind a redirect to another host


@dataclass
class Asked:
    """A request as it came."""

    path: str
    range: str | None
    authorization: str | None


@dataclass
class HubStandIn:
    """What it serves, and what was asked of it.

    Args:
        repos: name -> file -> content, of the only commit.
        token: shows nothing without it.
        breaks_after: for each answer with a file, in turn: bytes after which the connection breaks.
        corrupted: names of files whose last byte is another than listed.
        refused: name of a file, or LISTING -> (status, the hub's own code) that it is answered with.
        has_ranges: answers a range with one.
    """

    repos: dict[str, dict[str, bytes]]
    token: str | None = None
    breaks_after: list[int] = field(default_factory=list)
    corrupted: set[str] = field(default_factory=set)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    has_ranges: bool = True
    asked: list[Asked] = field(default_factory=list)
    endpoint: str = ""
    listing_changes: dict[str, object] = field(default_factory=dict)

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repo.encode()).hexdigest()

    @property
    def files_asked(self) -> list[str]:
        """Names of the files that were asked for, in order; a redirect's second request is not counted."""
        return [asked.path.rpartition("/")[2] for asked in self.asked if "/resolve/" in asked.path]


@contextmanager
def running(hub: HubStandIn) -> Iterator[HubStandIn]:
    """Serve until left."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn

    def do_GET(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        authorization = self.headers.get("authorization")
        hub.asked.append(Asked(path, self.headers.get("range"), authorization))
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            self._file(parts[3], hub.repos["/".join(parts[1:3])][parts[3]])
        elif hub.token and authorization != f"Bearer {hub.token}":
            self._answer(401, b"{}")
        elif (refused := hub.refused.get(LISTING if parts[0] == "api" else parts[-1])) is not None:
            self._answer(refused[0], b"{}", {"x-error-code": refused[1]})
        elif parts[:2] == ["api", "models"]:
            self._listing("/".join(parts[2:4]), unquote(parts[5]))
        else:
            repo, name = "/".join(parts[:2]), "/".join(parts[4:])
            content = hub.repos[repo][name]
            if len(content) >= LARGE_BYTES:
                port = self.server.server_address[1]
                self._answer(302, b"", {"location": f"http://localhost:{port}/cdn/{repo}/{name}"})
            else:
                self._file(name, content)

    def _listing(self, repo: str, revision: str) -> None:
        files = self.hub.repos.get(repo)
        if files is None:
            self._answer(404, b"{}", {"x-error-code": "RepoNotFound"})
        elif revision not in ("main", "v1", "refs/pr/1", self.hub.commit(repo)):
            self._answer(404, b"{}", {"x-error-code": "RevisionNotFound"})
        else:
            siblings = [_listed(name, content) for name, content in files.items()]
            listing = {"id": repo, "sha": self.hub.commit(repo), "siblings": siblings, **self.hub.listing_changes}
            self._answer(200, json.dumps(listing).encode())

    def _file(self, name: str, content: bytes) -> None:
        if name in self.hub.corrupted:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start, headers = 0, {"etag": '"x"'}
        if self.hub.has_ranges and (asked := self.headers.get("range")):
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        length = self.hub.breaks_after.pop(0) if self.hub.breaks_after else None
        self._answer(206 if start else 200, content[start:], headers, length)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if length is None else body[:length])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: pytest's output is not its log."""


def _listed(name: str, content: bytes) -> dict[str, object]:
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
    if len(content) >= LARGE_BYTES:
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
