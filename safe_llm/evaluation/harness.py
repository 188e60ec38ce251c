"""An ensemble as a model of EleutherAI's lm-evaluation-harness, registered as `safe-llm`.

How prompts reach the members: with `apply_chat_template` a conversation is handed through as messages and every member
renders its own template; without it the context is continued as plain text, without any template (each member's BOS
before it). Which of the two it was is in the results, and hashes of the prompts are logged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm  # type: ignore[import-untyped]

from safe_llm.config import EnsembleSpec, MemberConfig, preset
from safe_llm.ensemble import Ensemble
from safe_llm.errors import ConfigError, EvaluationError, UnknownNameError
from safe_llm.evaluation.likelihood import Likelihoods
from safe_llm.evaluation.questions import Conversation, Question
from safe_llm.evaluation.store import Answer
from safe_llm.types import MAX_STOP_CHARS, MAX_STOP_STRINGS

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

__all__ = ["SafeLM", "decoding_params", "instance_question", "log_line"]

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_UNSAID_DEVICE = "cuda:0"
_GEN_KWARGS = ("until", "do_sample", "temperature", "top_p", "seed", *_LENGTHS)


def decoding_params(gen_kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a task's `generation_kwargs` as fields of `SamplingParams`, and the stop strings that do not fit there.

    `until` may be a str or a list; `do_sample: false` is greedy whatever the temperature; `do_sample: true` without a
    temperature is temperature 1.

    Raises:
        ConfigError: One is unknown (names the nearest), given twice, or of a wrong type.
    """
    given = {key: value for key, value in gen_kwargs.items() if value is not None}
    for key in given:
        if key not in _GEN_KWARGS:
            raise UnknownNameError("generation argument", key, _GEN_KWARGS)
    params: dict[str, Any] = {key: given[key] for key in ("temperature", "top_p", "seed") if key in given}
    lengths = [key for key in _LENGTHS if key in given]
    if len(lengths) > 1:
        raise ConfigError(f"give {lengths[0]} or {lengths[1]}, not both")
    if lengths:
        params["max_tokens"] = given[lengths[0]]
    if given.get("do_sample") is False:
        params["temperature"] = 0.0
    elif given.get("do_sample"):
        params.setdefault("temperature", 1.0)
    stops = _stop_strings(given.get("until", ()))
    early = [stop for stop in stops if len(stop) <= MAX_STOP_CHARS][:MAX_STOP_STRINGS]
    return params | {"stop": tuple(early)}, tuple(stop for stop in stops if stop not in early)


def _stop_strings(until: Any) -> list[str]:
    stops = [until] if isinstance(until, str) else until
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise ConfigError(f"until must be a str or a list of str, got {until!r}")
    return list(dict.fromkeys(stop for stop in stops if stop))


def instance_question(instance: Instance) -> Question:
    """Return what an instance of a `generate_until` task asks; its item is the document's `id`, else its number."""
    context, gen_kwargs = instance.args
    params, late_stops = decoding_params(gen_kwargs)
    item = instance.doc.get("id", instance.doc_id) if isinstance(instance.doc, Mapping) else instance.doc_id
    return Question(task=str(instance.task_name), item=str(item), context=context, params=params, late_stops=late_stops)


def log_line(answer: Answer) -> str:
    """Return what is logged of an answer: where its prompt and text can be found, and how it ended."""
    return json.dumps(
        {
            "task": answer.task,
            "item": answer.item,
            "prompt_sha256": answer.prompt_sha256,
            "params": dict(answer.params),
            "finish_detail": answer.finish_detail,
            "error": answer.error,
            "prompt_tokens": answer.prompt_tokens,
            "num_tokens": answer.num_tokens,
            "num_ensembled": answer.num_ensembled,
            "num_replaced": answer.num_replaced,
        }
    )


