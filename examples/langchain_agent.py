"""An agent (`create_agent`) with a calculator.

python examples/langchain_agent.py
"""

import ast
import operator
from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from langchain_safe_llm import ChatSafeLLM

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(node: ast.AST) -> float:
    """Compute a parsed expression of numbers and + - * /."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise ValueError("only numbers and + - * / can be computed")


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression, for instance "3 * (4 + 5)"."""
    try:
        return str(value_of(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"Error: {error}"


@wrap_model_call
def compute_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Small models need to be led: they must use a tool on the question, and then say what came out."""
    if isinstance(request.messages[-1], HumanMessage):
        return handler(request.override(tool_choice="any"))
    asked = [*request.messages, HumanMessage("So, what is the answer to my question? Say it in one sentence.")]
    return handler(request.override(messages=asked, tool_choice="none"))


def main(model: BaseChatModel | None = None, question: str = "What is 1234 * 5678?") -> str:
    """Run the agent, print its messages, and return the answer."""
    agent = create_agent(model or ChatSafeLLM(preset="demo"), [calculator], middleware=[compute_first])
    messages = agent.invoke({"messages": [("user", question)]})["messages"]
    for message in messages:
        message.pretty_print()
    return messages[-1].text


if __name__ == "__main__":
    main()
