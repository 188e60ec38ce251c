"""SAFE with prefix mass written down slowly and plainly: fresh forward passes, full retokenization, whole vocabularies.

The engine must agree with it exactly (fp32). Greedy; different tokenizers; nothing is asked beyond the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference import Answer, key_of, logits_after, lookahead_of, softmax
from safe_llm.config import EnsembleConfig
from safe_llm.member import Member

END = b""


class Known:
    """A member at a candidate: its own ids of the draft from there on, and its distributions before each of them.

    After the last of them, too, where that is known.
    """

    def __init__(self, member: Member, own: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        self.member, self.own, self.rows = member, list(own), [softmax(row) for row in rows]
        self.logits = list(rows)
        self.keys = [key_of(member, i) for i in range(len(rows[0]))]

    def mass(self, text: bytes, at: int = 0) -> float:
        """The probability that the member's continuation begins with `text`; 1 for what is not known."""
        if text == END:
            return float(self.rows[0][self.member.vocabulary.symbols.end_id])
        total = sum(p for p, key in zip(self.rows[at], self.keys, strict=True) if key and key.startswith(text))
        for p, key in zip(self.rows[at], self.keys, strict=True):
            if key and key != text and text.startswith(key):
                is_own = at + 1 < len(self.rows) and at < len(self.own) and self.keys[self.own[at]] == key
                total += p * (self.mass(text[len(key) :], at + 1) if is_own else 1.0)
        return min(1.0, float(total)) if at == 0 else float(total)

    def would_go_on(self) -> bool:
        """Whether longer tokens than the last of its own have more mass than that one."""
        last = self.keys[self.own[-1]]
        if last == END:
            return False
        before = self.rows[len(self.own) - 1]
        longer = sum(p for p, key in zip(before, self.keys, strict=True) if key.startswith(last) and key != last)
        return longer > sum(p for p, key in zip(before, self.keys, strict=True) if key == last)

    def top(self, count: int) -> list[bytes]:
        order = sorted(range(len(self.keys)), key=lambda i: (-self.logits[0][i], i))[:count]
        return [self.keys[i] for i in order if self.logits[0][i] > -np.inf]

    def likeliest(self, prefix: bytes) -> bytes | None:
        """Its likeliest token that starts with `prefix`."""
        found = [i for i, key in enumerate(self.keys) if key and key.startswith(prefix)]
        return self.keys[max(found, key=lambda i: (self.logits[0][i], -i))] if found else None


def merge(knowns: list[Known], weights: Sequence[float], span: bytes, top_k: int) -> bytes:
    drafter, verifiers = knowns[0], knowns[1:]
    keys = drafter.top(top_k)
    for verifier in verifiers:
        for token in verifier.top(5):
            if token != END:
                keys.append(drafter.likeliest(token) or token)
    vocabulary = drafter.member.vocabulary
    keys = [k for k in dict.fromkeys([*keys, span, END]) if k == END or vocabulary.ids_of(k)]
    best, best_score = END, -1.0
    for key in keys:
        # of the longer candidates that start with this one, those with no other candidate in between
        longer = [k for k in keys if key and k != key and k.startswith(key)]
        next_longer = [k for k in longer if not any(k != other and k.startswith(other) for other in longer)]
        score = sum(
            weight * max(0.0, known.mass(key) - sum(known.mass(k) for k in next_longer))
            for weight, known in zip(weights, knowns, strict=True)
        )
        if score > best_score + 1e-12:
            best, best_score = key, score
    return best


def generate(members: list[Member], prompt: str, config: EnsembleConfig, max_tokens: int) -> Answer:
    drafter, verifiers = members[0], members[1:]
    weights = config.normalized_weights(len(members))
    prompts = [member.prompter.encode(prompt) for member in members]
    answer, lookahead = Answer(b"", [], [], False), lookahead_of(members, config)
    while not answer.ended and len(answer.ids) < max_tokens:
        draft: list[int] = []
        rows: list[np.ndarray] = []
        sure: list[float] = []
        while len(draft) < max_tokens - len(answer.ids) and lookahead.enough(len(draft), sure) is None:
            rows.append(logits_after(drafter, prompts[0] + answer.ids + draft))
            draft.append(int(rows[-1].argmax()))
            sure.append(float(softmax(rows[-1])[draft[-1]]))
            if drafter.vocabulary.is_end(draft[-1]):
                break
        keys = [key_of(drafter, i) for i in draft]
        pieces = [v.vocabulary.encode(answer.text + b"".join(keys)) for v in verifiers]
        bounds = [{0: 0} | {end: i + 1 for i, end in enumerate(p.ends) if end >= 0} for p in pieces]
        starts = [len(answer.text) + sum(map(len, keys[:j])) for j in range(len(keys))]

        def is_candidate(j: int) -> bool:
            return all(starts[j] in bound for bound in bounds) and not any(  # noqa: B023 - called in this round only
                keys[j] and (bound[starts[j]] >= len(p.ids) or p.ends[bound[starts[j]]] < 0)  # noqa: B023
                for p, bound in zip(pieces, bounds, strict=True)  # noqa: B023
            )

        candidates = [is_candidate(j) for j in range(len(keys))]
        kept: list[int] = []
        num_decided, was_replaced = 0, False
        for j, key in enumerate(keys):
            outcome, chosen = "blocked", None
            if candidates[j]:
                stop = next((k for k in range(j + 1, len(keys)) if candidates[k]), len(keys))
                span = b"".join(keys[j:stop]) if key else END
                knowns = [Known(drafter, draft[j:], rows[j:])]
                for n, (verifier, piece, bound) in enumerate(zip(verifiers, pieces, bounds, strict=True)):
                    count = bound[starts[j]]
                    ahead = [
                        logits_after(verifier, prompts[n + 1] + piece.ids[:k]) for k in range(count, len(piece.ids) + 1)
                    ]
                    knowns.append(Known(verifier, piece.ids[count:], ahead))
                is_open = bool(key) and stop == len(keys)
                if j and is_open and any(known.would_go_on() for known in knowns[1:]):
                    break
                masses = [known.mass(span) for known in knowns]
                if all(mass > 0.5 for mass in masses[1:]):
                    outcome = "c1"
                elif float(np.dot(weights, masses)) > config.consensus_threshold:
                    outcome = "c2"
                else:
                    chosen = merge(knowns, weights, span, config.top_k)
                    outcome = "confirmed" if chosen == span else "replaced"
            answer.decisions.append((len(answer.ids) + j, key, outcome))
            num_decided, was_replaced = j + 1, outcome == "replaced"
            if was_replaced:
                end = drafter.vocabulary.symbols.end_id
                kept += [end] if chosen == END else drafter.vocabulary.ids_of(chosen)
                break
            kept.append(draft[j])
        done = len(draft) if was_replaced else num_decided
        lookahead.learn(sure[:done], num_decided=num_decided, was_replaced=was_replaced)
        for token_id in kept:
            if drafter.vocabulary.is_end(token_id):
                answer.ended = True
                break
            if len(answer.ids) < max_tokens:
                answer.ids.append(token_id)
                answer.text += key_of(drafter, token_id)
    return answer
