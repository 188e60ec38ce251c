"""LangChain integration of safe_llm: an ensemble of models is used like a single one.

    from langchain_safe_llm import ChatSafeLLM

    model = ChatSafeLLM(preset="demo")
    print(model.invoke("What is the capital of France?").content)

Importing this package needs no torch; the first call does.
"""

from langchain_safe_llm._errors import EnsembleContextOverflowError, EnsembleTimeoutError
from langchain_safe_llm._version import __version__
from langchain_safe_llm.callbacks import EnsembleCallbackHandler, get_ensemble_callback
from langchain_safe_llm.chat_models import ChatSafeLLM
from langchain_safe_llm.llms import SafeLLM

__all__ = [
    "ChatSafeLLM",
    "EnsembleCallbackHandler",
    "EnsembleContextOverflowError",
    "EnsembleTimeoutError",
    "SafeLLM",
    "__version__",
    "get_ensemble_callback",
]
