"""Agents' packages as their users call them: `python agent_packages.py NAME URL` prints what came of it, as JSON.

It runs in an environment of its own (make clients), and asks a server whose model plays a part.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

QUESTION, FORM_QUESTION, MODEL = "How warm is it in Köln?", "Who was Ada?", "played"


class Person(BaseModel):
    name: str
    born: int


def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"21 degrees in {city} for {days}"


def openai_agents(url: str) -> Any:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    found: list[Any] = []

    async def loop(kind: Any, streams: bool) -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            model = kind(model=MODEL, openai_client=client)
            tool = function_tool(weather, name_override="get_weather")
            agent = Agent(name="a", instructions="Be brief.", model=model, tools=[tool])
            if streams:
                result: Any = Runner.run_streamed(agent, QUESTION)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, QUESTION)
            found.append([result.final_output, [one.type for one in result.new_items]])
            form = Agent(name="b", model=model, output_type=Person)
            found.append((await Runner.run(form, FORM_QUESTION)).final_output.model_dump())

    async def all_of_them() -> None:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            for streams in (False, True):
                await loop(kind, streams)

    asyncio.run(all_of_them())
    return found


def langchain(url: str) -> Any:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    found: list[Any] = []
    models: list[Any] = [
        ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0, use_responses_api=uses_responses)
        for uses_responses in (False, True)
    ]
    for model in (*models, ChatOllama(model=MODEL, base_url=url.removesuffix("/v1"))):
        bound = model.bind_tools([tool("get_weather")(weather)])
        for streams in (False, True):
            messages: list[Any] = [HumanMessage(QUESTION)]
            for _ in range(2):
                if streams:
                    parts = list(bound.stream(messages))
                    answer = parts[0]
                    for part in parts[1:]:
                        answer += part
                else:
                    answer = bound.invoke(messages)
                messages.append(answer)
                messages += [ToolMessage(weather(**one["args"]), tool_call_id=one["id"]) for one in answer.tool_calls]
            found.append([answer.text, [len(getattr(one, "tool_calls", ())) for one in messages]])
        for method in ("function_calling", "json_schema", "json_mode"):
            structured = model.with_structured_output(Person, method=method)
            for made in (structured.invoke(FORM_QUESTION), list(structured.stream(FORM_QUESTION))[-1]):
                found.append(made.model_dump())
    return found


def embeddings(url: str) -> Any:
    """What each client makes of the same texts, and how Cohere's ranks them."""
    from cohere import ClientV2
    from langchain_ollama import OllamaEmbeddings
    from langchain_openai import OpenAIEmbeddings

    base, texts = url.removesuffix("/v1"), ["a warm day", "a cold night"]
    makers: list[Any] = [
        OpenAIEmbeddings(model=MODEL, base_url=url, api_key="none", max_retries=0, check_embedding_ctx_length=False),
        OllamaEmbeddings(model=MODEL, base_url=base),
    ]
    found = [[one.embed_documents(texts), one.embed_query(texts[0])] for one in makers]
    (first, first_query), (other, other_query) = found
    ranked = ClientV2("none", base_url=base).rerank(model=MODEL, query=texts[1], documents=texts, top_n=1)
    return [
        max(abs(a - b) for one, same in zip(first, other, strict=True) for a, b in zip(one, same, strict=True)) < 1e-6,
        [first_query == first[0], other_query == other[0], len(first[0])],
        [[one.index, round(one.relevance_score, 5)] for one in ranked.results],
    ]


def instructor(url: str) -> Any:
    from instructor import Mode, from_openai
    from openai import OpenAI

    found = []
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.PARALLEL_TOOLS):
        client = from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        form: Any = Person
        if mode is Mode.PARALLEL_TOOLS:
            form = Iterable[Person]
        made = client.chat.completions.create(
            model=MODEL, response_model=form, max_retries=0, messages=[{"role": "user", "content": FORM_QUESTION}]
        )
        found.append(made.model_dump() if isinstance(made, Person) else [one.model_dump() for one in made])
        if mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
            question: Any = [{"role": "user", "content": FORM_QUESTION}]
            parts = client.chat.completions.create_partial(
                model=MODEL, response_model=Person, max_retries=0, messages=question
            )
            found.append(list(parts)[-1].model_dump())
    return found


def pydantic_ai(url: str) -> Any:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    found: list[Any] = []

    async def loop(kind: Any) -> None:
        model = kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
        agent = Agent(model)
        agent.tool_plain(weather, name="get_weather")
        found.append((await agent.run(QUESTION)).output)
        async with agent.run_stream(QUESTION) as result:
            found.append(await result.get_output())
        for output in (ToolOutput(Person), NativeOutput(Person), PromptedOutput(Person)):
            former = Agent(model, output_type=output)
            found.append((await former.run(FORM_QUESTION)).output.model_dump())
            async with former.run_stream(FORM_QUESTION) as formed:
                found.append((await formed.get_output()).model_dump())

    async def all_of_them() -> None:
        for kind in (OpenAIChatModel, OpenAIResponsesModel):
            await loop(kind)

    asyncio.run(all_of_them())
    return found


def litellm(url: str) -> Any:
    import os

    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched
    import litellm
    from litellm import completion, stream_chunk_builder

    litellm.suppress_debug_info = True  # it would be printed

    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    found: list[Any] = []
    bases = {
        "openai": url,
        "hosted_vllm": url,
        "anthropic": url.removesuffix("/v1"),
        "ollama_chat": url.removesuffix("/v1"),
    }
    for provider, base in bases.items():
        asked: Any = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0}
        asked["tools"] = [{"type": "function", "function": function}]
        for streams in (False, True):
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            for _ in range(2):
                answer = completion(messages=messages, stream=streams, **asked)
                if streams:
                    answer = stream_chunk_builder(list(answer), messages=messages)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    content = weather(json.loads(call.function.arguments)["city"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            found.append([messages[-1]["content"], len(messages)])
    made = completion(
        model=f"hosted_vllm/{MODEL}", api_base=url, messages=[{"role": "user", "content": FORM_QUESTION}],
        response_format=Person,
    )  # fmt: skip
    found.append(json.loads(made.choices[0].message.content))
    return found


def llama_index(url: str) -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=url, api_key="none", max_retries=0, is_chat_model=True, is_function_calling_model=True
    )
    tool = FunctionTool.from_defaults(weather, name="get_weather")
    called = model.chat_with_tools([tool], user_msg=QUESTION)
    calls = model.get_tool_calls_from_response(called)
    history = [ChatMessage(role="user", content=QUESTION), called.message]
    history += [
        ChatMessage(role="tool", content=weather(**one.tool_kwargs), additional_kwargs={"tool_call_id": one.tool_id})
        for one in calls
    ]
    streamed = "".join(one.delta or "" for one in model.stream_chat(history))
    form = model.structured_predict(Person, PromptTemplate(FORM_QUESTION))
    return [model.chat(history).message.content, streamed, form.model_dump()]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2]), ensure_ascii=False))
