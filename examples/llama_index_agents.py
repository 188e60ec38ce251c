"""Two LlamaIndex agents with a tool, run by an ensemble: one calls functions, the other reasons in text (ReAct).

python examples/llama_index_agents.py
"""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent

from llama_index.llms.safe_llm import EnsembleEventHandler, SafeLLM

STOCK = {"apples": 12, "pears": 7}


def count(fruit: str) -> int:
    """How many pieces of a fruit (apples, pears) are in stock."""
    return STOCK.get(fruit.lower(), 0)


async def ask(agent: BaseWorkflowAgent, question: str) -> str:
    """Run an agent and show the calls it makes."""
    handler = agent.run(question, max_iterations=5)
    async for event in handler.stream_events():
        if isinstance(event, ToolCallResult):
            print(f"  {event.tool_name}({event.tool_kwargs}) = {event.tool_output.content}")
    return str(await handler)


async def main(llm: SafeLLM | None = None, question: str = "How many apples are in stock?") -> list[str]:
    """Ask both agents the same."""
    llm = llm or SafeLLM(preset="demo", max_tokens=128)
    # a ReAct agent gives no stop string: without one a model goes on and invents what the tool says
    reasoning = llm.model_copy(update={"stop": ["\nObservation:"]})
    agents: list[BaseWorkflowAgent] = [
        # the first step must be a call: small models rather guess
        FunctionAgent(llm=llm, tools=[count], initial_tool_choice="count", system_prompt="Answer in one sentence."),
        ReActAgent(llm=reasoning, tools=[count]),
    ]
    answers = []
    with EnsembleEventHandler().listening() as totals:
        for agent in agents:
            print(type(agent).__name__)
            answers.append(await ask(agent, question))
            print(f"  {answers[-1]}")
    print(totals.summary())
    return answers


if __name__ == "__main__":
    asyncio.run(main())
