"""`DenseScores`: masking, ties, and what counts as finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safe_llm.backends.base import Symbols
from safe_llm.backends.dense import DenseScores, SymbolColumns, _log_mass, _top_k
from safe_llm.testing import plain_symbols

INF, NAN = float("inf"), float("nan")


def scores_of(rows, symbols=None, dtype=torch.float32):
    logits = torch.tensor(rows, dtype=dtype)
    symbols = symbols or plain_symbols(logits.shape[1])
    return DenseScores(logits, SymbolColumns.of(symbols, "cpu"))


def test_dense_padded_and_control_columns_never_win():
    # Case D09: the matrix is wider than the tokenizer, and a padding column has the largest logit.
    scores = scores_of([[1.0, 9.0, 2.0, 50.0, 60.0]], plain_symbols(5, unusable=(1, 3, 4)))
    assert scores.top1()[0].tolist() == [2]
    ids, logits = scores.top_k([0], 5)
    assert ids.tolist() == [[2, 0, 1, 3, 4]]
    assert logits[0, 2:].tolist() == [-INF] * 3
    np.testing.assert_allclose(np.exp(scores.log_probs([0, 0], [0, 2])), torch.tensor([1.0, 2.0]).softmax(0))


def test_dense_ends_are_one_symbol_with_their_summed_mass():
    rows = [[0.3, 1.0, 2.0, -1.0], [0.0, -INF, -INF, 0.0]]
    scores = scores_of(rows, plain_symbols(4, end_ids=(2, 1)))
    probs = torch.tensor(rows[0]).double().softmax(0).numpy()
    np.testing.assert_allclose(
        np.exp(scores.log_probs([0] * 4, range(4))), [probs[0], 0.0, probs[1] + probs[2], probs[3]], rtol=1e-6
    )
    assert scores.logits([1, 1], [1, 2]).tolist() == [-INF, -INF]
    assert scores.top1()[1].tolist() == [True, True]


@pytest.mark.parametrize("end_ids", [(), (1,)])
def test_dense_forbid_end_without_or_with_one_end(end_ids):
    scores = scores_of([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0]], plain_symbols(3, end_ids=end_ids))
    assert scores.top1()[0].tolist() == [1, 1]
    scores.forbid_end([1])
    assert scores.top1()[0].tolist() == ([1, 2] if end_ids else [1, 1])
    scores.forbid_end([])


@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize("value", [NAN, INF])
def test_dense_nan_or_infinity_anywhere_is_reported(column, value):
    # Case F09. Column 0 is masked, 1 and 2 are ends, 4 is masked: masking must not hide it, nor forbidding END.
    rows = [[0.0, 1.0, 2.0, 3.0, 4.0] for _ in range(3)]
    rows[1][column] = value
    scores = scores_of(rows, plain_symbols(5, end_ids=(1, 2), unusable=(0, 4)))
    assert scores.top1()[1].tolist() == [True, False, True]
    scores.forbid_end([0, 1, 2])
    assert scores.top1()[1].tolist() == [True, False, True]


def test_dense_row_without_any_choice_is_reported_and_a_masked_minus_infinity_is_not():
    scores = scores_of([[-INF, -INF, 3.0], [-INF, 0.0, -INF]], plain_symbols(3, unusable=(2,)))
    assert scores.top1()[1].tolist() == [False, True]


def test_dense_device_path_agrees_with_host_path():
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).bfloat16().tolist()
    rows[3][17] = NAN
    scores = scores_of(rows, plain_symbols(300, unusable=(4, 9)))
    for host, device in zip(scores._host_top1(), scores._device_top1(), strict=True):
        np.testing.assert_array_equal(host, device)


def test_dense_device_path_brings_the_best_log_probabilities_along(monkeypatch):
    monkeypatch.setattr(DenseScores, "_host_top1", DenseScores._device_top1)
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).tolist()
    plain, scores = (scores_of(rows, plain_symbols(50, end_ids=(3, 5), unusable=(4, 9))) for _ in range(2))
    best = scores.top1()[0].tolist()
    asked, chosen = [2, 0, 2], [best[2], best[0], best[2]]
    np.testing.assert_array_equal(scores.log_probs(asked, chosen), plain.log_probs(asked, chosen))
    np.testing.assert_array_equal(scores.log_probs([1, 2], [7, 8]), plain.log_probs([1, 2], [7, 8]))
    for either in (scores, plain):
        either.forbid_end([0, 1])
    np.testing.assert_array_equal(scores.log_probs([0, 1], [3, 6]), plain.log_probs([0, 1], [3, 6]))
    best_now = int(scores.top1()[0][1])
    np.testing.assert_array_equal(scores.log_probs([1], [best_now]), plain.log_probs([1], [best_now]))


@given(
    st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=90).map(lambda x: [x, x[::-1]]),
    st.integers(1, 95),
)
def test_dense_top_k_breaks_ties_by_the_lowest_id(rows, k):
    # 90 columns of 5 values: ties go far beyond the margin that the fast path takes.
    scores = scores_of(rows)
    ids, logits = scores.top_k([1, 0], k)
    for found_ids, found, row in zip(ids, logits, (rows[1], rows[0]), strict=True):
        wanted = np.lexsort((range(len(row)), -np.array(row)))[:k]
        np.testing.assert_array_equal(found_ids, wanted)
        np.testing.assert_array_equal(found, np.array(row)[wanted])
    assert scores.top1()[0].tolist() == [row.index(max(row)) for row in rows]


def test_dense_top_k_of_a_large_vocabulary_of_few_values():
    # As bfloat16 logits are: thousands of ids share a value, and the library's own top-k takes any of them.
    row = torch.randint(0, 4, (20000,), generator=torch.Generator().manual_seed(0)).tolist()
    row[19999] = 9
    ids = scores_of([row, row], dtype=torch.bfloat16).top_k([0, 1], 40)[0]
    threes = [index for index, value in enumerate(row) if value == 3]
    assert ids.tolist() == [[19999, *threes[:39]]] * 2


@pytest.mark.parametrize("width", [128 * 26, 128 * 27 + 5, 20_000])
def test_dense_top_k_of_long_rows_is_the_librarys(width):
    # in blocks; the rest behind the last whole block holds the best of the second row
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    rows[1, -1] = 9.0
    rows[2, 300:330] = torch.arange(30) + 9.0  # all of the best are in one or two blocks
    rows[0, :100] = -INF
    for found, wanted in zip(_top_k(rows, 26), rows.topk(26, dim=1), strict=True):
        assert torch.equal(found, wanted)
    scores = scores_of(rows.tolist())
    np.testing.assert_array_equal(scores.top_k([2, 1], 10)[0], rows[[2, 1]].topk(10, dim=1)[1])
    assert _top_k(rows.to("meta"), 26)[0].shape == (3, 26)


def test_dense_normalisers_are_computed_once_and_follow_what_is_masked():
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    scores = scores_of(rows.tolist(), plain_symbols(50, end_ids=(4,)))
    wanted = rows.double().log_softmax(1).numpy()
    np.testing.assert_allclose(scores.log_probs([1], range(50)), wanted[1], rtol=1e-6)
    assert sorted(scores._log_mass) == [1]
    np.testing.assert_allclose(
        scores.log_probs([2, 0, 1, 2], [3, 4, 5, 6]), wanted[[2, 0, 1, 2], [3, 4, 5, 6]], rtol=1e-6
    )
    allowed = np.zeros((1, 50), dtype=bool)
    allowed[0, :2] = True
    scores.forbid_end([0])
    scores.restrict([2], allowed)
    without_end = rows[0].index_fill(0, torch.tensor([4]), -INF).double().log_softmax(0)
    np.testing.assert_allclose(scores.log_probs([0], [7]), without_end[7:8], rtol=1e-6)
    np.testing.assert_allclose(scores.log_probs([2], [0, 1]), rows[2, :2].double().log_softmax(0), rtol=1e-6)
    assert _log_mass(torch.zeros(2, 5, device="meta")).shape == (2,)


def test_dense_top_k_of_a_row_with_nan_does_not_crash():
    row = [0.0] * 60
    row[40] = NAN
    assert scores_of([row]).top_k([0], 3)[0].shape == (1, 3)
    assert scores_of([row * 100]).top_k([0], 3)[0].shape == (1, 3)


def test_dense_probabilities_are_float64_from_float32_logits():
    # A tiny temperature or a peaked model: no overflow, exact zeros only where the logit is -inf (case F07).
    scores = scores_of([[3e4, 0.0, -3e4]], dtype=torch.bfloat16)
    found = scores.log_probs([0, 0, 0], [0, 1, 2])
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [0.0, -29952.0, -59904.0])


def test_dense_keeps_positions_of_repeated_questions():
    scores = scores_of([[0.0, 1.0], [2.0, 3.0]])
    assert scores.logits([1, 0, 1], [0, 1, 0]).tolist() == [2.0, 1.0, 2.0]
    assert scores.dense([1, 1]).tolist() == [[2.0, 3.0]] * 2
    assert len(scores) == 2


def test_symbols_without_end_have_no_end_id():
    assert Symbols(end_ids=(), usable=np.ones(3, dtype=bool)).end_id is None
