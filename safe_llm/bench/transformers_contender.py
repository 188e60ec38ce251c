"""transformers' own `generate` as a contender: the drafter alone, or with a smaller model as its assistant."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from safe_llm.backends.attention import use_plain_attention
from safe_llm.backends.hf import HFBackend
from safe_llm.backends.loading import quiet_transformers
from safe_llm.bench.trials import Counts, Run, Step, Unavailable
from safe_llm.bench.workloads import Conversation
from safe_llm.errors import ConfigError, MemberError
from safe_llm.member import Member

__all__ = ["TransformersContender", "assisted", "generating", "untouched_twin"]


class TransformersContender:
    """Answers with `model.generate`: greedy, eager, with transformers' own cache and attention.

    The prompt's ids are those that the engine's drafter gets; encoding them is not timed.

    Attributes:
        name: As it was asked for.
    """

    def __init__(
        self,
        name: str,
        member: Member,
        model: PreTrainedModel,
        *,
        assistant: tuple[str, PreTrainedModel] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Take over a model.

        Args:
            name: As it was asked for.
            member: Whose prompts and END tokens hold.
            model: Its twin.
            assistant: The assistant's member name and twin.
            options: Further keywords for `generate`.
        """
        self.name = name
        self._member = member
        self._model = model
        self._options: dict[str, Any] = dict(options or {})
        self._counters = {member.name: _PassCounter(model)}
        self._assistant = None if assistant is None else assistant[0]
        if assistant is not None:
            self._counters[assistant[0]] = _PassCounter(assistant[1])
            self._options["assistant_model"] = assistant[1]

    @torch.inference_mode()
    def run(self, prompt: Conversation, max_tokens: int) -> Run:
        """See `Contender.run`."""
        ids = torch.tensor([self._member.prompter.encode(prompt)], device=_device(self._model))
        ends = list(self._member.vocabulary.symbols.end_ids)
        before = {name: counter.num_passes for name, counter in self._counters.items()}
        settings = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )
        with quiet_transformers(), self._explained():
            watch = _Watch()
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                streamer=watch,
                **self._options,
            )
            total_s = time.perf_counter() - watch.started
        num_tokens = output.shape[1] - ids.shape[1]
        passes = {name: counter.num_passes - before[name] for name, counter in self._counters.items()}
        return Run(
            num_tokens=num_tokens, total_s=total_s, steps=watch.steps(num_tokens), counts=Counts(num_forwards=passes)
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what transformers raises into our errors; assistants with another tokenizer fail on some texts."""
        try:
            yield
        except Exception as error:
            what = f"transformers raised {type(error).__name__}"
            if self._assistant is not None:
                raise Unavailable(f"{what} with the assistant {self._assistant!r}") from error
            raise MemberError(self._member.name, f"{what} in `generate`") from error


def generating(name: str, members: Sequence[Member]) -> TransformersContender:
    """Return `generate` of the drafter alone.

    Raises:
        ConfigError: The drafter is no transformers model.
    """
    return TransformersContender(name, members[0], untouched_twin(members[0]))


def assisted(name: str, members: Sequence[Member]) -> TransformersContender:
    """Return assisted generation: the smallest verifier drafts for the drafter.

    Raises:
        ConfigError: The drafter is no transformers model.
        Unavailable: No verifier is smaller, or the tokenizers cannot be had.
    """
    model = untouched_twin(members[0])
    verifiers = [member for member in members[1:] if isinstance(member.backend, HFBackend)]
    if not verifiers:
        raise Unavailable("there is no verifier that is a transformers model")
    smallest = min(verifiers, key=lambda member: _size(_model_of(member)))
    assistant = untouched_twin(smallest)
    if _size(assistant) >= _size(model):
        raise Unavailable(f"no verifier is smaller than the drafter {members[0].name!r}")
    pair = {"tokenizer": _tokenizer(members[0]), "assistant_tokenizer": _tokenizer(smallest)}
    same = pair["tokenizer"].get_vocab() == pair["assistant_tokenizer"].get_vocab()
    return TransformersContender(
        name, members[0], model, assistant=(smallest.name, assistant), options={} if same else pair
    )


def untouched_twin(member: Member) -> PreTrainedModel:
    """Return a second model object over the same weights, with transformers' own attention and default settings.

    Raises:
        ConfigError: The member is no transformers model.
    """
    model = _model_of(member)
    weights: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, weights)
    use_plain_attention(twin)
    twin.generation_config = GenerationConfig()  # a model's own may sample, or punish repetitions
    return twin


def _model_of(member: Member) -> PreTrainedModel:
    if not isinstance(member.backend, HFBackend):
        raise ConfigError(
            f"member {member.name!r} is no transformers model, so there is no `generate` to compare with",
            hint="leave generate and assisted out of --contenders",
        )
    return member.backend.model


def _size(model: PreTrainedModel) -> int:
    return sum(weights.numel() for weights in model.parameters())


def _device(model: PreTrainedModel) -> torch.device:
    device: torch.device = model.get_input_embeddings().weight.device
    return device


def _tokenizer(member: Member) -> PreTrainedTokenizerBase:
    folder = _model_of(member).name_or_path
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        raise Unavailable(f"transformers cannot load the tokenizer of {member.name!r}") from None
    return tokenizer


class _PassCounter:
    """Counts a model's forward passes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_passes = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_passes += 1


class _Watch(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens come."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._seen: list[tuple[int, float]] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then new tokens."""
        self._seen.append((value.numel(), time.perf_counter() - self.started))

    def end(self) -> None:
        """Do nothing."""

    def steps(self, num_tokens: int) -> tuple[Step, ...]:
        """Return what came after the prompt; assistants' last tokens may be more than were asked for."""
        steps, total = [], 0
        for count, seconds in self._seen[1:]:
            total = min(num_tokens, total + count)
            steps.append(Step(num_tokens=total, seconds=seconds))
        return tuple(steps)
