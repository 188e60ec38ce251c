"""SAFE written down slowly and plainly: no cache, no batch, full retokenization, one position at a time.

The engine must agree with it exactly (fp32). Only UniTE; greedy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from safe_llm.config import EnsembleConfig
from safe_llm.lookahead import AdaptiveLookahead, FixedLookahead, Lookahead, verify_cost
from safe_llm.member import Member


@dataclass
class Answer:
    text: bytes
    ids: list[int]
    decisions: list[tuple[int, bytes, str]]
    ended: bool


def logits_after(member: Member, ids: list[int]) -> np.ndarray:
    """Logits after the last id, from a fresh forward pass; END ids merged, unusable ids -inf. float64 [W]."""
    with torch.inference_mode():
        raw = member.fresh_model(torch.tensor([ids])).logits[0, -1].double().numpy()
    usable = member.vocabulary.symbols.usable
    out = np.where(usable, raw, -np.inf)
    ends = list(member.vocabulary.symbols.end_ids)
    if len(ends) > 1:
        merged = np.logaddexp.reduce(out[ends])
        out[ends] = -np.inf
        out[ends[0]] = merged
    return out


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def key_of(member: Member, token_id: int) -> bytes:
    return member.vocabulary.tokens[token_id] or b""


def unite(members: list[Member], rows: list[np.ndarray], config: EnsembleConfig) -> bytes:
    weights = config.normalized_weights(len(members))
    tops = []
    for row in rows:
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: config.top_k]
        tops.append([i for i in order if row[i] > -np.inf])
    union: list[bytes] = []
    for member, top in zip(members, tops, strict=True):
        union += [k for k in dict.fromkeys(key_of(member, i) for i in top) if k not in union]
    shares = []
    for member, row, top in zip(members, rows, tops, strict=True):
        # a key's own token: the best one in the member's top k, else its single token with these bytes
        exact: dict[bytes, int | None] = {}
        for key in union:
            mine = [i for i in top if key_of(member, i) == key]
            single = member.vocabulary.symbols.end_id if key == b"" else member.vocabulary.ids.get(key)
            exact[key] = mine[0] if mine else single
        used = {i for i in exact.values() if i is not None} | set(top)
        values = []
        for key in union:
            token_id = exact[key]
            if token_id is None and key:
                pieces = member.vocabulary.encode(key)
                spells = pieces.ends[-1:] == [len(key)] and -1 not in pieces.ends
                first = pieces.ids if spells else []
                if len(first) > 1 and key_of(member, first[0]) == b" ":
                    first = first[1:]
                token_id = first[0] if first and first[0] not in used else None
                used.add(token_id)
            values.append(-np.inf if token_id is None else row[token_id])
        shares.append(softmax(np.array(values)))
    mean = np.array(weights) @ np.stack(shares)
    scores = mean.copy()
    if mean.max() < 0.5 and config.sharpening == "geometric":
        with np.errstate(divide="ignore"):
            scores = np.exp(np.array(weights) @ np.log(np.stack(shares)))
    if mean.max() < 0.5 and config.sharpening == "prefix":
        mine = {key_of(members[0], i) for i in tops[0]}
        for i, key in enumerate(union):
            if mean[i] > config.sharpening_threshold and key in mine and key not in (b"", b" "):
                scores[i] = mean[i] + sum(mean[k] for k, u in enumerate(union) if k != i and u.startswith(key))
    return union[int(scores.argmax())]


def masked(member: Member, row: np.ndarray, text: bytes, grammar: str | None) -> np.ndarray:
    """The row without what the grammar does not allow after `text`."""
    if grammar is None:
        return row
    state = member.follow(grammar)  # from the start, every time: nothing is rolled back
    state.advance(text)
    return np.where(state.allowed(), row, -np.inf)


def is_forced(member: Member, key: bytes, text: bytes, grammar: str | None) -> bool:
    if grammar is None:
        return False
    state = member.follow(grammar)
    state.advance(text)
    return state.forced().startswith(key) if key else int(state.allowed().sum()) == 1


def lookahead_of(members: list[Member], config: EnsembleConfig) -> Lookahead:
    """The rule for the length of drafts."""
    if config.lookahead == "adaptive":
        return AdaptiveLookahead(verify_cost([member.num_bytes for member in members]))
    return FixedLookahead(config.lookahead)


def generate(
    members: list[Member], prompt: str, config: EnsembleConfig, max_tokens: int, grammar: str | None = None
) -> Answer:
    drafter, verifiers = members[0], members[1:]
    weights = config.normalized_weights(len(members))
    prompts = [member.prompter.encode(prompt) for member in members]
    answer, lookahead = Answer(b"", [], [], False), lookahead_of(members, config)
    while not answer.ended and len(answer.ids) < max_tokens:
        draft: list[int] = []
        rows_d: list[np.ndarray] = []
        sure: list[float] = []
        while len(draft) < max_tokens - len(answer.ids) and lookahead.enough(len(draft), sure) is None:
            row = logits_after(drafter, prompts[0] + answer.ids + draft)
            rows_d.append(masked(drafter, row, answer.text + b"".join(key_of(drafter, i) for i in draft), grammar))
            draft.append(int(rows_d[-1].argmax()))
            sure.append(float(softmax(rows_d[-1])[draft[-1]]))
            if drafter.vocabulary.is_end(draft[-1]):
                break
        keys = [key_of(drafter, i) for i in draft]
        pieces = [v.vocabulary.encode(answer.text + b"".join(keys)) for v in verifiers]
        bounds = [{0: 0} | {end: i + 1 for i, end in enumerate(p.ends) if end >= 0} for p in pieces]
        kept: list[int] = []
        replacement: bytes | None = None
        for j, key in enumerate(keys):
            start = len(answer.text) + sum(map(len, keys[:j]))
            text = answer.text + b"".join(keys[:j])
            outcome = "forced" if is_forced(drafter, key, text, grammar) else None
            own = []
            for verifier, piece, bound in zip(verifiers, pieces, bounds, strict=True):
                if outcome is None and start not in bound:
                    covering = [e for e in piece.ends if e > start]
                    outcome = "oov-like" if covering and -1 not in piece.ends else "unrepresentable"
                elif outcome is None and key and (bound[start] >= len(piece.ids) or piece.ends[bound[start]] < 0):
                    outcome = "unrepresentable"  # it has no token of its own to vote with
                elif outcome is None:
                    own.append(verifier.vocabulary.symbols.end_id if key == b"" else piece.ids[bound[start]])
            if outcome is None:
                rows = [rows_d[j]]
                for n, (verifier, piece, bound) in enumerate(zip(verifiers, pieces, bounds, strict=True)):
                    row = logits_after(verifier, prompts[n + 1] + piece.ids[: bound[start]])
                    rows.append(masked(verifier, row, text, grammar))
                probs = [softmax(rows[0])[draft[j]]]
                probs += [softmax(row)[o] for row, o in zip(rows[1:], own, strict=True)]
                if all(int(row.argmax()) == o for row, o in zip(rows[1:], own, strict=True)):
                    outcome = "c1"
                elif float(np.dot(weights, probs)) > config.consensus_threshold:
                    outcome = "c2"
                else:
                    replacement = unite(members, rows, config)
                    outcome = "confirmed" if replacement == key else "replaced"
                    replacement = None if replacement == key else replacement
            answer.decisions.append((len(answer.ids) + j, key, outcome))
            if replacement is not None:
                break
            kept.append(draft[j])
        decided = len(kept) + (replacement is not None)
        done = len(draft) if replacement is not None else decided
        lookahead.learn(sure[:done], num_decided=decided, was_replaced=replacement is not None)
        if replacement == b"":
            kept.append(drafter.vocabulary.symbols.end_id)
        elif replacement is not None:
            kept += drafter.vocabulary.ids_of(replacement)
        for token_id in kept:
            if drafter.vocabulary.is_end(token_id):
                answer.ended = True
                break
            if len(answer.ids) < max_tokens:
                answer.ids.append(token_id)
                answer.text += key_of(drafter, token_id)
    return answer
