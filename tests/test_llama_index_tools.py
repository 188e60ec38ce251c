"""SafeLLM in LlamaIndex's agents, structured programs and query engines."""

from __future__ import annotations

import asyncio
import copy
import json
import re

import pytest
from llama_index.core import Document, SummaryIndex, VectorStoreIndex
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ToolCallBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.program import FunctionCallingProgram, LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from llama_index.llms.safe_llm import NoToolCallError
from llama_index_support import call_text, last_turn, loop_of_sync_calls, replying, user
from safe_llm.errors import ConfigError, PromptError, UnknownNameError


@pytest.fixture
def sync_loop():
    with loop_of_sync_calls():
        yield


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


ADD, SHOUT = FunctionTool.from_defaults(add), FunctionTool.from_defaults(shout)


class Place(BaseModel):
    """A place on a map."""

    name: str
    steps: int = Field(description="How far away")


PLACE = {"name": "old oak", "steps": 2}


def calculator(conversation: str) -> str:
    """Add once, then say the result."""
    if found := re.search(r"Result of add:\n(\d+)", conversation):
        return f"It is {found[1]}."
    return call_text("add", a=3, b=4) if '"name": "add"' in conversation else "I cannot add."


# ---------------------------------------------------------------------- calls


async def test_a_call_is_a_block_in_every_way():
    model = replying(calculator)
    prepared = model._prepare_chat_with_tools([ADD], user_msg="3 + 4?")
    messages = prepared.pop("messages")
    responses = [
        model.chat(messages, **prepared),
        list(model.stream_chat(messages, **prepared))[-1],
        await model.achat(messages, **prepared),
        [r async for r in await model.astream_chat(messages, **prepared)][-1],
    ]
    for response in responses:
        (block,) = response.message.blocks
        assert (block.tool_name, block.tool_kwargs) == ("add", {"a": 3, "b": 4})
        assert block.tool_call_id.startswith("call_")
        (record,) = response.message.additional_kwargs["tool_calls"]
        assert record["function"] == {"name": "add", "arguments": '{"a": 3, "b": 4}'}
        assert response.raw["finish_reason"] == "tool_calls"
        (selection,) = model.get_tool_calls_from_response(response)
        assert (selection.tool_name, selection.tool_kwargs) == ("add", {"a": 3, "b": 4})
        assert selection.tool_id == block.tool_call_id
    assert ChatMessage.model_validate_json(responses[0].message.model_dump_json()) == responses[0].message


def test_preparing_does_not_change_the_history():
    history = [ChatMessage(role="system", content="Be brief.")]
    before = copy.deepcopy(history)
    model = replying(calculator)
    response = model.chat_with_tools([ADD], user_msg=ChatMessage(content="3 + 4?"), chat_history=history)
    assert history == before
    assert model.get_tool_calls_from_response(response)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, []),
        ({"tool_required": True}, ["add"]),
        ({"tool_choice": "shout"}, ["shout"]),
        ({"tool_choice": "required"}, ["add"]),
        ({"tool_choice": "any"}, ["add"]),
        ({"tool_choice": "none", "tool_required": True}, []),
        ({"tool_choice": {"type": "function", "function": {"name": "shout"}}}, ["shout"]),
        ({"tool_choice": {"name": "shout"}}, ["shout"]),
    ],
)
def test_a_choice_is_enforced(options, calls):
    def reply(conversation):  # does not want to call anything, but must write something valid if it has to
        return 'Hello. {"'

    model = replying(reply, max_tokens=300)
    tools = [FunctionTool.from_defaults(lambda: "", name=n, description=n) for n in ("add", "shout")]
    response = model.chat_with_tools(tools, user_msg="Do it.", **options)
    assert [c.tool_name for c in model.get_tool_calls_from_response(response, error_on_no_tool_call=False)] == calls


