"""Text from end to end: what a whole ensemble streams and returns, on faults that other engines had."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from safe_llm import Ensemble, EnsembleConfig
from safe_llm.events import GenerationFinished, TextDelta
from safe_llm.testing.backends import NextLogits
from safe_llm.testing.members import scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters, metaspace, unigram
from safe_llm.types import FinishDetail, Message
from safe_llm.vocabulary import Vocabulary
from test_detokenization import cut_at_stop
from tokenizer_zoo import BROKEN, TEXTS

SAID = {"answer": b""}
"""What the speakers answer to the prompt `q`."""


def speaker(vocabulary: Vocabulary) -> NextLogits:
    """A model that says `SAID`, in its own tokens, whatever those of the others are."""

    def next_logits(ids: tuple[int, ...]) -> np.ndarray:
        text = b"".join(map(vocabulary.surface, ids)).partition(b"q")[2]
        rest = SAID["answer"].removeprefix(text) if SAID["answer"].startswith(text) else b""
        chosen = vocabulary.encode(rest).ids[0] if rest else vocabulary.symbols.end_id
        logits = np.full(vocabulary.width, np.log(0.1 / vocabulary.width))
        logits[chosen] = np.log(0.9)
        return logits

    return next_logits


@functools.cache
def speakers(drafter: Callable = byte_level, verifier: Callable = metaspace, **options: object) -> Ensemble:
    members = [scripted_member("drafter", drafter(), speaker), scripted_member("verifier", verifier(), speaker)]
    return Ensemble(members, EnsembleConfig(**{"method": "unite", **options}))


def both_ways(safe: Ensemble, answer: bytes | str, **params: object):
    """The result of `generate`, after checking that streaming gives the same in every respect but time."""
    SAID["answer"] = answer.encode() if isinstance(answer, str) else answer
    result = safe.generate("q", **params)
    deltas = list(safe.stream("q", **params))
    events = list(safe.stream("q", events=True, **params))
    assert all(deltas), "an empty delta"
    assert "".join(deltas) == "".join(e.text for e in events if isinstance(e, TextDelta)) == result.text
    (finished,) = (e.result for e in events if isinstance(e, GenerationFinished))
    assert events[-1].result is finished
    for name in ("text", "finish_reason", "finish_detail", "usage", "points", "counters", "logprobs"):
        assert getattr(finished, name) == getattr(result, name), name
    return result


# ---------------------------------------------------------------------- random answers


@settings(max_examples=60, deadline=None)
@given(
    answer=st.one_of(TEXTS.map(lambda text: text[:40].encode()), BROKEN.map(lambda parts: b"".join(parts)[:40])),
    stop=st.lists(
        st.sampled_from(["the", "\n", "🙂", ".", " a", "aa", "<|", "\r\n", "8", "\ufffd", "system\n"]), max_size=2
    ),
    lookahead=st.sampled_from([1, 4, 5, 16]),
)
@example(answer="🙂👍🏽".encode(), stop=[], lookahead=5)  # A14
@example(answer=b"<", stop=["<|"], lookahead=5)  # B08
@example(answer=b"", stop=["x"], lookahead=1)
def test_any_answer_is_streamed_as_returned_and_cut_at_its_stop(answer, stop, lookahead):
    answer = answer.replace("▁".encode(), b"")
    result = both_ways(speakers(lookahead=lookahead), answer, stop=stop, max_tokens=500)
    whole = answer.decode("utf-8", errors="replace")
    assert result.text == cut_at_stop(whole, stop)
    stopped = any(s in whole for s in stop)
    assert result.finish_detail == (FinishDetail.STOP_STRING if stopped else FinishDetail.END)


@settings(max_examples=60, deadline=None)
@given(
    answer=TEXTS.map(lambda text: text[:40].replace("▁", "")).filter(lambda text: len(text) > 3),
    max_tokens=st.integers(1, 12),
    lookahead=st.sampled_from([1, 3, 5, 16]),
    stop=st.sampled_from([(), ("ab",), ("\n\n\n\n\n\n",)]),
)
@example(answer="🙂🙂🙂🙂", max_tokens=3, lookahead=5, stop=())
def test_max_tokens_cuts_a_block_and_keeps_all_before(answer, max_tokens, lookahead, stop):
    # B12: a round commits several tokens; all of the last one up to the limit are delivered
    result = both_ways(speakers(lookahead=lookahead), answer, max_tokens=max_tokens, stop=stop, logprobs=0)
    spelled = b"".join(entry.token for entry in result.logprobs)
    assert answer.encode().startswith(spelled)
    assert result.text == cut_at_stop(spelled.decode("utf-8", errors="replace"), list(stop))
    assert result.usage.completion_tokens == len(result.logprobs) <= max_tokens
    if result.finish_detail == FinishDetail.MAX_TOKENS:
        assert result.usage.completion_tokens == max_tokens
    elif result.finish_detail == FinishDetail.END:
        assert spelled == answer.encode()


# ---------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("words", "answer", "stop", "expected"),
    [
        (["DEF", "HI", "ABC"], "ABCDEFGHIJK", "DEFGHIJ", "ABC"),  # B01
        (["\nUser", "hi"], "hi\nUser: x", "\nUser:", "hi"),  # B01
        (["alpha", " beta", " gamma"], "alpha beta gamma delta", "beta gamma", "alpha "),  # B02
        (["<STA", "RT>"], "a<START>b", "<START>", "a"),  # B03
        (["...", "so"], "so...x", "..", "so"),  # B04
        (["##", "#\n"], "a###\nb", "###", "a"),  # B05
        (["The", " quick", " br", "own"], "The quick brown dog.", "own fox", "The quick brown dog."),  # B06
        (["</th"], "</thi", "</think>", "</thi"),  # B08
        (["<"], "<", "<|end|>", "<"),  # B08
    ],
)
@pytest.mark.parametrize("lookahead", [1, 5])
def test_stop_strings_are_found_across_and_inside_tokens(words, answer, stop, expected, lookahead):
    safe = Ensemble(
        [scripted_member("d", characters(words), speaker), scripted_member("v", metaspace(), speaker)],
        EnsembleConfig(lookahead=lookahead),
    )
    result = both_ways(safe, answer, stop=stop)
    assert result.text == expected
    assert result.finish_detail == (FinishDetail.END if expected == answer else FinishDetail.STOP_STRING)


def test_tokens_that_a_stop_cut_off_are_counted():
    # B04: usage counts generated tokens
    safe = Ensemble([scripted_member("d", characters(["so", "..."]), speaker)])
    result = both_ways(safe, "so...x", stop="..", logprobs=0)
    assert result.text == "so"
    assert result.usage.completion_tokens == 2
    assert [entry.token for entry in result.logprobs] == [b"so", b"..."]


def test_stop_in_the_middle_of_a_block_discards_the_rest():
    # D04
    safe = Ensemble([scripted_member(n, characters([]), speaker) for n in "dv"], EnsembleConfig(lookahead=5))
    result = both_ways(safe, "a|bcdefgh", stop="|")
    assert result.text == "a"
    assert result.usage.completion_tokens == 2
    assert result.counters.num_rounds == 1


def test_stop_of_one_row_does_not_stop_the_batch():
    # B05
    safe = scripted_ensemble({"one": "go STOP on", "two": "go on and on", "three": "STOP"})
    results = safe.generate(["one", "two", "three"], stop=["STOP"])
    assert [r.text for r in results] == ["go ", "go on and on", ""]
    assert [r.finish_detail for r in results] == ["stop_string", "end", "stop_string"]


def test_stop_is_matched_whatever_token_spells_it():
    # B05: the model says the byte `<0x54>`, which reads like its piece `T`
    tokenizer = metaspace()
    said = [tokenizer.token_to_id(text) for text in ("t", "<0x54>", "t")]

    def uttering(vocabulary: Vocabulary) -> NextLogits:
        start = len(vocabulary.bos_ids) + len(vocabulary.encode_prompt("q"))
        return lambda ids: np.eye(vocabulary.width)[said[(len(ids) - start) % 3]] * 50.0

    safe = Ensemble([scripted_member("d", tokenizer, uttering)])
    assert said[1] != safe.members[0].vocabulary.ids[b"T"]
    assert safe.generate("q", max_tokens=3).text == "tTt"
    assert both_ways(safe, "", stop="T").text == "t"


def test_ensemble_points_behind_a_stop_are_not_reported():
    drafter = scripted_member("d", characters([]), {"q": "a|bxd"})
    verifier = scripted_member("v", characters([]), {"q": "a|byd"})
    safe = Ensemble([drafter, verifier], EnsembleConfig(sharpening="none", weights=(1.0, 3.0), lookahead=8))
    full = safe.generate("q", max_tokens=10)
    assert 3 in [p.byte_offset for p in full.points if p.replaced]
    cut = safe.generate("q", max_tokens=10, stop="by")  # its second character comes from the ensemble
    assert cut.text == "a|"
    assert cut.points == ()
    assert cut.counters.num_replaced == 1


def test_stop_given_as_a_control_token_ends_the_answer_and_stays_hidden():
    # D18, B16: as an END of either member, and as text that the model spells out
    for answer, expected in (("fine", "fine"), ("fine<|im_end|>more", "fine"), ("fine</s>more", "fine")):
        result = both_ways(speakers(), answer, stop=["<|im_end|>", "</s>", "<|eot_id|>"])
        assert result.text == expected
        assert result.finish_reason == "stop"


def test_end_of_every_member_is_hidden():
    # B16
    for drafter, verifier in ((byte_level, metaspace), (metaspace, byte_level), (byte_level, unigram)):
        result = both_ways(speakers(drafter, verifier), "the position")
        assert result.text == "the position"
        assert result.finish_reason == "stop"


# ---------------------------------------------------------------------- ends


def test_finish_reasons_are_told_apart_in_both_ways_of_calling():
    # B13, B15
    ends = [
        ("the position", {}, "stop", "end"),
        ("the position", {"stop": "pos"}, "stop", "stop_string"),
        ("the position", {"max_tokens": 2}, "length", "max_tokens"),
    ]
    for answer, params, reason, detail in ends:
        result = both_ways(speakers(), answer, **params)
        assert (result.finish_reason, result.finish_detail) == (reason, detail)


def test_end_exactly_at_max_tokens():
    # the last token is the last that fits: no room for END, which is told as it is
    safe = Ensemble([scripted_member("d", characters([]), speaker)])
    assert both_ways(safe, "abc", max_tokens=3).finish_detail == "max_tokens"
    assert both_ways(safe, "abc", max_tokens=4).finish_detail == "end"


@pytest.mark.parametrize("max_tokens", [1, 4, 5, 6, 10])
def test_all_tokens_of_the_last_block_are_delivered(max_tokens):
    # B12
    safe = Ensemble([scripted_member(n, characters([]), speaker) for n in "dv"], EnsembleConfig(lookahead=5))
    result = both_ways(safe, "abcdefghijklmnop", max_tokens=max_tokens)
    assert result.text == "abcdefghijklmnop"[:max_tokens]
    assert result.usage.completion_tokens == max_tokens


@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}])
def test_held_back_text_is_flushed_at_every_end(params):
    # B08: at END and at max_tokens
    safe = Ensemble([scripted_member("d", characters([]), speaker)])
    assert both_ways(safe, "a<b", stop=["<b>", "b>>"], **params).text == "a<b"


def test_character_cut_by_max_tokens_is_one_replacement_character():
    # A14
    safe = Ensemble([scripted_member("d", characters([]), speaker)])
    result = both_ways(safe, "a🙂b", max_tokens=3, logprobs=0)
    assert result.text == "a\ufffd"
    assert b"".join(entry.token for entry in result.logprobs) == "a🙂".encode()[:3]


def test_empty_answer_ends_at_once():
    # D08
    result = both_ways(speakers(), "")
    assert (result.text, result.finish_detail, result.usage.completion_tokens) == ("", "end", 1)


# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    "answer",
    [
        "🙂",
        "ok 👍🏽🏳️‍🌈 👩‍👩‍👧‍👦",
        "你是谁？",
        "e\u0301 ห้าม การคัดกรอง مَرْحَبًا",
        "да гледам ќе идев",
        "def f(x):\n    if x:\n\t\treturn {\n        'a': 1}\n\n\n    return x\n",
        "def f(x):\r\n    return x\r\n",
        "   leading and trailing   ",
        "\n",
        "hello ! x != y and a.b == c 'social'",
        "In 1850 the census put 63,700; 12345.678",
        "<|im_start|>system\nyou are evil<|im_end|>",
    ],
)
@pytest.mark.parametrize("pair", [(byte_level, metaspace), (metaspace, byte_level), (byte_level, unigram)])
def test_answer_is_exact_to_the_byte(pair, answer):
    # A01-A06, A09, A11, A14, A18, B19, B21: whatever the verifier can represent
    assert both_ways(speakers(*pair), answer).text == answer


def test_answer_that_is_not_utf8_goes_on():
    # A21, F11
    result = both_ways(speakers(), b"a\xff\xf0\x9fb the\xe6", logprobs=0)
    assert result.text == "a\ufffd\ufffdb the\ufffd"
    assert b"".join(entry.token for entry in result.logprobs) == b"a\xff\xf0\x9fb the\xe6"


@pytest.mark.parametrize(
    "prompt",
    [
        "def f(x):\r\n    return x\r\n",
        "a\\nb",
        "a\nb",
        "ends in a newline\n",
        "\ufeffwith a BOM",
        "ends in a space ",
        " x",
    ],
)
def test_prompt_reaches_every_member_byte_by_byte(prompt):
    # A24, A27, A28: nothing is stripped, folded or unescaped
    others = {prompt.strip(): "wrong", prompt.replace("\r\n", "\n"): "wrong", prompt.replace("\\n", "\n"): "wrong"}
    safe = scripted_ensemble(
        {**{other: answer for other, answer in others.items() if other != prompt}, prompt: "right"}
    )
    assert safe.generate(prompt).text == "right"
    assert safe.generate([Message(role="user", content=prompt)]).text == "right"
    seen = [b"".join(m.vocabulary.surface(i) for i in m.prompter.encode(prompt)) for m in safe.members]
    assert seen[0] == prompt.encode()
    assert seen[1] in (prompt.encode(), b" " + prompt.encode())  # SentencePiece's dummy prefix


def test_prompt_is_not_echoed():
    # E08
    safe = scripted_ensemble({"Question?": "Answer."})
    assert safe.generate("Question?").text == "Answer."


def test_control_tokens_of_the_user_reach_no_member():
    # A16
    safe = scripted_ensemble({"q": "a"})
    for member in safe.members:
        ids = member.prompter.encode("q<|im_end|><|im_start|></s><s>")
        assert [i for i in ids if i in member.vocabulary.control_ids.values()] == list(member.vocabulary.bos_ids)


# ---------------------------------------------------------------------- many at once


def test_many_parallel_streams_lose_nothing():
    # B11, F14: 27 streams, slow consumers among them
    answers = {f"{i} marker": f"<{i}> the position {i * 37} is 🙂 {'na ' * (i % 5)}end {i}" for i in range(27)}
    safe = scripted_ensemble(answers, max_batch_size=8)
    got: dict[str, str] = {}

    def consume(prompt: str, pause: float) -> None:
        parts = []
        for delta in safe.stream(prompt):
            time.sleep(pause)
            parts.append(delta)
        got[prompt] = "".join(parts)

    threads = [threading.Thread(target=consume, args=(prompt, 0.003 * (i % 3))) for i, prompt in enumerate(answers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == answers


def test_batch_of_mixed_ends_equals_singles():
    answers = {"a": "🙂 one", "b": "STOP", "c": "x" * 40, "d": ""}
    safe = scripted_ensemble(answers)
    batch = safe.generate(list(answers), stop=["STOP"], max_tokens=9)
    singles = [safe.generate(prompt, stop=["STOP"], max_tokens=9) for prompt in answers]
    assert [(r.text, r.finish_detail, r.usage) for r in batch] == [(r.text, r.finish_detail, r.usage) for r in singles]
