"""The frameworks over OpenAI's API, by a server's URL: litellm, LangChain, instructor, pydantic-ai, smolagents,
openai-agents, LlamaIndex and AutoGen.

    python tests/clients/frameworks.py litellm smollm2:135m http://127.0.0.1:8000      # run.sh starts a server of the model

Runs in an environment with the one that is named, without Penstock: each wants another release of OpenAI's client. Exits with
1 if it fails. Where the model is small, tools are required and choices few: the way of a call and of its result is checked, not
the model's wisdom. A larger one has to call a tool of its own accord.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal, NamedTuple

from pydantic import BaseModel

from support.clients.checks import run

QUESTION = "What is the weather in Rome?"
MESSAGES = [{"role": "user", "content": QUESTION}]
Place = Literal["Rome", "Oslo"]
PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": PLACE}}


class Served(NamedTuple):
    model: str
    url: str


class Report(BaseModel):
    """The weather of a place."""

    place: Place
    sky: Literal["sunny", "grey"]
    degrees: Literal[12, 24]


class Where(BaseModel):
    place: Place


def get_weather(place: Place) -> str:
    """The weather of a place.

    Args:
        place: A city.
    """
    return f"sunny, 24 degrees in {place}"


def with_litellm(served: Served) -> None:
    """As OpenAI's API and as a server of vLLM. Tools need the package `mcp` beside it."""
    import litellm

    for provider in ("openai", "hosted_vllm"):
        asked = {
            "model": f"{provider}/{served.model}",
            "api_base": f"{served.url}/v1",
            "api_key": f"litellm-{provider}",
            "temperature": 0,
            "max_tokens": 60,
            "messages": MESSAGES,
        }
        whole = litellm.completion(**asked)
        chunks = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
        told = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]  # the last one has the usage alone
        assert "".join(told) == whole.choices[0].message.content
        called = litellm.completion(**asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        [call] = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
        history = [*MESSAGES, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        told = litellm.completion(**asked | {"messages": history}, tools=[WEATHER], tool_choice="none")
        assert told.choices[0].message.content
        Report.model_validate_json(litellm.completion(**asked, response_format=Report).choices[0].message.content)
        later = asyncio.run(litellm.acompletion(**asked))
        assert later.choices[0].message.content == whole.choices[0].message.content


def with_langchain(served: Served) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="langchain-openai", model=served.model, temperature=0, max_tokens=60
    )
    whole = model.invoke(QUESTION)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == whole.content
    bound = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    called = bound.invoke(QUESTION)
    [call] = called.tool_calls
    assert call["args"]["place"] in ("Rome", "Oslo")
    first, *others = bound.stream(QUESTION)
    assert sum(others, first).tool_calls[0]["args"] == call["args"]
    history = [HumanMessage(QUESTION), called, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    assert model.bind_tools([get_weather], tool_choice="none").invoke(history).content
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Report, method=method).invoke(QUESTION), Report)


def with_instructor(served: Served) -> None:
    """In its default mode, which is a tool that has to be called."""
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=f"{served.url}/v1", api_key="instructor", max_retries=0))
    asked = {"model": served.model, "temperature": 0, "max_tokens": 100, "messages": MESSAGES, "max_retries": 0}
    report = client.chat.completions.create(**asked, response_model=Report)
    assert isinstance(report, Report)
    *_, last = client.chat.completions.create_partial(**asked, response_model=Report)
    assert last.model_dump() == report.model_dump()


def with_pydantic_ai(served: Served) -> None:
    """Words, a result with fields, and a tool that the model calls of its own accord, whole and as a stream."""
    from pydantic_ai import Agent, RunContext, Tool, ToolCallPart, ToolDefinition, ToolReturnPart
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    model = OpenAIChatModel(served.model, provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="pydantic-ai"))
    settings = {"temperature": 0, "max_tokens": 100}
    limits = UsageLimits(request_limit=3)
    told = Agent(model, instructions="Be brief.", model_settings=settings).run_sync("Say hello.")
    assert told.output
    found = Agent(model, output_type=Report, model_settings=settings).run_sync(QUESTION, usage_limits=limits)
    assert isinstance(found.output, Report)

    async def until_called(context: RunContext, tool: ToolDefinition) -> ToolDefinition | None:
        """Qwen2.5-Coder 1.5B calls a tool again, by llama.cpp as well, as long as it is offered one."""
        parts = [part for message in context.messages for part in message.parts]
        return None if any(isinstance(part, ToolReturnPart) for part in parts) else tool

    agent = Agent(model, tools=[Tool(get_weather, prepare=until_called)], model_settings=settings)
    answer = agent.run_sync(QUESTION, usage_limits=limits)
    parts = [part for message in answer.all_messages() for part in message.parts]
    assert [part.args_as_dict() for part in parts if isinstance(part, ToolCallPart)] == [{"place": "Rome"}]
    assert answer.output

    async def stream() -> str:
        async with agent.run_stream(QUESTION, usage_limits=limits) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    assert asyncio.run(stream()) == answer.output