def test_bad_choices():
    model = replying(calculator)
    with pytest.raises(UnknownNameError, match="did you mean 'add'"):
        model.chat_with_tools([ADD], user_msg="?", tool_choice="ad")
    with pytest.raises(ConfigError, match="without tools"):
        model.chat_with_tools([], user_msg="?", tool_required=True)
    with pytest.raises(ConfigError, match="names no tool"):
        model.chat_with_tools([ADD], user_msg="?", tool_choice={"type": "function"})
    with pytest.raises(UnknownNameError, match="did you mean 'tool_choice'"):
        model.chat_with_tools([ADD], user_msg="?", tool_choise="add")
    with pytest.raises(PromptError, match="tools were given with a plain text"):
        replying(calculator, messages_to_prompt=str).chat_with_tools([ADD], user_msg="?")


def test_parallel_calls_are_allowed_or_not():
    model = replying(lambda c: f"{call_text('shout', text='a')}\n{call_text('shout', text='b')}")
    both = model.chat_with_tools([SHOUT], user_msg="?", allow_parallel_tool_calls=True)
    assert [c.tool_kwargs["text"] for c in model.get_tool_calls_from_response(both)] == ["a", "b"]
    one = model.chat_with_tools([SHOUT], user_msg="?")
    assert [c.tool_kwargs["text"] for c in model.get_tool_calls_from_response(one)] == ["a"]
    assert model.predict_and_call([SHOUT], user_msg="?", allow_parallel_tool_calls=True).response == "A\n\nB"


def test_text_before_a_call_is_streamed_and_the_call_is_not():
    model = replying(lambda c: f"Let me see.\n{call_text('add', a=1, b=2)}")
    responses = list(model.stream_chat_with_tools([ADD], user_msg="?"))
    assert "".join(r.delta for r in responses) == "Let me see."
    assert [type(b) for b in responses[-1].message.blocks] == [TextBlock, ToolCallBlock]
    assert model.get_tool_calls_from_response(responses[0], error_on_no_tool_call=False) == []


async def test_a_call_that_is_cut_off_is_no_call_and_no_exception():
    model = replying(lambda c: call_text("shout", text="a" * 50), max_tokens=60)
    response = await model.achat_with_tools([SHOUT], user_msg="?")
    streamed = list(model.stream_chat_with_tools([SHOUT], user_msg="?"))[-1]
    for answer in (response, streamed):
        (invalid,) = answer.message.additional_kwargs["invalid_tool_calls"]
        assert invalid["name"] == "shout"
        assert invalid["error"] == "the answer ended inside a tool call"
        assert invalid["arguments"] in answer.message.content  # whoever reads the answer sees it
        assert "tool_calls" not in answer.message.additional_kwargs
        assert answer.raw["finish_reason"] == "length"
        assert model.get_tool_calls_from_response(answer, error_on_no_tool_call=False) == []
        with pytest.raises(NoToolCallError, match=r"ended inside a tool call.*raise max_tokens"):
            model.get_tool_calls_from_response(answer)


def test_an_answer_without_a_call():
    model = replying(lambda c: "No.")
    response = model.chat_with_tools([ADD], user_msg="?")
    with pytest.raises(ValueError, match=r"has no tool call.*tool_required=True"):
        model.get_tool_calls_from_response(response)
    with pytest.raises(NoToolCallError):
        model.predict_and_call([ADD], user_msg="?")
    assert model.predict_and_call([ADD], user_msg="?", error_on_no_tool_call=False).response == "No."
    assert model.get_tool_calls_from_response(ChatResponse(message=ChatMessage("x")), False) == []


# ---------------------------------------------------------------------- agents


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_a_tool_and_answers(streaming):
    agent = FunctionAgent(llm=replying(calculator), tools=[add], system_prompt="Be exact.", streaming=streaming)
    history = user("Hello.")
    before = copy.deepcopy(history)
    handler = agent.run("What is 3 + 4?", chat_history=history)
    events = [event async for event in handler.stream_events()]
    output = await handler
    assert str(output) == "It is 7."
    assert history == before
    (result,) = [e for e in events if isinstance(e, ToolCallResult)]
    assert (result.tool_kwargs, result.tool_output.content) == ({"a": 3, "b": 4}, "7")
    assert output.raw["safe"]["members"] == ["drafter", "verifier"]
    if streaming:
        assert "It is 7." in [e.response for e in events if isinstance(e, AgentStream)]


