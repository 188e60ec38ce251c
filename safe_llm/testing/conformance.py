"""What every backend must do, as a test class to inherit from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from safe_llm.backends.base import Backend, Feed, FloatArray, Scores, Symbols
from safe_llm.errors import ContextOverflowError

__all__ = ["BackendConformance"]

ErrorT = TypeVar("ErrorT", bound=Exception)


class BackendConformance:
    """Tests of the `Backend` contract; pytest collects them from a subclass whose name starts with `Test`.

    The subclass makes the backend. It needs at least eight usable ids that do not end an answer, two that do, one
    unusable id, and a context of 16 to some hundred ids.

    Example:
        class TestMyBackend(BackendConformance):
            def make_backend(self):
                return MyBackend(...), symbols
    """

    atol = 1e-4
    """Largest difference of two logits that rounding explains."""

    def make_backend(self) -> tuple[Backend, Symbols]:
        """Return a new backend and the symbols it was made with."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Make the backend of one test, and random texts."""
        self.backend, self.symbols = self.make_backend()
        self.ids = np.setdiff1d(np.flatnonzero(self.symbols.usable), self.symbols.end_ids)
        rng = np.random.default_rng(0)
        self.texts = [[int(token) for token in rng.choice(self.ids, size)] for size in (13, 4, 9)]

    # ------------------------------------------------------------------ rows

    def test_new_row_is_empty_and_grows_by_what_is_fed(self) -> None:
        """Lengths follow the feeds, row by row."""
        first, second = self.backend.open(), self.backend.open()
        assert first != second
        self.backend.forward([Feed(row=first, ids=self.texts[0])])
        assert (self.backend.length(first), self.backend.length(second)) == (13, 0)

    def test_append_one_by_one_equals_append_at_once(self) -> None:
        """How a text is cut into feeds makes no difference."""
        text, row = self.texts[0], self.backend.open()
        parts = [self._all_logits(self.backend.forward([Feed(row=row, ids=[token])])) for token in text]
        np.testing.assert_allclose(np.concatenate(parts), self._fresh(text, len(text)), atol=self.atol)

    def test_ragged_rows_equal_single_rows(self) -> None:
        """Rows of a batch do not see each other, whatever their lengths before and now."""
        rows = [self.backend.open() for _ in self.texts]
        self.backend.forward([Feed(row=rows[0], ids=self.texts[0][:8])])
        starts = (8, 0, 0)
        feeds = [Feed(row=row, ids=text[at:]) for row, text, at in zip(rows, self.texts, starts, strict=True)]
        found = self._all_logits(self.backend.forward(feeds))
        np.testing.assert_allclose(found, np.concatenate([self._fresh(t) for t in self.texts]), atol=self.atol)

    def test_rollback_to_any_depth_equals_a_fresh_row(self) -> None:
        """What was rolled back leaves no trace."""
        text, other = self.texts[0], self.texts[2]
        for depth in range(len(text) + 1):
            row, neighbour = self.backend.open(), self.backend.open()
            self.backend.forward([Feed(row=row, ids=text), Feed(row=neighbour, ids=other)])
            self.backend.rollback(row, depth)
            assert self.backend.length(row) == depth
            found = self._all_logits(self.backend.forward([Feed(row=row, ids=other[:3], keep=3)]))
            np.testing.assert_allclose(found, self._fresh(text[:depth] + other[:3], 3), atol=self.atol)
            self.backend.close(row)
            self.backend.close(neighbour)

    def test_rollback_beyond_the_row_is_refused(self) -> None:
        """A row cannot be rolled forward."""
        row = self.backend.open()
        self.backend.forward([Feed(row=row, ids=self.texts[1])])
        _raises(ValueError, lambda: self.backend.rollback(row, 5))
        _raises(ValueError, lambda: self.backend.rollback(row, -1))
        assert self.backend.length(row) == 4

    def test_rows_join_and_leave(self) -> None:
        """Closing a row in the middle and opening others leaves the rest as they were."""
        rows = [self.backend.open() for _ in self.texts]
        self.backend.forward([Feed(row=row, ids=text) for row, text in zip(rows, self.texts, strict=True)])
        self.backend.close(rows[1])
        late = self.backend.open()
        assert [self.backend.length(row) for row in (rows[0], rows[2], late)] == [13, 9, 0]
        feeds = [Feed(row=row, ids=self.texts[1]) for row in (late, rows[2], rows[0])]
        found = self._all_logits(self.backend.forward(feeds))
        wanted = [self._fresh(text + self.texts[1]) for text in ([], self.texts[2], self.texts[0])]
        np.testing.assert_allclose(found, np.concatenate(wanted), atol=self.atol)
        for row in (rows[0], late, rows[2]):
            self.backend.close(row)
        np.testing.assert_allclose(self._fresh(self.texts[0]), self._fresh(self.texts[0]), atol=self.atol)

    # ------------------------------------------------------------------ shared beginnings

    def test_shared_beginning_of_any_length_equals_a_fresh_row(self) -> None:
        """What is taken over need not be fed, and no pass is run for it."""
        text, other = self.texts[0], self.texts[2]
        source, neighbour = self.backend.open(), self.backend.open()
        self.backend.forward([Feed(row=source, ids=text), Feed(row=neighbour, ids=other)])
        for length in range(len(text) + 1):
            row = self.backend.open()
            passes = self.backend.num_forwards
            taken = self.backend.share(row, source, length)
            assert self.backend.num_forwards == passes
            assert 0 <= taken <= length
            assert self.backend.length(row) == taken
            whole = text[:length] + other[:3]
            found = self._all_logits(self.backend.forward([Feed(row=row, ids=whole[taken:], keep=3)]))
            np.testing.assert_allclose(found, self._fresh(whole, 3), atol=self.atol)
            self.backend.close(row)

    def test_rows_that_shared_go_their_own_ways(self) -> None:
        """Growing, rolling back or closing one changes nothing of the other, whichever it is."""
        text, more = self.texts[0], self.texts[2]
        for first_is_source in (True, False):
            source, taker = self.backend.open(), self.backend.open()
            self.backend.forward([Feed(row=source, ids=text)])
            taken = self.backend.share(taker, source, 10)
            self.backend.forward([Feed(row=taker, ids=[*text[:10], *more][taken:])])
            texts = {source: text, taker: [*text[:10], *more]}
            first, second = (source, taker) if first_is_source else (taker, source)
            self.backend.rollback(first, 5)
            self.backend.forward([Feed(row=first, ids=more)])
            self._agrees(second, texts[second])
            self._agrees(first, texts[first][:5] + more)
            self.backend.close(first)
            self._agrees(second, texts[second])
            self.backend.close(second)

    def test_sharing_what_is_not_there_is_refused(self) -> None:
        """The row must be empty, and the source must hold what it gives."""
        source, row = self.backend.open(), self.backend.open()
        self.backend.forward([Feed(row=source, ids=self.texts[1])])
        _raises(ValueError, lambda: self.backend.share(row, source, 5))
        _raises(ValueError, lambda: self.backend.share(row, source, -1))
        assert self.backend.length(row) == 0
        self.backend.forward([Feed(row=row, ids=self.texts[0])])
        _raises(ValueError, lambda: self.backend.share(row, source, 2))
        self._agrees(row, self.texts[0])

    # ------------------------------------------------------------------ scores

    def test_kept_positions_come_in_the_order_of_the_feeds(self) -> None:
        """N is the sum of `keep`; within a feed the order is the text's."""
        rows = [self.backend.open() for _ in self.texts]
        keeps = (2, 4, 1)
        order = (2, 0, 1)
        feeds = [Feed(row=rows[i], ids=self.texts[i], keep=keeps[i]) for i in order]
        scores = self.backend.forward(feeds)
        assert len(scores) == sum(keeps)
        wanted = [self._fresh(self.texts[i], keeps[i]) for i in order]
        np.testing.assert_allclose(self._all_logits(scores), np.concatenate(wanted), atol=self.atol)

    def test_scores_agree_with_each_other(self) -> None:
        """All methods are views of one distribution per position."""
        scores, positions = self._some_scores(), [2, 0]
        every = list(range(self.backend.width))
        best, finite = scores.top1()
        assert finite.all()
        for position in positions:
            logits = scores.logits([position] * len(every), every)
            log_probs = scores.log_probs([position] * len(every), every)
            assert np.isclose(np.exp(log_probs).sum(), 1.0)
            np.testing.assert_allclose(log_probs, logits - np.log(np.exp(logits).sum()), atol=self.atol)
            ids, top = (part[0] for part in scores.top_k([position], self.backend.width + 1))
            np.testing.assert_array_equal(ids, np.argsort(-logits, kind="stable"))
            np.testing.assert_array_equal(top, logits[ids])
            assert ids[0] == best[position]
            # one position for all ids, which may be an array
            np.testing.assert_array_equal(scores.logits([position], np.array(every)), logits)
            np.testing.assert_allclose(scores.log_probs([position], np.array(every)), log_probs, rtol=1e-12)
        if self.backend.has_dense_scores:
            dense = scores.dense(positions).cpu().numpy()
            wanted = [scores.logits([position] * len(every), every) for position in positions]
            np.testing.assert_array_equal(dense, np.stack(wanted))

    def test_unusable_ids_and_further_ends_have_no_mass(self) -> None:
        """Symbols are applied before any softmax."""
        scores = self._some_scores()
        gone = [*np.flatnonzero(~self.symbols.usable).tolist(), *self.symbols.end_ids[1:]]
        assert np.isneginf(scores.logits([0] * len(gone), gone)).all()
        assert np.isneginf(scores.log_probs([1] * len(gone), gone)).all()
        assert np.isfinite(scores.logits([0], [self.symbols.end_ids[0]])).all()

    def test_forbidden_end_loses_its_mass_at_its_position_only(self) -> None:
        """What is left is normalised again."""
        scores, end = self._some_scores(), self.symbols.end_ids[0]
        scores.top1()
        before = scores.log_probs([0, 1, 0], [end, end, int(self.ids[0])])
        scores.forbid_end([0])
        after = scores.log_probs([0, 1, 0], [end, end, int(self.ids[0])])
        assert np.isneginf(after[0])
        assert after[1] == before[1]
        assert np.isclose(after[2], before[2] - np.log1p(-np.exp(before[0])))
        assert end not in scores.top_k([0], len(self.ids))[0]

    # ------------------------------------------------------------------ limits

    def test_overflow_changes_nothing(self) -> None:
        """A feed beyond `max_context` is refused with the numbers, and no row of the call has changed."""
        rows = [self.backend.open(), self.backend.open()]
        self.backend.forward([Feed(row=row, ids=self.texts[1]) for row in rows])
        passes = self.backend.num_forwards
        too_long = [int(self.ids[0])] * (self.backend.max_context - 3)
        feeds = [Feed(row=rows[0], ids=[int(self.ids[0])]), Feed(row=rows[1], ids=too_long)]
        error = _raises(ContextOverflowError, lambda: self.backend.forward(feeds))
        assert error.max_context == self.backend.max_context
        assert [self.backend.length(row) for row in rows] == [4, 4]
        assert self.backend.num_forwards == passes
        found = self._all_logits(self.backend.forward([Feed(row=rows[1], ids=too_long[:-1])]))
        np.testing.assert_allclose(found, self._fresh(self.texts[1] + too_long[:-1]), atol=self.atol)

    def test_passes_are_counted_and_timed(self) -> None:
        """A short feed on every row is one pass."""
        rows = [self.backend.open() for _ in self.texts]
        passes, seconds = self.backend.num_forwards, self.backend.forward_s
        self.backend.forward([Feed(row=row, ids=text) for row, text in zip(rows, self.texts, strict=True)])
        assert self.backend.num_forwards == passes + 1
        assert self.backend.forward_s > seconds

    # ------------------------------------------------------------------ helpers

    def _some_scores(self) -> Scores:
        row = self.backend.open()
        return self.backend.forward([Feed(row=row, ids=self.texts[0], keep=3)])

    def _all_logits(self, scores: Scores) -> FloatArray:
        """Return the logits of the ids that are not masked [N, U]."""
        columns = [*self.ids.tolist(), self.symbols.end_ids[0]]
        positions: Sequence[int] = np.repeat(np.arange(len(scores)), len(columns)).tolist()
        return scores.logits(positions, columns * len(scores)).reshape(len(scores), len(columns))

    def _agrees(self, row: int, text: list[int]) -> None:
        """Check by two more ids that the row holds `text`; they are forgotten again."""
        more = self.texts[1][:2]
        assert self.backend.length(row) == len(text)
        found = self._all_logits(self.backend.forward([Feed(row=row, ids=more, keep=2)]))
        self.backend.rollback(row, len(text))
        np.testing.assert_allclose(found, self._fresh(text + more, 2), atol=self.atol)

    def _fresh(self, text: list[int], keep: int = 1) -> FloatArray:
        """Return the last `keep` positions' logits of a text in a row and a call of its own."""
        row = self.backend.open()
        logits = self._all_logits(self.backend.forward([Feed(row=row, ids=text, keep=keep)]))
        self.backend.close(row)
        return logits


def _raises(kind: type[ErrorT], call: Callable[[], object]) -> ErrorT:
    """Return the error of type `kind` that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
