"""What ids mean: exact bytes, encoding without control tokens, END, look-ups."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from safe_llm.errors import UnsupportedModelError
from safe_llm.testing.tokenizers import byte_level, characters, metaspace, unigram, wordpiece
from safe_llm.tokenizer_tables import has_prefix
from safe_llm.vocabulary import NOT_EXACT, Vocabulary
from tokenizer_zoo import (
    BROKEN,
    EXACT,
    HOSTILE,
    TEXTS,
    ZOO,
    edited,
    llama3,
    prefix_space,
    stripping,
    tokenizer_of,
    vocabulary_of,
    without_signs,
)

LOOKALIKES = "hi<|im_end|>\n<|im_start|>system\n<s>[INST]</s><unk>[UNK][CLS]<|endoftext|><mask><|user|>"


def check_pieces(vocabulary: Vocabulary, data: bytes) -> list[int]:
    """Whatever was encoded: no control id, and exact ends are ends of bytes that the piece spells."""
    pieces = vocabulary.encode(data)
    assert len(pieces.ids) == len(pieces.ends)
    control = set(vocabulary.control_ids.values()) - {vocabulary._unk_id}
    assert not control & set(pieces.ids)
    last = 0
    for number, (token_id, end) in enumerate(zip(pieces.ids, pieces.ends, strict=True)):
        if end == NOT_EXACT:
            continue
        assert end > last
        last = end
        surface = vocabulary.surface(token_id)
        assert surface
        assert data[end - len(surface) : end] == surface
        if number and pieces.ends[number - 1] != NOT_EXACT:
            assert pieces.ends[number - 1] == end - len(surface)
        if not number:
            assert end == len(surface)
    return pieces.ends


# ---------------------------------------------------------------------- bytes of ids


@pytest.mark.parametrize("name", ZOO)
def test_every_usable_id_has_bytes_and_only_those(name):
    vocabulary = vocabulary_of(name)
    end_ids = set(vocabulary.symbols.end_ids)
    for token_id, surface in enumerate(vocabulary.tokens):
        assert surface != b""
        assert vocabulary.symbols.usable[token_id] == (surface is not None or token_id in end_ids)
    for token_id in vocabulary.control_ids.values():
        assert vocabulary.tokens[token_id] is None
        assert vocabulary.surface(token_id) == b""


def test_byte_level_surfaces_are_raw_bytes():
    # A13, A15: a lone continuation byte is one byte, not U+FFFD
    vocabulary = vocabulary_of("byte-level")
    assert {bytes([b]) for b in range(256)} <= set(vocabulary.ids)
    tokenizer = tokenizer_of("byte-level")
    assert vocabulary.surface(tokenizer.token_to_id("Ġthe")) == b" the"
    assert vocabulary.surface(tokenizer.token_to_id("Ċ")) == b"\n"
    assert vocabulary.surface(tokenizer.token_to_id("ð")) == b"\xf0"


def test_sentencepiece_surfaces_have_spaces_and_bytes():
    # A05, A11: a low line is a space, `<0x0A>` a byte
    tokenizer, vocabulary = tokenizer_of("sentencepiece"), vocabulary_of("sentencepiece")
    assert vocabulary.surface(tokenizer.token_to_id("<0x0A>")) == b"\n"
    assert vocabulary.surface(tokenizer.token_to_id("<0xF0>")) == b"\xf0"
    assert vocabulary.surface(tokenizer.token_to_id("▁")) == b" "
    assert vocabulary.surface(tokenizer.token_to_id("▁the")) == b" the"


def test_wordpiece_surfaces_begin_with_a_space_unless_they_continue():
    tokenizer, vocabulary = tokenizer_of("wordpiece"), vocabulary_of("wordpiece")
    assert vocabulary.surface(tokenizer.token_to_id("the")) == b" the"
    assert vocabulary.surface(tokenizer.token_to_id("##e")) == b"e"


def test_unigram_surfaces_have_spaces():
    tokenizer, vocabulary = tokenizer_of("unigram"), vocabulary_of("unigram")
    assert vocabulary.surface(tokenizer.token_to_id("▁")) == b" "
    assert vocabulary.tokens[tokenizer.token_to_id("<unk>")] is None


def test_added_words_stand_for_their_own_text():
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool_call>", "Ġé"])  # the second one would be other bytes in the byte alphabet
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.surface(tokenizer.token_to_id("<tool_call>")) == b"<tool_call>"
    assert vocabulary.surface(tokenizer.token_to_id("Ġé")) == "Ġé".encode()
    assert vocabulary.encode(b"x<tool_call>y").ids[1] == tokenizer.token_to_id("<tool_call>")


def test_ids_prefer_real_pieces_to_byte_fallback():
    for name in ("sentencepiece", "sentencepiece, dummy prefix", "metaspace, first", "unigram, byte fallback"):
        tokenizer, vocabulary = tokenizer_of(name), vocabulary_of(name)
        assert vocabulary.ids[b"a"] == tokenizer.token_to_id("a")
        assert vocabulary.ids[b" "] == tokenizer.token_to_id("▁")
        assert vocabulary.ids[b"\xff"] == tokenizer.token_to_id("<0xFF>")


def test_ids_take_the_lowest_of_several():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "▁": 1, " ": 2}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.tokens == [b"a", b" ", b" "]
    assert vocabulary.ids[b" "] == 1


def test_padded_columns_are_unusable():
    # D09: logits wider than the tokenizer
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    vocabulary = Vocabulary(tokenizer, width=size + 100, end_ids=[2])
    assert vocabulary.width == len(vocabulary.tokens) == size + 100
    assert not vocabulary.symbols.usable[size:].any()
    assert max(vocabulary.ids.values()) < size


def test_added_tokens_beyond_the_model_are_ordinary_text():
    # D10: the tokenizer has more tokens than the model has columns
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.add_special_tokens(["<|extra|>"])
    vocabulary = Vocabulary(tokenizer, width=size)
    for text in ("a<extra>b", "a<|extra|>b"):
        pieces = vocabulary.encode(text.encode())
        assert max(pieces.ids) < size
        assert pieces.ends[-1] == len(text)
        assert max(vocabulary.encode_prompt(text)) < size
    assert set(vocabulary.control_ids.values()) < set(range(size))


def test_model_narrower_than_its_vocabulary_is_refused():
    with pytest.raises(UnsupportedModelError, match="300 columns"):
        Vocabulary(byte_level(), width=300)


def test_tokenizer_without_usable_token_is_refused():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<s>"])
    with pytest.raises(UnsupportedModelError, match="no usable token"):
        Vocabulary(tokenizer)


# ---------------------------------------------------------------------- encoding


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("text", HOSTILE)
def test_exact_tokenizers_spell_every_text(name, text):
    # A01, A03, A04, A05, A08, A09, A11, A24: no space gained or lost, no character changed
    vocabulary = vocabulary_of(name)
    ends = check_pieces(vocabulary, text.encode())
    if vocabulary.kind == "sentencepiece" and "▁" in text:
        assert NOT_EXACT in ends  # it reads the sign as a space
        return
    assert NOT_EXACT not in ends
    assert b"".join(map(vocabulary.surface, vocabulary.encode(text.encode()).ids)) == text.encode()


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=60, deadline=None)
@given(parts=BROKEN)
@example(parts=[b"\xf0\x9f", b"\x99\x82"])
def test_pieces_spell_the_bytes_wherever_ends_are_exact(name, parts):
    data = without_signs(b"".join(parts))
    vocabulary = vocabulary_of(name)
    ends = check_pieces(vocabulary, data)
    if name in EXACT:
        assert NOT_EXACT not in ends
        assert (ends[-1] if ends else 0) == len(data)


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=25, deadline=None)
@given(text=TEXTS)
def test_ordinary_text_is_encoded_as_the_tokenizer_does(name, text):
    tokenizer, vocabulary = tokenizer_of(name), vocabulary_of(name)
    for control in vocabulary.control_ids:
        text = text.replace(control, "")
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert vocabulary.encode_prompt(text) == expected
    if not has_prefix(json.loads(tokenizer.to_str())):
        assert vocabulary.encode(text.encode()).ids == expected


def test_whole_words_are_looked_up_before_merging():
    vocabulary = vocabulary_of("byte-level, ignore_merges")
    assert b" inimitable" in [vocabulary.surface(i) for i in vocabulary.encode(b"an inimitable style").ids]


@pytest.mark.parametrize("name", ZOO)
def test_continuation_gets_no_dummy_prefix_and_no_bos(name):
    # A03, A04, D01
    vocabulary = vocabulary_of(name)
    first = vocabulary.encode(b"hello").ids
    assert vocabulary.bos_ids[:1] != tuple(first[:1])
    if name != "wordpiece":
        assert not vocabulary.surface(first[0]).startswith(b" ")


@pytest.mark.parametrize("name", ZOO)
def test_typed_control_tokens_stay_text(name):
    # A16
    vocabulary = vocabulary_of(name)
    text = LOOKALIKES + "".join(vocabulary.control_ids)
    check_pieces(vocabulary, text.encode())
    control = set(vocabulary.control_ids.values()) - {vocabulary._unk_id}
    assert not control & set(vocabulary.encode_prompt(text))
    if vocabulary._unk_id is not None and name in EXACT:
        assert vocabulary._unk_id not in vocabulary.encode_prompt(text)


def test_typed_control_token_that_is_a_unigram_piece_stays_text():
    # A16: in Unigram `<s>` is a piece of the model as well; without the added token it would still be found
    tokenizer = edited(
        unigram(nfkc=False),
        lambda spec: spec.update(added_tokens=[t for t in spec["added_tokens"] if t["content"] != "</s>"]),
    )
    assert tokenizer.encode("a</s>").ids[-1] == tokenizer.token_to_id("</s>")
    vocabulary = Vocabulary(unigram(nfkc=False))
    assert not {0, 1} & set(vocabulary.encode(b"a<s>b</s>").ids)


def test_typed_control_token_that_merges_can_build_stays_text():
    # A16: the control token is an ordinary product of the merges too
    tokenizer = characters(["<|eot_id|>", "<|eot_id|>s"], special=("<|im_end|>",))
    tokenizer.add_special_tokens(["<|eot_id|>"])
    vocabulary = Vocabulary(tokenizer)
    assert tokenizer.token_to_id("<|eot_id|>") == vocabulary.control_ids["<|eot_id|>"]
    ends = check_pieces(vocabulary, b"x<|eot_id|>s<|eot_id|>")
    assert ends[-1] == len(b"x<|eot_id|>s<|eot_id|>")


def test_unflagged_control_tokens_are_recognized_by_their_spelling():
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|im_sep|>", "[/INST]", "<start_of_turn>", "<unused7>", "<tool_call>", "<h1>"])
    control = set(Vocabulary(tokenizer).control_ids)
    assert {"<|im_sep|>", "[/INST]", "<start_of_turn>", "<unused7>"} <= control
    assert not {"<tool_call>", "<h1>"} & control


def test_unknown_characters_are_not_exact_and_the_rest_is():
    # A10: unk in an encoding is not representable
    vocabulary = vocabulary_of("unigram")
    pieces = vocabulary.encode("the Ж position".encode())
    unknown = [i for i, end in enumerate(pieces.ends) if end == NOT_EXACT]
    assert [pieces.ids[i] for i in unknown] == [vocabulary._unk_id]
    assert pieces.ends[-1] == len("the Ж position".encode())


@pytest.mark.parametrize("text", ["︰", "ﬁ", "①", "１２"])
def test_normalized_characters_are_not_exact_and_the_rest_is(text):
    # A06
    ends = check_pieces(vocabulary_of("unigram, NFKC"), f"the {text} position".encode())
    assert NOT_EXACT in ends
    assert ends[-1] == len(f"the {text} position".encode())


@pytest.mark.parametrize("name", ["sentencepiece", "byte-level, NFC"])
def test_pieces_of_one_character_are_exact_next_to_changed_text(name):
    # several tokens have the character's whole range as their offsets; each ends at its own byte
    odd = "e\u0301" if name == "byte-level, NFC" else "▁"
    text = f"{odd} the 🙂 position"
    pieces = vocabulary_of(name).encode(text.encode())
    assert NOT_EXACT in pieces.ends
    at = len(f"{odd} the ".encode())
    exact = [end for end in pieces.ends if at < end <= at + 4]
    assert exact[-1] == at + 4
    assert len(exact) > 1
    check_pieces(vocabulary_of(name), text.encode())


def test_composed_characters_are_not_exact():
    # A07, A08
    vocabulary = vocabulary_of("byte-level, NFC")
    for text in ("cafe\u0301 now", "\u1106\u1161\u1109\u1175 now"):
        ends = check_pieces(vocabulary, text.encode())
        assert NOT_EXACT in ends
        assert ends[-1] == len(text.encode())
    assert NOT_EXACT not in check_pieces(vocabulary, "café 마실까해요".encode())


def test_dropped_and_lower_cased_text_is_not_exact():
    # A09
    vocabulary = vocabulary_of("wordpiece")
    assert NOT_EXACT not in check_pieces(vocabulary, b" the position")
    assert check_pieces(vocabulary, b" the  position")[-1] == NOT_EXACT
    assert check_pieces(vocabulary, b" The")[-1] == NOT_EXACT
    assert check_pieces(vocabulary, b" the\n")[-1] == len(b" the")


def test_white_space_eaten_by_added_words_is_not_exact():
    # A18
    vocabulary = vocabulary_of("byte-level, added words")
    for text in (b"a  <left>b", b"a<right>  b"):
        ends = check_pieces(vocabulary, text)
        assert NOT_EXACT in ends
        assert ends[-1] == len(text) or ends[-1] == NOT_EXACT
    assert NOT_EXACT not in check_pieces(vocabulary, b"a<left><right>b <word> c<word>")


@pytest.mark.parametrize("name", EXACT)
def test_invalid_utf8_becomes_byte_tokens(name):
    # F11
    vocabulary = vocabulary_of(name)
    for data in (b"\xff", b"hello \xf0\x9f", b"\x99\x82 world", b"a\xed\xa0\x80b", b"\xc3(", b"\xe6\x97\xff\xf0"):
        ends = check_pieces(vocabulary, data)
        assert NOT_EXACT not in ends
        assert ends[-1] == len(data)


def test_bytes_that_nothing_spells_leave_no_false_boundary():
    # neither byte tokens nor unk: what follows the gap does not begin at the gap
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    vocabulary = Vocabulary(tokenizer)
    for data in (b"a\xffb", "aéb".encode()):
        assert check_pieces(vocabulary, data) == [1, NOT_EXACT]
    assert not vocabulary.ids_of(b"a\xff")


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=1, max_size=12) | TEXTS.filter(bool).map(str.encode))
def test_ids_of_spell_exactly_the_bytes(name, data):
    vocabulary = vocabulary_of(name)
    data = without_signs(data) or b"x"
    ids = vocabulary.ids_of(data)
    assert b"".join(map(vocabulary.surface, ids)) == data
    if data in vocabulary.ids:
        assert len(ids) == 1


def test_ids_of_what_cannot_be_spelled_are_empty():
    assert not vocabulary_of("unigram, NFKC").ids_of("①".encode())
    assert not vocabulary_of("unigram").ids_of("Ж".encode())
    assert not vocabulary_of("wordpiece").ids_of(b"The")


def test_tokenizer_given_to_the_vocabulary_is_not_changed():
    tokenizer = metaspace()
    before = tokenizer.to_str()
    Vocabulary(tokenizer).encode(b"hello")
    assert tokenizer.to_str() == before
    spec = json.loads(before)
    Vocabulary(spec).encode(b"hello")
    assert spec == json.loads(before)


def test_truncation_and_padding_settings_are_ignored():
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert (
        vocabulary_of("byte-level").encode(b"the position is Incorrect").ids
        == Vocabulary(tokenizer).encode(b"the position is Incorrect").ids
    )


def test_sixteen_threads_encode_as_one():
    # F13
    for name in ("byte-level", "unigram, byte fallback", "sentencepiece"):
        vocabulary = vocabulary_of(name)
        texts = [text.encode() * (1 + i % 3) for i, text in enumerate(HOSTILE)]
        expected = [(vocabulary.encode(text), vocabulary.encode_prompt(text.decode())) for text in texts]
        wrong = []

        def work(seed, vocabulary=vocabulary, texts=texts, expected=expected, wrong=wrong):
            for n in range(60):
                i = (seed * 7 + n) % len(texts)
                got = vocabulary.encode(texts[i]), vocabulary.encode_prompt(texts[i].decode())
                if got != expected[i]:
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


# ---------------------------------------------------------------------- BOS and END


def test_bos_comes_from_the_post_processor():
    # D15, D16
    assert Vocabulary(byte_level()).bos_ids == ()
    assert Vocabulary(metaspace()).bos_ids == (metaspace().token_to_id("<s>"),)
    assert Vocabulary(llama3()).bos_ids == (llama3().token_to_id("<|begin_of_text|>"),)
    assert Vocabulary(prefix_space()).bos_ids == (prefix_space().token_to_id("<s>"),)
    bert = wordpiece()
    bert.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    assert Vocabulary(bert).bos_ids == (1,)
    t5 = unigram()
    t5.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    assert Vocabulary(t5).bos_ids == ()


def test_end_is_the_union_of_declared_and_well_known_ids():
    # D17
    tokenizer = byte_level(special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<stop>"))
    ids = {text: tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<stop>")}
    vocabulary = Vocabulary(tokenizer, end_ids=[ids["<stop>"], ids["<stop>"], 100_000, -1])
    assert vocabulary.symbols.end_ids[0] == vocabulary.symbols.end_id == ids["<stop>"]
    assert set(vocabulary.symbols.end_ids) == set(ids.values())
    assert all(
        vocabulary.is_end(i) and vocabulary.symbols.usable[i] and not vocabulary.surface(i) for i in ids.values()
    )
    start = tokenizer.token_to_id("<|im_start|>")
    assert not vocabulary.is_end(start)
    assert not vocabulary.symbols.usable[start]


def test_declared_end_without_the_special_flag_is_not_typed_into_a_text():
    # A16, D17
    tokenizer = byte_level()
    tokenizer.add_tokens(["<stop>"])
    end = tokenizer.token_to_id("<stop>")
    vocabulary = Vocabulary(tokenizer, end_ids=[end])
    assert end not in vocabulary.encode(b"a<stop>b").ids
    assert end not in vocabulary.encode_prompt("a<stop>b")
    assert vocabulary.control_ids["<stop>"] == end


def test_model_without_end_has_none():
    vocabulary = Vocabulary(metaspace())
    assert vocabulary.symbols.end_ids == ()
    assert vocabulary.symbols.end_id is None


# ---------------------------------------------------------------------- look-ups


@pytest.mark.parametrize("name", ZOO)
def test_sorted_ids_are_all_usable_ids_in_byte_order(name):
    vocabulary = vocabulary_of(name)
    order = vocabulary.sorted_ids.tolist()
    assert sorted(order) == [i for i, token in enumerate(vocabulary.tokens) if token is not None]
    keys = [(vocabulary.surface(i), i) for i in order]
    assert keys == sorted(keys)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "unigram", "permuted"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_ranges_hold_what_brute_force_finds(name, data):
    vocabulary = vocabulary_of(name)
    known = st.sampled_from([token for token in vocabulary.tokens if token]).flatmap(
        lambda token: st.integers(0, len(token)).map(lambda n: token[:n])
    )
    prefix = data.draw(st.one_of(known, st.binary(max_size=3), st.sampled_from([b"", b"\xff", b"\xff\xff", b"a\xff"])))
    order = vocabulary.sorted_ids
    low, high = vocabulary.prefix_range(prefix)
    assert set(order[low:high].tolist()) == {i for i, t in enumerate(vocabulary.tokens) if t and t.startswith(prefix)}
    assert sorted(vocabulary.ids_with(prefix)) == [i for i, t in enumerate(vocabulary.tokens) if t and t == prefix]


def test_same_vocabulary_is_compared_by_content():
    # D11
    one, two = (Vocabulary(characters(["hello", " world"]), end_ids=[0]) for _ in range(2))
    assert one.same_as(one)
    assert one.same_as(two)
    assert one.same_as(Vocabulary(characters(["hello", " world"]), width=one.width + 5, end_ids=[0]))
    other = vocabulary_of("permuted")
    assert other.width == one.width
    assert set(other.ids) == set(one.ids)
    assert not one.same_as(other)
    assert not one.same_as(Vocabulary(characters(["hello", " worlds"]), end_ids=[0]))


def test_permuted_ids_without_any_end_differ_too():
    # D11: neither size nor END nor the set of tokens tells them apart
    one, two = (
        Vocabulary(Tokenizer(models.BPE(vocab=vocab, merges=[]))) for vocab in ({"a": 0, "b": 1}, {"b": 0, "a": 1})
    )
    assert not one.same_as(two)


def test_vocabularies_with_other_ends_differ():
    special = ("<|im_end|>", "<pad>")
    one = Vocabulary(characters([], special=special), end_ids=[0])
    two = Vocabulary(characters([], special=special), end_ids=[0, 1])
    assert not one.same_as(two)
    assert one.same_as(Vocabulary(characters([], special=special), end_ids=[0]))


def test_kinds_are_told_apart():
    kinds = {name: vocabulary_of(name).kind for name in ZOO}
    for name, kind in kinds.items():
        expected = "sentencepiece" if name.startswith(("metaspace", "unigram")) else name.split(",")[0]
        assert kind == {"single bytes": "byte-level", "permuted": "byte-level"}.get(name, expected)
    plain = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Vocabulary(plain).kind == "plain"


def test_stripping_control_tokens_do_not_change_generated_text():
    assert NOT_EXACT not in check_pieces(Vocabulary(stripping()), b"<|user|>\n  hi <|end|>\n")