async def test_a_function_agent_can_be_told_what_to_call_first():
    model = replying(lambda c: "Done." if "Result of" in c else "I do not want to.", max_tokens=100)
    tool = FunctionTool.from_defaults(lambda: "ok", name="go", description="Go.")
    assert str(await FunctionAgent(llm=model, tools=[tool], initial_tool_choice="go").run("Go!")) == "Done."


def reasoning(conversation: str) -> str:
    """ReAct: act once, then answer. It goes on after its action, as base models do."""
    if found := re.search(r"Observation: (\d+)", last_turn(conversation)):
        return f"Thought: I can answer.\nAnswer: It is {found[1]}."
    return 'Thought: I add.\nAction: add\nAction Input: {"a": 3, "b": 4}\nObservation: 99\nThought: 99.'


async def test_a_react_agent_acts_and_answers():
    agent = ReActAgent(llm=replying(reasoning, stop=["\nObservation:"]), tools=[add])
    assert str(await agent.run("What is 3 + 4?")) == "It is 7."


@pytest.mark.parametrize("can_call", [True, False])
async def test_an_agent_workflow_takes_the_agent_that_fits(can_call):
    reply = calculator if can_call else reasoning
    model = replying(reply, is_function_calling_model=can_call, stop=["\nObservation:"])
    workflow = AgentWorkflow.from_tools_or_functions([add], llm=model)
    kind = FunctionAgent if can_call else ReActAgent
    assert all(isinstance(agent, kind) for agent in workflow.agents.values())
    assert str(await workflow.run("What is 3 + 4?")) == "It is 7."


async def test_an_agent_hands_over_to_another():
    def reply(conversation):
        if "You are the adder" in conversation:
            return calculator(conversation)
        return call_text("handoff", to_agent="adder", reason="numbers")

    model = replying(reply)
    agents = [
        FunctionAgent(name="boss", description="Leads.", llm=model, system_prompt="Boss.", can_handoff_to=["adder"]),
        FunctionAgent(name="adder", description="Adds.", llm=model, system_prompt="You are the adder", tools=[add]),
    ]
    output = await AgentWorkflow(agents=agents, root_agent="boss").run("What is 3 + 4?")
    assert (str(output), output.current_agent_name) == ("It is 7.", "adder")


# ---------------------------------------------------------------------- structured output


def structured(conversation: str) -> str:
    """The place, as a call if there is a tool, else as JSON among prose."""
    text = json.dumps(PLACE)
    return call_text("Place", **PLACE) if "<tool_call>" in conversation else f"{text} I guess."


MODES = ["default", "function", "llm"]
WHERE = PromptTemplate("Where is it, {who}?")


@pytest.mark.parametrize("mode", MODES)
async def test_structured_predict(mode):
    model = replying(structured, pydantic_program_mode=mode)
    kwargs = {"max_tokens": 500} | ({} if mode == "llm" else {"tool_required": True})  # programs take that one out
    before = dict(kwargs)
    assert model.structured_predict(Place, WHERE, llm_kwargs=kwargs, who="Jim") == Place(**PLACE)
    assert await model.astructured_predict(Place, WHERE, llm_kwargs=kwargs, who="Jim") == Place(**PLACE)
    assert kwargs == before
    assert WHERE.output_parser is None  # neither is the prompt changed


@pytest.mark.parametrize("mode", MODES)
async def test_structured_predict_enforces_the_schema(mode):
    model = replying(lambda c: "I would rather talk.", pydantic_program_mode=mode)

    class Choice(BaseModel):
        """A choice."""

        yes: bool

    assert isinstance(model.structured_predict(Choice, WHERE, who="Jim").yes, bool)
    assert isinstance((await model.astructured_predict(Choice, WHERE, who="Jim")).yes, bool)
    *_, last = model.stream_structured_predict(Choice, WHERE, who="Jim")
    assert isinstance(last.yes, bool)


