"""What an ensemble did over a whole batch of a chain: the callback handler's summary.

python examples/langchain_callback_summary.py
"""

from langchain_core.language_models import BaseChatModel
from langchain_core.prompts import ChatPromptTemplate

from langchain_safe_llm import ChatSafeLLM, EnsembleCallbackHandler

CITIES = ["Paris", "Rome", "Berlin", "Madrid"]

PROMPT = ChatPromptTemplate.from_template("Name one famous building in {city}, in one short sentence.")


def main(model: BaseChatModel | None = None) -> EnsembleCallbackHandler:
    """Ask about several cities at once; the four requests share the engine's batches."""
    model = model or ChatSafeLLM(preset="demo", max_tokens=32)
    handler = EnsembleCallbackHandler()
    messages = (PROMPT | model).batch([{"city": city} for city in CITIES], {"callbacks": [handler]})
    for city, message in zip(CITIES, messages, strict=True):
        print(f"{city}: {message.text}")
    print()
    handler.print_summary()
    return handler


if __name__ == "__main__":
    main()
