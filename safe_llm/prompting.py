"""Prompts as a member's ids: through its own chat template, control tokens from the template only.

Every string of the user is marked before the template sees it: control-token spellings in it are broken by a random
separator. The control tokens that are left in the rendered chat are the template's own: they get their private names,
the separators go, and the whole is encoded by a tokenizer that knows control tokens by these names only. So it is cut
exactly as the member's own tokenizer cuts it, white space next to control tokens included.

Fallbacks, each visible in `Prompter.notes` and in `safe-llm inspect`:
no template            a transcript, `User:` and `Assistant:` on lines of their own, for base models
no tools, or in another form than the ensemble's
                       the tools are explained in the system text; tool calls and results are text
no system role         the system text is put before the first user message
roles must alternate   neighbours of one role are merged
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from safe_llm.errors import ModelCorruptError, PromptError, UnsupportedModelError
from safe_llm.tool_calling import CALL_BEGIN, CALL_END, tools_prompt
from safe_llm.types import Message, Tool, ToolCall
from safe_llm.vocabulary import Vocabulary

__all__ = ["ChatTemplate", "Prompter", "TokenizerFiles", "load_tokenizer"]

_PROBE = "safe-llm probe"
_HELLO = Message(role="user", content="hello")


class ChatTemplate(Protocol):
    """What renders a conversation: any transformers tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """Render `conversation`; called with tokenize=False."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as read from disk.

    Attributes:
        spec: Parsed content of `tokenizer.json`.
        template: Renders conversations; None for a model without a chat template.
        eos_id: The tokenizer's own end id, or None.
    """

    spec: dict[str, Any]
    template: ChatTemplate | None
    eos_id: int | None = None


def load_tokenizer(path: Path, *, canonical: bool = False, trust_remote_code: bool = False) -> TokenizerFiles:
    """Load a fast tokenizer from a local folder.

    Args:
        path: Folder with `tokenizer.json` or something that transformers can turn into one.
        canonical: The folder was written by this library: `tokenizer.json` is exactly what transformers would build
            from it, and reading it directly saves a second of start-up.
        trust_remote_code: Passed to transformers.

    Raises:
        ModelCorruptError: There is no readable tokenizer.
        UnsupportedModelError: It has no fast (Rust) implementation.
    """
    try:
        tokenizer = _light_tokenizer(path) if canonical else _auto_tokenizer(path, trust_remote_code)
        is_fast = tokenizer.is_fast
        text = (
            (path / "tokenizer.json").read_text("utf-8")
            if canonical
            else is_fast and tokenizer.backend_tokenizer.to_str()
        )
        spec = json.loads(text) if is_fast else None
    except Exception as error:  # transformers raises whatever the damaged file provokes
        raise ModelCorruptError(
            f"cannot load the tokenizer of {path.name!r}: {type(error).__name__}",
            hint="the folder needs a tokenizer.json that this version of transformers can read",
        ) from error
    if spec is None:
        raise UnsupportedModelError(
            f"the tokenizer of {path.name!r} has no fast implementation",
            hint="convert it to tokenizer.json; slow tokenizers give no exact byte offsets",
        )
    eos = tokenizer.eos_token
    eos_id = next((t["id"] for t in spec["added_tokens"] if t["content"] == eos), None)
    return TokenizerFiles(spec=spec, template=tokenizer if tokenizer.chat_template else None, eos_id=eos_id)


def _auto_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)


