r"""From a model's text to its answer: numbers, \boxed{}, letters and options; pure functions.

A *stated* answer stands where the prompt asked for it (\boxed{}, "The answer is ..."; for numbers also "#### ..."), and
the last one counts: models recite examples and correct themselves. A *loose* one is the best guess without that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

__all__ = [
    "boxed",
    "last_formula",
    "loose_letter",
    "loose_number",
    "loose_option",
    "number_value",
    "stated_letter",
    "stated_number",
    "stated_option",
    "stated_text",
]

MAX_DIGITS = 100
"""Longer numbers are no answers; turning them into integers would take time that grows with their square."""

_ANSWER_IS = re.compile(r"\banswer\s+is\b(?:[\s:*_]|\$\$|\\\[|\\\()*+", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")

# ---------------------------------------------------------------------- numbers

_PLAIN = (
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<!\\)\\[,;: ]|[\u00a0\u2009\u202f]"), " "),
    (re.compile("\u2212"), "-"),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac\{)"), " "),
    (re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"), r"\1/\2"),
)
_NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9])(?<![0-9]\.)        # not inside a word or a number
    (?: (?P<minus>(?<![\w)\]}%.])-) [$€£]? | [$€£]\s?(?P<late_minus>-)? )?
    (?:
      (?P<whole>[0-9]+)[ ](?P<part>[0-9]+/[0-9]+)(?![0-9/])       # 1 1/2
    | (?P<digits>
        (?: [0-9]{1,2}(?:,[0-9]{2}){1,9},[0-9]{3} | [0-9]{1,3}(?:,[0-9]{3}){1,9}
          | [0-9]{1,3}(?:[ ][0-9]{3}){1,9} | [0-9]+
        ) (?![0-9]) (?:\.[0-9]+)?
      | \.[0-9]+
      )
      (?: \s?/\s? (?P<below>[0-9]+)(?![0-9/.]) )?
    )
    (?!(?:st|nd|rd|th)\b)               # 3rd is no amount
    """,
    re.VERBOSE,
)
_WHOLE_NUMBER = re.compile(rf"\s*\+?(?:{_NUMBER.pattern})\s?%?\.?\s*", re.VERBOSE)


def number_value(text: str) -> Fraction | None:
    """Return what a text that is one number is worth, or None: `$1,200.50`, `70 000`, `-3%`, `1/2` and `1 1/2` are one.

    A percent sign is a unit like the dollar: gold answers leave it out.
    """
    match = _WHOLE_NUMBER.fullmatch(_plain(text))
    return _value(match) if match else None


def stated_number(text: str) -> str | None:
    r"""Return the number that the text last states in \boxed{}, after `####` or after "answer is"."""
    text = _plain(text)
    spans = [*_boxes(text), *_rest_of_lines(text), *_sentences(text)]
    return _last(spans, _number_in)


def loose_number(text: str) -> str | None:
    """Return the last number of the text."""
    numbers = [match[0] for match in _NUMBER.finditer(_plain(text)) if len(match[0]) <= MAX_DIGITS]
    return numbers[-1] if numbers else None


def _plain(text: str) -> str:
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_DIGITS:
        return None
    digits = (match["digits"] or match["whole"]).replace(",", "").replace(" ", "")
    value = Fraction(digits)
    below = match["below"] or match["part"]
    if below is not None:
        above, _, below = below.rpartition("/")
        if not int(below):
            return None
        value = value + Fraction(int(above), int(below)) if above else value / int(below)
    return -value if match["minus"] or match["late_minus"] else value


def _number_in(span: str) -> str | None:
    """Return the first number of what the span comes to: "12 + 6 = 18 eggs" comes to 18."""
    match = _NUMBER.search(span.rpartition("=")[2]) or _NUMBER.search(span)
    return match and match[0]