@register_model("safe-llm")
class SafeLM(LM):  # type: ignore[misc]
    """An ensemble that lm-evaluation-harness can ask.

    Attributes:
        ensemble: Who answers.
        answers: What it answered so far, without the texts in `log`.
    """

    def __init__(
        self,
        preset: str | None = None,
        drafter: str | None = None,
        verifiers: str | Sequence[str] = (),
        config: str | None = None,
        *,
        ensemble: Ensemble | None = None,
        loglikelihood: str | None = None,
        log: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """Load an ensemble, as `--model_args` describe it.

        Args:
            preset: A preset's name; without anything else it is `demo`.
            drafter: A model, as for `Ensemble.from_pretrained`.
            verifiers: The others, in one str joined by `+`.
            config: A TOML file.
            ensemble: A loaded one instead of all that.
            loglikelihood: `drafter` answers requests for log-likelihoods with the drafter's alone; by default they are
                refused, an ensemble has none.
            log: A file to append a line per answer to: hash of the prompt, what ended the answer, counters.
            batch_size: Rows decoded at once; 1 (what lm_eval passes if nobody says anything) and `auto` leave it to
                the ensemble's configuration.
            max_batch_size: Wins over `batch_size`.
            device: For all members; `cuda:0` (what lm_eval passes if nobody says anything) leaves it to each member.
            **options: Fields of `EnsembleConfig`.

        Raises:
            ConfigError: Arguments that are not valid or exclude each other.
            ModelError: A member cannot be had or used.
        """
        super().__init__()
        if loglikelihood not in (None, "drafter"):
            raise ConfigError(f"loglikelihood must be 'drafter' or left out, got {loglikelihood!r}")
        rows = max_batch_size or (None if str(batch_size) in ("None", "1") else batch_size)
        if rows is not None and not str(rows).startswith("auto"):
            options["max_batch_size"] = _whole_number(rows)
        if ensemble is None:
            spec = _placed(_spec(preset, drafter, verifiers, config), None if device == _UNSAID_DEVICE else device)
            ensemble = Ensemble.from_spec(spec, **options)
        self.ensemble = ensemble
        self.answers: list[Answer] = []
        self._likelihoods = Likelihoods(ensemble.members[0]) if loglikelihood else None
        self._kinds: Counter[str] = Counter()
        self._log = None if log is None else Path(log)
        self._write_log("")

    # ------------------------------------------------------------------ prompts

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> Conversation:
        """Keep the messages: every member renders its own template.

        Raises:
            EvaluationError: The task wants to begin the assistant's answer.
        """
        if not add_generation_prompt:
            raise EvaluationError(
                "this task begins the assistant's answer (gen_prefix), which members' templates cannot all do",
                hint="leave out --apply_chat_template, or use a task without gen_prefix",
            )
        return Conversation.of(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return what lm_eval's results say about the template.

        Raises:
            EvaluationError: A template was asked for by name.
        """
        if isinstance(chat_template, str):
            raise EvaluationError(
                f"there is no chat template {chat_template!r} for all members", hint="give no name: each has its own"
            )
        return "each member's own" if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """What lm_eval's request cache takes for the template's identity: requests keep their messages."""
        return "safe-llm-messages"

    # ------------------------------------------------------------------ answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer all requests, those with equal decoding parameters as one batch.

        A request that fails counts as an empty answer and stands in the log and in the results' `num_failed`.

        Raises:
            SafeLLMError: All of them failed: the first error.
        """
        questions = [instance_question(request) for request in requests]
        groups: dict[str, list[int]] = {}
        for place, question in enumerate(questions):
            self._kinds["messages" if isinstance(question.context, Conversation) else "plain text"] += 1
            groups.setdefault(repr((sorted(question.params.items()), question.late_stops)), []).append(place)
        texts: dict[int, str] = {}
        errors: list[BaseException] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="safe-llm") as bar:
            for batch in self._batches(groups.values()):
                found = self.ensemble.generate(
                    [questions[place].prompt for place in batch],
                    return_exceptions=True,
                    **questions[batch[0]].params,
                )
                for place, outcome in zip(batch, found, strict=True):
                    errors += [outcome] if isinstance(outcome, BaseException) else []
                    answer = Answer.of(questions[place], outcome, fingerprint=self.ensemble.fingerprint, seconds=0.0)
                    self._keep(answer)
                    texts[place] = answer.text
                    self.cache_hook.add_partial("generate_until", requests[place].args, answer.text)
                bar.update(len(batch))
        if errors and len(errors) == len(requests):
            raise errors[0]
        return [texts[place] for place in range(len(requests))]

    def _batches(self, groups: Sequence[list[int]] | Any) -> Iterator[list[int]]:
        size = 4 * self.ensemble.config.max_batch_size  # so that rows that end early are replaced
        for group in groups:
            for start in range(0, len(group), size):
                yield group[start : start + size]

    def _keep(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._write_log(log_line(answer) + "\n")

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise EvaluationError(f"cannot write the log {str(self._log)!r}: {error.strerror}") from None

    # ------------------------------------------------------------------ log-likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the drafter's log-likelihood of each continuation, and whether it would decode it greedily.

        Raises:
            EvaluationError: Nobody said `loglikelihood=drafter`.
        """
        drafter = self._drafter()
        found: list[tuple[float, bool]] = []
        for request in tqdm(requests, disable=disable_tqdm):
            found.append(drafter.continuation(*request.args))
            self.cache_hook.add_partial("loglikelihood", request.args, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the drafter's log-likelihood of whole texts.

        Raises:
            EvaluationError: Nobody said `loglikelihood=drafter`.
        """
        drafter = self._drafter()
        found: list[float] = []
        for request in tqdm(requests, disable=disable_tqdm):
            found.append(drafter.whole(*request.args))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _drafter(self) -> Likelihoods:
        if self._likelihoods is None:
            raise EvaluationError(
                "an ensemble has no log-likelihood of a given text",
                hint="take a task that generates, or the drafter's alone: --model_args loglikelihood=drafter",
            )
        return self._likelihoods

    # ------------------------------------------------------------------ results

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval puts into its results' `config`."""
        ends = Counter(answer.error or str(answer.finish_detail) for answer in self.answers)
        return {
            "fingerprint": self.ensemble.fingerprint,
            "members": [{"name": m.name, "fingerprint": m.fingerprint} for m in self.ensemble.members],
            "ensemble": self.ensemble.config.model_dump(mode="json"),
            "prompts": dict(self._kinds),
            "finish_details": dict(ends),
            "num_failed": sum(answer.error is not None for answer in self.answers),
            "num_truncated": 0 if self._likelihoods is None else self._likelihoods.num_truncated,
        }


def _whole_number(value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"batch_size must be a whole number or auto, got {value!r}") from None


def _spec(
    preset_name: str | None, drafter: str | None, verifiers: str | Sequence[str], config: str | None
) -> EnsembleSpec:
    given = [key for key, value in (("preset", preset_name), ("drafter", drafter), ("config", config)) if value]
    if len(given) > 1:
        raise ConfigError(f"give {given[0]} or {given[1]}, not both")
    if verifiers and drafter is None:
        raise ConfigError("verifiers need a drafter", hint="name the drafter too")
    if config is not None:
        return EnsembleSpec.from_toml(config)
    if drafter is not None:
        names = verifiers.split("+") if isinstance(verifiers, str) else verifiers
        members = tuple(MemberConfig(model=name) for name in names if name)
        return EnsembleSpec(drafter=MemberConfig(model=drafter), verifiers=members)
    return preset(preset_name or "demo")


def _placed(spec: EnsembleSpec, device: str | None) -> EnsembleSpec:
    if device is None:
        return spec
    drafter, *verifiers = (MemberConfig(**member.model_dump() | {"device": device}) for member in spec.members)
    return EnsembleSpec(drafter=drafter, verifiers=tuple(verifiers), ensemble=spec.ensemble, sampling=spec.sampling)