def with_smolagents(served: Served) -> None:
    """An agent that has to call a tool in each step; the last answer is in words."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    few = {"temperature": 0, "max_tokens": 60, "parallel_tool_calls": False}
    model = OpenAIModel(served.model, api_base=f"{served.url}/v1", api_key="smolagents", **few)
    agent = ToolCallingAgent(tools=[tool(get_weather)], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
    assert agent.run(QUESTION)
    assert agent.memory.steps[1].observations.startswith("sunny, 24 degrees in ")


def with_openai_agents(served: Served) -> None:
    """A tool that the model calls of its own accord, whole and as a stream, over chats and over responses."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="openai-agents", max_retries=0)

    async def ask(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> None:
        agent = Agent(
            name="Weather",
            instructions="Be brief.",
            model=model,
            model_settings=ModelSettings(temperature=0, max_tokens=100),
            tools=[function_tool(get_weather)],
            tool_use_behavior="stop_on_first_tool",
        )
        whole = await Runner.run(agent, QUESTION)
        assert whole.final_output == get_weather("Rome")
        streamed = Runner.run_streamed(agent, QUESTION)
        names = [getattr(event, "name", None) async for event in streamed.stream_events()]
        assert "tool_called" in names
        assert streamed.final_output == whole.final_output

    async def ask_both() -> None:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            await ask(kind(model=served.model, openai_client=client))

    asyncio.run(ask_both())


def with_llama_index(served: Served) -> None:
    """A tool that the model calls of its own accord, whole and as a stream, and words."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=served.model,
        api_base=f"{served.url}/v1",
        api_key="llama-index",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )
    tools = [FunctionTool.from_defaults(get_weather, fn_schema=Where)]
    called = model.chat_with_tools(tools, user_msg=QUESTION)
    [call] = model.get_tool_calls_from_response(called)
    assert call.tool_kwargs == {"place": "Rome"}
    *_, last = model.stream_chat_with_tools(tools, user_msg=QUESTION)
    assert [each.tool_kwargs for each in model.get_tool_calls_from_response(last)] == [call.tool_kwargs]
    result = ChatMessage(get_weather("Rome"), role="tool", additional_kwargs={"tool_call_id": call.tool_id})
    assert model.chat([ChatMessage(QUESTION, role="user"), called.message, result]).message.content


def with_autogen(served: Served) -> None:
    """A tool that the model calls of its own accord, whole and as a stream."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model=served.model,
        base_url=f"{served.url}/v1",
        api_key="autogen",
        model_info=able,
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )

    async def ask() -> None:
        for is_stream in (False, True):
            few = {"tools": [get_weather], "system_message": "Be brief.", "model_client_stream": is_stream}
            agent = AssistantAgent("weather", model_client=client, **few)
            answer = await agent.run(task=QUESTION)
            assert answer.messages[-1].to_text() == get_weather("Rome")
        # Streams have no usage unless it is asked for.
        *_, last = [part async for part in client.create_stream([UserMessage(content="Hi", source="user")], include_usage=True)]
        assert last.usage.prompt_tokens > 0
        assert last.usage.completion_tokens > 0
        await client.close()

    asyncio.run(ask())


CHECKS = {
    "litellm": with_litellm,
    "langchain": with_langchain,
    "instructor": with_instructor,
    "pydantic-ai": with_pydantic_ai,
    "smolagents": with_smolagents,
    "openai-agents": with_openai_agents,
    "llama-index": with_llama_index,
    "autogen": with_autogen,
}


if __name__ == "__main__":
    sys.exit(run("frameworks", [CHECKS[sys.argv[1]]], lambda _: Served(*sys.argv[2:])))
