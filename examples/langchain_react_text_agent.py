"""A text ReAct agent over `SafeLLM`: for base models, which have no tools and no turns.

python examples/langchain_react_text_agent.py
"""

from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_core.language_models import BaseLLM
from langchain_core.prompts import PromptTemplate
from langchain_core.tools import tool

from langchain_safe_llm import SafeLLM

PROMPT = PromptTemplate.from_template(
    """Answer the question with the help of these tools:
{tools}

Write exactly in this form, one step after another:
Question: What is the length of the word cat?
Thought: I must count the letters.
Action: word_length
Action Input: cat
Observation: 3
Thought: I now know the final answer.
Final Answer: 3

An action is one of [{tool_names}]. Begin.

Question: {input}
{agent_scratchpad}"""
)


@tool
def word_length(word: str) -> int:
    """Count the letters of a word."""
    return len(word.strip(" \"'\n"))


def main(llm: BaseLLM | None = None, question: str = "What is the length of the word ensemble?") -> str:
    """Run the agent and return its answer. The agent binds the stop string that ends each step itself."""
    llm = llm or SafeLLM(preset="demo", max_tokens=96)
    agent = create_react_agent(llm, [word_length], PROMPT)
    executor = AgentExecutor(agent=agent, tools=[word_length], max_iterations=4, handle_parsing_errors=True)
    answer = str(executor.invoke({"input": question})["output"])
    print(answer)
    return answer


if __name__ == "__main__":
    main()
