"""Version of the LangChain integration: that of the library it is part of."""

from safe_llm import __version__

__all__ = ["__version__"]
