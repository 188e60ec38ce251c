"""Structured output: through a tool that must be called, or through JSON that is enforced while it is written."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.program.llm_program import LLMTextCompletionProgram
from llama_index.core.program.utils import get_program_for_llm, process_streaming_objects
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

__all__ = ["StructuredPrograms"]


class StructuredPrograms(LLM):
    """What LlamaIndex's structured programs lack for a model that can be made to answer in a form.

    With `pydantic_program_mode="llm"` the program asks in words and parses the text. Here the text is enforced, too.
    Otherwise it asks for a tool call, and forgets to require it where it streams.
    """

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """As in the base class; the form of the answer is enforced."""
        form = self._form(output_cls, llm_kwargs)
        return super().structured_predict(output_cls, prompt.model_copy(), form, **prompt_args)  # it gets a parser

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """As `structured_predict`."""
        form = self._form(output_cls, llm_kwargs)
        return await super().astructured_predict(output_cls, prompt.model_copy(), form, **prompt_args)

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if not self._asks_for_json:
            program = get_program_for_llm(output_cls, prompt, self, self.pydantic_program_mode, tool_choice="required")
            yield from program.stream_call(llm_kwargs=dict(llm_kwargs or {}), **prompt_args)
            return
        messages = self._json_messages(output_cls, prompt, prompt_args)
        objects = _Objects(output_cls)
        for response in self.stream_chat(messages, **self._form(output_cls, llm_kwargs)):
            yield objects.see(response)

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not self._asks_for_json:
            program = get_program_for_llm(output_cls, prompt, self, self.pydantic_program_mode, tool_choice="required")
            return await program.astream_call(llm_kwargs=dict(llm_kwargs or {}), **prompt_args)
        messages = self._json_messages(output_cls, prompt, prompt_args)
        responses = await self.astream_chat(messages, **self._form(output_cls, llm_kwargs))
        objects = _Objects(output_cls)
        return (objects.see(response) async for response in responses)

    @property
    def _asks_for_json(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.LLM

    def _form(self, output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """A copy of the call's keywords, as programs take some out, with the schema where text is to follow it."""
        form = {"json_schema": output_cls.model_json_schema()} if self._asks_for_json else {}
        return {**form, **(llm_kwargs or {})}

    def _json_messages(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
    ) -> list[ChatMessage]:
        program: LLMTextCompletionProgram[BaseModel] = LLMTextCompletionProgram.from_defaults(
            output_cls=output_cls, prompt=prompt.model_copy(), llm=self
        )
        return program.prompt.format_messages(llm=self, **prompt_args)  # with the schema explained


class _Objects:
    """The object so far, while its JSON is written."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._last: list[Any] | None = None

    def see(self, response: ChatResponse) -> Any:
        """Return what the text so far describes."""
        found = process_streaming_objects(response, self._output_cls, cur_objects=self._last)
        self._last = found if isinstance(found, list) else [found]
        return self._last[0]
