"""A chain-of-thought chain (prompt | model | parser), streamed, and then where the ensemble acted.

python examples/langchain_chain_of_thought.py
"""

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_safe_llm import ChatSafeLLM, get_ensemble_callback

QUESTION = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in all?"

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Think step by step. End with: The answer is N."), ("human", "{question}")]
)


def main(model: BaseChatModel | None = None) -> str:
    """Stream the answer and return it."""
    model = model or ChatSafeLLM(preset="demo", max_tokens=200)
    chain = PROMPT | model | StrOutputParser()
    answer = ""
    with get_ensemble_callback() as ensemble:
        for text in chain.stream({"question": QUESTION}):
            print(text, end="", flush=True)
            answer += text
    print("\n")
    for point in ensemble.points:
        did = f"replaced by {point['token']!r}" if point["replaced"] else "confirmed"
        probabilities = ", ".join(f"{member} {p:.2f}" for member, p in point["probs"].items())
        print(f"token {point['position']:3}: {point['token_before']!r} {did} ({probabilities})")
    print()
    ensemble.print_summary()
    return answer


if __name__ == "__main__":
    main()