@pytest.mark.parametrize("mode", MODES)
async def test_streamed_structured_predict_ends_with_the_object(mode):
    model = replying(structured, pydantic_program_mode=mode)
    objects = list(model.stream_structured_predict(Place, WHERE, who="Jim"))
    assert objects[-1] == Place(**PLACE)
    stream = await model.astream_structured_predict(Place, WHERE, who="Jim")
    assert [o async for o in stream][-1] == Place(**PLACE)
    if mode == "llm":  # the text grows; a call comes whole
        assert len({getattr(o, "name", None) for o in objects}) > 2
    assert WHERE.output_parser is None


@pytest.mark.parametrize("mode", MODES)
async def test_a_structured_llm(mode):
    model = replying(structured, pydantic_program_mode=mode, system_prompt="Be exact.").as_structured_llm(Place)
    assert model.complete("Where?").raw == Place(**PLACE)
    assert (await model.achat(user("Where?"))).raw == Place(**PLACE)
    assert list(model.stream_chat(user("Where?")))[-1].raw == Place(**PLACE)


@pytest.mark.parametrize("way", ["predict", "apredict"])
async def test_the_system_prompt_is_in_structured_calls(way):
    seen = []

    def reply(conversation):
        seen.append(conversation)
        return structured(conversation)

    model = replying(reply, system_prompt="Be exact.")
    if way == "predict":
        model.structured_predict(Place, WHERE, who="Jim")
    else:
        await model.astructured_predict(Place, WHERE, who="Jim")
    assert max(seen, key=len).count("Be exact.") == 1


def test_programs_of_their_own():
    prompt = "Where is it?"
    program = FunctionCallingProgram.from_defaults(Place, prompt, llm=replying(structured))
    assert program() == Place(**PLACE)
    model = replying(structured, is_chat_model=False, completion_to_prompt=lambda p: f"{p}\nAssistant:\n")
    text = LLMTextCompletionProgram.from_defaults(output_cls=Place, prompt_template_str=prompt, llm=model)
    assert text(llm_kwargs={"json_schema": Place.model_json_schema()}) == Place(**PLACE)


def test_a_structured_answer_that_is_cut_off_says_so():
    model = replying(structured, max_tokens=30)
    with pytest.raises(NoToolCallError, match="raise max_tokens"):
        model.structured_predict(Place, WHERE, who="Jim")


# ---------------------------------------------------------------------- query engines

TEXTS = [f"Chapter {i}. {word} lies under the old oak." for i, word in enumerate(("Gold", "Silver", "Copper"))]


def librarian(conversation: str) -> str:
    """Say which treasures the context names."""
    found = [word for word in ("Gold", "Silver", "Copper") if word in conversation]
    return f"{' and '.join(found) or 'Nothing'}."


@pytest.mark.usefixtures("sync_loop")
@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_chat", [True, False])
def test_query_engines(mode, streaming, is_chat):
    options = {} if is_chat else {"completion_to_prompt": lambda prompt: f"{prompt}\nAssistant:\n"}
    model = replying(librarian, is_chat_model=is_chat, **options)
    index = VectorStoreIndex.from_documents([Document(text=t) for t in TEXTS], embed_model=MockEmbedding(8))
    engine = index.as_query_engine(llm=model, response_mode=mode, streaming=streaming, similarity_top_k=3)
    answer = engine.query("What lies under the oak?")
    text = "".join(answer.response_gen) if streaming else str(answer)
    assert {w for w in ("Gold", "Silver", "Copper") if w in text}
    if mode != "refine":
        assert all(word in text for word in ("Gold", "Silver", "Copper"))


async def test_an_async_query():
    index = SummaryIndex.from_documents([Document(text=t) for t in TEXTS])
    engine = index.as_query_engine(llm=replying(librarian), response_mode="tree_summarize", use_async=False)
    answers = await asyncio.gather(*(engine.aquery("What lies under the oak?") for _ in range(3)))
    assert {str(a) for a in answers} == {"Gold and Silver and Copper."}


@pytest.mark.usefixtures("sync_loop")
def test_a_chat_engine_remembers():
    engine = SimpleChatEngine.from_defaults(llm=replying(lambda c: f"Turn {c.count('User:')}."))
    assert [str(engine.chat("Hi.")) for _ in range(3)] == ["Turn 1.", "Turn 2.", "Turn 3."]
    assert "".join(engine.stream_chat("Hi.").response_gen) == "Turn 4."
