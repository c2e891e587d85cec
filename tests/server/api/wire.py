"""What the tests of the surfaces share: requests in, answers read back, and the real SDK fed with our bytes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from core.errors import InvalidRequest
from core.types import Delta, FinishReason, Pooling, TokenLogprobs, Usage
from server.api.fields import GenerationCall, GenerationDefaults, PoolingStyle
from server.api.replies import Extras, ReplyContext, StreamReply, Surface

VOCAB_SIZE = 1000
STYLE = PoolingStyle(pooling=Pooling("last"), num_dims=8, generates=True, prompts={"query": "search: "})
DEFAULTS = GenerationDefaults(vocab_size=VOCAB_SIZE, temperature=0.6, top_k=20, top_p=0.9, pooling=STYLE)
WORDS = {1: "Hel", 2: "lo", 3: " é"}
CONTEXT = ReplyContext(
    reply_id="abc123",
    created_s=1_700_000_000,
    model="tiny",
    unix_clock=lambda: 1_700_000_009.5,
    fingerprint="fp_1",
    token_str=lambda token_id: WORDS[token_id],
    token_bytes=lambda token_id: WORDS[token_id].encode(),
)
USAGE = Usage(num_prompt_tokens=7, num_completion_tokens=2, num_cached_tokens=4)
LOGPROBS = (
    TokenLogprobs(token_id=1, logprob=-0.5, top=((1, -0.5), (2, -1.5))),
    TokenLogprobs(token_id=3, logprob=float("-inf"), top=((1, -0.25), (2, -1.5))),
)


def say(text: str, finish_reason: FinishReason | None = None, *logprobs: TokenLogprobs) -> Delta:
    return Delta(text=text, num_tokens=1, finish_reason=finish_reason, logprobs=logprobs or None)


def parse(surface: Surface, **fields: Any) -> GenerationCall:
    return surface.parse(json.dumps({"model": "tiny"} | fields).encode(), lambda model: (model or "tiny", DEFAULTS))


def refusal(surface: Surface, **fields: Any) -> InvalidRequest:
    """The error that these fields are refused with."""
    with pytest.raises(InvalidRequest) as caught:
        parse(surface, **fields)
    return caught.value


def extras_of(timings: dict[str, float] | None) -> Extras:
    return {} if timings is None else {"timings": timings}


def stream(reply: StreamReply, *deltas: tuple[int, Delta], timings: dict[str, float] | None = None) -> bytes:
    """A whole streamed answer."""
    return reply.start() + b"".join(_say(reply, *delta) for delta in deltas) + reply.end(USAGE, extras_of(timings))


def whole(
    surface: Surface,
    call: GenerationCall,
    *deltas: tuple[int, Delta],
    context: ReplyContext = CONTEXT,
    timings: dict[str, float] | None = None,
) -> Any:
    """A whole answer that is not streamed."""
    reply = surface.whole(call, context)
    for choice, delta in deltas:
        reply.add(choice, delta)
    return json.loads(reply.end(USAGE, extras_of(timings if call.wants_timings else None)))


def _say(reply: StreamReply, choice: int, delta: Delta) -> bytes:
    """As an answer does: text that comes alone is told as such."""
    if delta.text and delta.logprobs is None and delta.finish_reason is None:
        return reply.text(choice, delta.text)
    return reply.delta(choice, delta)


def read_events(stream: bytes) -> list[tuple[str | None, Any]]:
    """(name, JSON) of each event, by the letter of the format. [DONE] stays a string."""
    assert stream.endswith(b"\n\n")
    return [_read_event(block) for block in stream.decode()[:-2].split("\n\n")]


def _read_event(block: str) -> tuple[str | None, Any]:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    assert fields.keys() <= {"event", "data"}
    return fields.get("event"), "[DONE]" if fields["data"] == "[DONE]" else json.loads(fields["data"])


@contextmanager
def sdk_reading(answer: bytes, status: int = 200) -> Iterator[openai.OpenAI]:
    """The real SDK, to which every request is answered with these bytes, in odd pieces."""
    is_stream = answer.startswith((b"data:", b"event:", b":"))
    headers = {"content-type": "text/event-stream" if is_stream else "application/json"}

    def reply(_: httpx.Request) -> httpx.Response:
        pieces = (answer[i : i + 7] for i in range(0, len(answer), 7))
        return httpx.Response(status, headers=headers, content=pieces)

    http: Any = httpx.Client(transport=httpx.MockTransport(reply))
    with (
        openai.OpenAI(api_key="k", base_url="http://test/v1", http_client=http, max_retries=0) as client,
    ):
        yield client