def _rest_of_lines(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"####([^\n]*)", text):
        yield match.start(), match[1]


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield what stands after each "answer is", to the end of the sentence or the next one."""
    marks = list(_ANSWER_IS.finditer(text))
    limits = [*(mark.start() for mark in marks), len(text)][1:]
    for mark, limit in zip(marks, limits, strict=True):
        end = _SENTENCE_END.search(text, mark.end(), limit)
        yield mark.start(), text[mark.end() : end.start() if end else limit]


def _last(spans: Iterable[tuple[int, str]], answer_in: Callable[[str], str | None]) -> str | None:
    """Return the answer of the last span, by where it starts, that has one."""
    for _, span in sorted(spans, reverse=True):
        answer = answer_in(span)
        if answer is not None:
            return answer
    return None


# ---------------------------------------------------------------------- formulas

_BRACES = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{|\\.|[{}]", re.DOTALL)
_FORMULA = re.compile(
    r"\$\$(.{1,500}?)\$\$|\\\[(.{1,500}?)\\\]|\\\((.{1,500}?)\\\)|(?<!\\)\$([^$]{1,500}?)(?<!\\)\$", re.DOTALL
)


def boxed(text: str) -> str | None:
    r"""Return what the last \boxed{} holds that is balanced and not empty, or None."""
    return _last(_boxes(text), lambda span: span.strip() or None)


def stated_text(text: str) -> str | None:
    """Return the end of the last sentence that says "answer is", without its full stop, or None."""
    sentences = [span.strip(" *_`\"'$") for _, span in _sentences(text)]
    return next((span for span in reversed(sentences) if span), None)


def last_formula(text: str) -> str | None:
    r"""Return the last formula of the text ($ $, $$ $$, \( \), \[ \]), from its last equals sign on, or None."""
    found = [next(filter(None, match.groups())) for match in _FORMULA.finditer(text)]
    return found[-1].rpartition("=")[2].strip() or None if found else None


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    """Yield the balanced boxes, each where it is closed: one pass, however many are never closed."""
    opened: list[re.Match[str]] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "{" or len(brace[0]) > 2:  # not what a backslash escapes
            opened.append(brace)
        elif brace[0] == "}" and opened and (opening := opened.pop())[0] != "{":
            yield opening.start(), text[opening.end() : brace.start()]


# ---------------------------------------------------------------------- letters

_OPENING = r"(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{|[\s:*_$(\"'`\[{]|(?:[Oo]ption|[Cc]hoice)\s){0,40}+"
_CLOSED = r"(?![A-Za-z0-9'’])"
_FIRST_LETTER = re.compile(rf"{_OPENING}([A-Z]){_CLOSED}")
_ARTICLE = re.compile(r"\s*[AI]\s+[a-z]")  # "the answer is A good conductor"
_NAMED_LETTER = re.compile(
    rf"""
    \b(?:[Aa]nswer|[Oo]ption|[Cc]hoice)\b\s*+(?:is|:|=)?{_OPENING}(?P<after>[A-Z]){_CLOSED}
    | (?<![A-Za-z])(?P<before>[A-Z])\)?[\s*]*is\s+(?:the\s+)?(?:correct|right|best|true)
    | ^[ \t*(]*+(?P<alone>[A-Z])[ \t*).]*+$
    """,
    re.VERBOSE | re.MULTILINE,
)
_BRACKETED_LETTER = re.compile(r"\(([A-Za-z])\)|\*\*([A-Z])[.):]?\s?\*\*")
_LEADING_LETTER = re.compile(r"^[ \t*(]*+([A-Z])[.):]", re.MULTILINE)


def stated_letter(text: str, letters: str) -> str | None:
    r"""Return the letter among `letters` that the text last names after "answer is" or in \boxed{}, or None."""
    return _last([*_boxes(text), *_sentences(text)], lambda span: _first_letter(span, letters))


def loose_letter(text: str, letters: str, choices: Sequence[str] = ()) -> str | None:
    """Return the letter that the text seems to settle on, or None.

    By falling authority: "option B", "B is correct" or a line of its own; the text of a choice after "answer is"; the
    last letter in brackets or bold; the one letter that lines begin with.
    """
    named = _among(letters, (m["after"] or m["before"] or m["alone"] for m in _NAMED_LETTER.finditer(text)))
    if named:
        return named[-1]
    said = _bare(stated_text(text) or "")
    by_text = [letter for letter, choice in zip(letters, choices, strict=False) if said and said == _bare(choice)]
    if len(by_text) == 1:
        return by_text[0]
    marked = _among(letters, ((m[1] or m[2]).upper() for m in _BRACKETED_LETTER.finditer(text)))
    if marked:
        return marked[-1]
    leading = set(_among(letters, (m[1] for m in _LEADING_LETTER.finditer(text))))
    return leading.pop() if len(leading) == 1 else None


def _first_letter(span: str, letters: str) -> str | None:
    match = _FIRST_LETTER.match(span)
    return match[1] if match and match[1] in letters and not _ARTICLE.match(span) else None


def _among(letters: str, found: Iterable[str]) -> list[str]:
    return [letter for letter in found if letter in letters]


def _bare(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


# ---------------------------------------------------------------------- options that are words


def stated_option(text: str, options: Sequence[str]) -> str | None:
    r"""Return the option that the text last names after "answer is" or in \boxed{}, or None."""
    words = _alternatives(options)
    begins = re.compile(rf"{_OPENING}({words}){_CLOSED}", re.IGNORECASE)
    by_lower = {option.lower(): option for option in options}

    def option_in(span: str) -> str | None:
        match = begins.match(span)
        return by_lower[match[1].lower()] if match else None

    return _last([*_boxes(text), *_sentences(text)], option_in)


def loose_option(text: str, options: Sequence[str]) -> str | None:
    """Return the option that stands last in the text as a word of its own, not negated, or None.

    In lower case only if it is written so: "no" is an ordinary word, "No" an answer.
    """
    spellings = {spelling: option for option in options for spelling in (option, option.capitalize(), option.upper())}
    words = _alternatives(spellings)
    found = re.findall(rf"(?<!\bnot )(?<![\w-])({words})(?![\w-])", text)
    return spellings[found[-1]] if found else None


def _alternatives(words: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