def _light_tokenizer(path: Path) -> Any:
    """A tokenizer object that only renders templates: special token names and the template, an empty vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    template_file = path / "chat_template.jinja"
    template = template_file.read_text("utf-8") if template_file.exists() else config.get("chat_template")
    names = {key: config[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(key)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **names)


@dataclass(slots=True)
class Prompter:
    """Turns prompts into one member's ids.

    Attributes:
        vocabulary: The member's vocabulary.
        template: Its chat template, or None.
        template_kwargs: Extra template variables.
        notes: Which fallbacks are in use, for people.
    """

    vocabulary: Vocabulary
    template: ChatTemplate | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(init=False, default=())
    _has_system: bool = field(init=False, default=True)
    _has_tools: bool = field(init=False, default=True)
    _own: _Spellings = field(init=False)
    _typed: _Spellings = field(init=False)

    def __post_init__(self) -> None:
        self._own = _Spellings(self.vocabulary.control_ids)
        self._typed = _Spellings(self.vocabulary.control_ids, ignore_case=True)  # templates may change the case
        if self.template is None:
            self.notes = ("no chat template: conversations become a User/Assistant transcript",)
            return
        self._has_system = self._renders([Message(role="system", content=_PROBE), _HELLO], needles=(_PROBE,))
        self._has_tools = self._renders(
            [
                _HELLO,
                Message(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments={}, id="call00000"),)),
                Message(role="tool", content=_PROBE, name="f", tool_call_id="call00000"),
            ],
            [Tool(name="f", description=_PROBE + " tool")],
            needles=(CALL_BEGIN, _PROBE, _PROBE + " tool"),
        )
        notes = []
        if not self._has_system:
            notes.append("no system role: system text goes before the first user message")
        if not self._has_tools:
            notes.append(f"no tools of the form {CALL_BEGIN}: tools, calls and results become text")
        self.notes = tuple(notes)

    @property
    def fingerprint(self) -> str:
        """Identity of the template and its variables."""
        template = None if self.template is None else self.template.chat_template
        return hashlib.sha256(repr((template, sorted(self.template_kwargs.items()))).encode()).hexdigest()[:16]

    def encode(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the prompt ids: BOS and the text, or the rendered conversation up to where the assistant speaks.

        Args:
            prompt: Text or conversation.
            tools: What the assistant may call; conversations only.

        Raises:
            PromptError: The template refuses the conversation.
        """
        if isinstance(prompt, str):
            return [*self.vocabulary.bos_ids, *self.vocabulary.encode_prompt(prompt)]
        if self.template is None:
            text = transcript(_with_tools_explained(prompt, tools))
            return [*self.vocabulary.bos_ids, *self.vocabulary.encode_prompt(text)]
        separator = f"{secrets.randbelow(10**24):024}"  # digits survive every filter: lower, trim, escape, tojson
        messages = self._adapted(prompt, tools)
        told = tools if self._has_tools else ()
        try:
            rendered = self._render(messages, separator, told)
        except Exception as first:  # templates raise jinja2 errors of their own making
            try:
                rendered = self._render(_merged(messages), separator, told)
            except Exception:
                raise PromptError(
                    f"the chat template refuses this sequence of roles: {', '.join(m.role for m in prompt)}",
                    hint="start with a user or system message and let user and assistant alternate",
                ) from first
        return self._encode_rendered(rendered, separator)

    # ------------------------------------------------------------------ template

    def _render(self, messages: Iterable[Message], separator: str, tools: Sequence[Tool] = ()) -> str:
        if self.template is None:
            raise PromptError("this member has no chat template")
        conversation = [_as_dict(message) for message in messages]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of templates; they concern the model's author, not the user
            rendered = self.template.apply_chat_template(
                self._marked(conversation, separator),
                tools=[self._marked(tool.as_dict(), separator) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_kwargs,
            )
        return str(rendered)

    def _renders(self, messages: list[Message], tools: Sequence[Tool] = (), *, needles: Sequence[str]) -> bool:
        try:
            rendered = self._render(messages, "", tools)
            return all(needle in rendered for needle in needles)
        except Exception:  # "not supported" looks different in every template
            return False

    def _marked(self, value: Any, separator: str) -> Any:
        if isinstance(value, str):
            return self._typed.broken(value, separator)
        if isinstance(value, dict):
            return {self._marked(k, separator): self._marked(v, separator) for k, v in value.items()}
        if isinstance(value, list):
            return [self._marked(item, separator) for item in value]
        return value

    def _encode_rendered(self, rendered: str, separator: str) -> list[int]:
        parts: list[str] = []
        done = 0
        for start, end in self._own.found(rendered):
            if start >= done:
                parts += (rendered[done:start], self.vocabulary.control_names[rendered[start:end]])
                done = end
        parts.append(rendered[done:])
        return self.vocabulary.encode_prompt("".join(part.replace(separator, "") for part in parts))

    def _adapted(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Rewrite what the template has no role for."""
        adapted = list(messages)
        if not self._has_tools:
            adapted = [_without_tools(message) for message in _with_tools_explained(adapted, tools)]
        if not self._has_system and any(message.role == "system" for message in adapted):
            adapted = _system_into_user(adapted)
        return adapted


class _Spellings:
    """Finds control tokens in a text, at a cost that does not grow with their number (Gemma has thousands)."""

    def __init__(self, spellings: Iterable[str], *, ignore_case: bool = False) -> None:
        self._fold = str.lower if ignore_case else str
        # a single character cannot be broken
        self._texts = frozenset(self._fold(text) for text in spellings if len(text) > 1)
        self._lengths: dict[str, set[int]] = {}
        for text in self._texts:
            self._lengths.setdefault(text[:2], set()).add(len(text))
        self._prefixes = {text[:n] for text in self._texts for n in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)
        starts = "|".join(map(re.escape, self._lengths)) or "(?!)"
        self._starts = re.compile(f"(?={starts})", re.IGNORECASE if ignore_case else 0)

    def found(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of the longest control token at each place where one starts, overlapping ones too."""
        for match in self._starts.finditer(text):
            start = match.start()
            lengths = self._lengths.get(self._fold(text[start : start + 2]), ())
            ends = [start + n for n in lengths if self._fold(text[start : start + n]) in self._texts]
            if ends:
                yield start, max(ends)

    def broken(self, text: str, separator: str) -> str:
        """Put `separator` behind the first character of every control token, whole or begun at the end of the text."""
        starts = {start for start, _ in self.found(text)}
        tail = range(max(0, len(text) - self._longest + 1), len(text))
        starts |= {start for start in tail if self._fold(text[start:]) in self._prefixes}
        parts: list[str] = []
        done = 0
        for start in sorted(starts):
            parts += (text[done : start + 1], separator)
            done = start + 1
        return "".join((*parts, text[done:]))


# ---------------------------------------------------------------------- fallbacks


def transcript(messages: Sequence[Message]) -> str:
    """A conversation for a model without a chat template; the answer starts on a line of its own.

    On its own line, since chat models begin their answers without a space, and the members write one text.
    """
    label = {"system": "System", "user": "User", "assistant": "Assistant"}
    turns = [f"{label[m.role]}:\n{m.content}\n\n" for m in map(_without_tools, messages)]
    return "".join(turns) + "Assistant:\n"


def _as_dict(message: Message) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        values["name"] = message.name
    if message.tool_call_id:
        values["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        values["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    return values


def _with_tools_explained(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools into the system message."""
    if not tools:
        return list(messages)
    first, rest = messages[0], messages[1:]
    if first.role != "system":
        return [Message(role="system", content=tools_prompt(tools)), *messages]
    return [replace(first, content=f"{first.content}\n\n{tools_prompt(tools)}"), *rest]


def _without_tools(message: Message) -> Message:
    if message.role == "tool":
        name = f" of {message.name}" if message.name else ""
        return Message(role="user", content=f"Result{name}:\n{message.content}")
    if message.tool_calls:
        calls = [
            json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False) for c in message.tool_calls
        ]
        text = "\n".join([message.content, *(f"{CALL_BEGIN}\n{call}\n{CALL_END}" for call in calls)]).strip()
        return Message(role="assistant", content=text)
    return message


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    system = "\n\n".join(m.content for m in messages if m.role == "system" and m.content)
    rest = [m for m in messages if m.role != "system"]
    if not rest or rest[0].role != "user":
        return [Message(role="user", content=system), *rest]
    return [Message(role="user", content=f"{system}\n\n{rest[0].content}"), *rest[1:]]


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Merge neighbours of one role, and move system text to the front."""
    system = [m for m in messages if m.role == "system"]
    merged: list[Message] = []
    for message in [*system, *(m for m in messages if m.role != "system")]:
        if merged and merged[-1].role == message.role and not message.tool_calls and message.role != "tool":
            merged[-1] = replace(merged[-1], content=f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return merged
