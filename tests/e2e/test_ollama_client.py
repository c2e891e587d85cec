"""The ollama package, as its users have it, against the real server."""

from typing import Any

import ollama
import pytest
from ollama import AsyncClient

from tests.e2e.replay import MODEL, playing
from tests.e2e.test_tool_loops import ANSWER, QUESTION, TOOLS, calls_of, play
from tests.server.running_server import Running, load_with, run, serving
from tests.server.simulated_engine import LogprobRunner
from tests.server.simulated_server import MODEL as SERVED
from tests.server.test_embeddings import STYLE, vector_of


def session(scenario: Any) -> None:
    async def scene() -> None:
        async with playing("hermes", play("hermes", "Let me look.")) as running:
            client = AsyncClient(host=f"http://127.0.0.1:{running.server.listener.port}")
            await scenario(client, running)
            await client._client.aclose()

    run(scene)


def test_a_loop_of_chat_whole_and_streamed() -> None:
    async def scenario(client: AsyncClient, running: Running) -> None:
        for streams in (False, True):
            messages: list[Any] = [QUESTION]
            for is_last in (False, True):
                if streams:
                    parts = [part async for part in await client.chat(MODEL, messages, tools=TOOLS, stream=True)]
                    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
                    content = "".join(part.message.content or "" for part in parts)
                    calls = [call for part in parts for call in part.message.tool_calls or ()]
                    last = parts[-1]
                else:
                    last = await client.chat(MODEL, messages, tools=TOOLS)
                    content, calls = last.message.content or "", list(last.message.tool_calls or ())
                assert (last.done_reason, last.model) == ("stop", MODEL)
                assert (last.prompt_eval_count or 0) > 0 < (last.eval_count or 0)
                named = [(call.function.name, dict(call.function.arguments)) for call in calls]
                assert (content, named) == ((ANSWER, []) if is_last else ("Let me look.", calls_of("hermes")))
                messages.append({"role": "assistant", "content": content, "tool_calls": calls or None})
                for name, _ in named:
                    said = "21 degrees" if name == "get_weather" else "noon"
                    messages.append({"role": "tool", "tool_name": name, "content": said})

    session(scenario)


def test_what_is_asked_about_models_and_what_is_refused() -> None:
    async def scenario(client: AsyncClient, running: Running) -> None:
        (model,) = (await client.list()).models
        (loaded,) = (await client.ps()).models
        assert (model.model, loaded.model) == (MODEL, MODEL)
        shown = await client.show(f"{MODEL}:latest")
        assert {"completion", "tools"} <= set(shown.capabilities or ())
        details = shown.details
        assert details is not None
        assert (details.parameter_size, details.quantization_level, details.format) == (
            "1.0K",
            "float32",
            "safetensors",
        )
        assert (model.details, len(model.digest or "")) == (details, 64)
        first = await client.generate(MODEL, "How warm is it?")
        assert (await client.generate(MODEL, "21 degrees", context=first.context)).response == ANSWER
        assert (await client.generate(MODEL, "21 degrees")).response == ANSWER
        parts = [part.response async for part in await client.generate(MODEL, "21 degrees", stream=True)]
        assert "".join(parts) == ANSWER
        for asked, status in (({"model": "other"}, 404), ({"options": {"mirostat": 2}}, 400)):
            with pytest.raises(ollama.ResponseError) as refused:
                await client.chat(**{"model": MODEL, "messages": [QUESTION]} | asked)  # type: ignore[call-overload]
            assert refused.value.status_code == status

    session(scenario)


def test_logprobs_and_embeddings_whole_and_cut() -> None:
    async def scene() -> None:
        async with serving(load_with(LogprobRunner, pooling=STYLE)) as running:
            client = AsyncClient(host=f"http://127.0.0.1:{running.server.listener.port}")
            answer = await client.generate(SERVED, "hello", logprobs=True, top_logprobs=2, options={"num_predict": 5})
            told = answer.logprobs or ()
            assert [len(one.top_logprobs or ()) for one in told] == [2] * len(told)
            assert 0 < len(told) <= (answer.eval_count or 0)
            found = await client.embed(SERVED, ["hello", "there you are"], dimensions=3)
            assert list(map(list, found.embeddings)) == [
                pytest.approx(vector_of(text, 3), abs=1e-6) for text in ("hello", "there you are")
            ]
            assert (await client.embeddings(SERVED, "hello")).embedding == pytest.approx(vector_of("hello"), abs=1e-6)
            with pytest.raises(ollama.ResponseError) as refused:
                await client.embed(SERVED, "x " * 12_000, truncate=False)
            assert refused.value.status_code == 400
            assert len((await client.embed(SERVED, "x " * 12_000)).embeddings) == 1
            await client._client.aclose()

    run(scene)
