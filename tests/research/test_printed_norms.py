"""eq-bc-logR and eq-exmp-iii against dense matrices: where they hold and where they fail."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_triangular
from scipy.linalg import toeplitz as toeplitz_matrix
from scipy.special import gammaln

from veilstream.errors import InputError
from veilstream.mechanisms import MECHANISMS, toeplitz_normalised, tree
from veilstream.research import theory

LONGEST = 2**14
_j = np.arange(LONGEST)
# h(j) = C(2j, j)/4^j, not by the recurrence of the paper.
H = np.exp(gammaln(2 * _j + 1) - 2 * gammaln(_j + 1) - _j * math.log(4))
KAPPA = (H**2).cumsum()


def dense_tree(T, *, padded):
    """B and C of the binary tree over T steps, built node by node from eq-bc's description."""
    leaves = 1 << math.ceil(math.log2(T)) if T > 1 else 1
    nodes = [
        (begin, begin + size)
        for size in (1 << k for k in range(leaves.bit_length()))
        for begin in range(0, leaves, size)
        if padded or begin + size <= T
    ]
    C = np.array([[float(a <= step < b) for step in range(T)] for a, b in nodes])
    B = np.zeros((T, len(nodes)))
    for m in range(1, T + 1):  # the fewest nodes that make up [0, m)
        begin = 0
        while begin < m:
            size = max(b - a for a, b in nodes if a == begin and b <= m)
            B[m - 1, nodes.index((begin, begin + size))] = 1.0
            begin += size
    np.testing.assert_array_equal(B @ C, np.tril(np.ones((T, T))))
    return (C**2).sum(0).max(), (B**2).sum(1).max()


@settings(max_examples=40)
@given(T=st.integers(1, 130), padded=st.booleans())
@example(T=63, padded=False)
@example(T=64, padded=True)
@example(T=65, padded=True)
@example(T=127, padded=False)
def test_tree_norms_are_those_of_the_dense_tree(T, padded):
    assert theory.tree_norms(T, padded=padded) == dense_tree(T, padded=padded)
    if not padded:
        assert theory.largest_norms(tree(T)) == pytest.approx(dense_tree(T, padded=False))


def test_the_printed_tree_bounds_fail_exactly_where_the_page_says():
    powers = {2**k for k in range(15)}
    for T in range(2, LONGEST + 1):
        printed, true = theory.tree_norms_as_printed(T), theory.tree_norms(T)
        assert true.column <= printed.column
        assert (true.row > printed.row) == (T + 1 in powers)
        assert (theory.tree_norms(T, padded=True).column > printed.column) == (T not in powers)
        # What decides at equal privacy is the product, and that is never above the printed one.
        assert true.column * true.row <= printed.column * printed.row * (1 + 1e-12)


@pytest.mark.parametrize(("T", "nodes", "fails"), [(3, (3, 2), True), (6, (4, 2), False)])
def test_padding_can_take_the_product_above_the_printed_one(T, nodes, fails):
    # By hand: 3·2 > 2.585·1.585 = 4.10, and 4·2 < 3.585·2.585 = 9.27.
    padded, printed = theory.tree_norms(T, padded=True), theory.tree_norms_as_printed(T)
    assert padded == nodes
    assert (padded.column * padded.row > printed.column * printed.row) == fails


@pytest.mark.parametrize("name", MECHANISMS)
def test_largest_norms_are_those_of_the_dense_matrices(name):
    for T in (2, 3, 7, 8, 32):
        f = MECHANISMS[name](T)
        C, B = f.strategy_matrix(), f.decoder_matrix()
        np.testing.assert_allclose(B @ C, np.tril(np.ones((T, T))), atol=1e-5)
        dense = (C**2).sum(0).max(), (B**2).sum(1).max()
        assert theory.largest_norms(f) == pytest.approx(dense, rel=1e-5)


def test_rows_of_unit_columns_pass_the_printed_logarithm_at_two_steps_by_hand():
    # CᵀC = [[1, ρ], [ρ, 1]]: the error (3 - 2ρ)/(1 - ρ²) is least at ρ = (3 - √5)/2, where the last
    # row has 2/(1 + ρ). log2(2) = 1.
    rho = (3 - math.sqrt(5)) / 2
    norms = theory.largest_norms(MECHANISMS["optimal"](2))
    assert norms == pytest.approx((1.0, 2 / (1 + rho)), rel=1e-4)
    assert norms.row > theory.tree_norms_as_printed(2).row


@pytest.mark.parametrize(("T", "fails"), [(3, True), (4, False), (2439, False), (2440, True)])
def test_normalised_toeplitz_passes_the_logarithm_at_2440_steps(T, fails):
    # B = A·D·C⁻¹ with D the column norms of C: dense, in float64.
    C = toeplitz_matrix(H[:T], np.zeros(T))
    norms = np.sqrt(KAPPA[T - 1 :: -1])
    B = solve_triangular(C.T, (np.tril(np.ones((T, T))) * norms).T, lower=False).T
    largest = (B**2).sum(1).max()
    assert (largest > math.log2(T)) == fails
    ours = theory.largest_norms(toeplitz_normalised(T))
    assert ours == pytest.approx((1.0, largest), rel=1e-5)


def test_toeplitz_norms_hold_at_every_horizon_and_the_printed_ones_at_none():
    for T, true in enumerate(KAPPA, start=1):
        bound = theory.toeplitz_norms(T)
        assert true < bound.column == bound.row
        assert bound.column - true <= 0.0796 / T  # 1/(4πT)
        printed = theory.toeplitz_norms_as_printed(T)
        assert printed.column == printed.row < true
    assert theory.toeplitz_norms_as_printed(4000).column == pytest.approx(3.5690, abs=5e-5)
    assert KAPPA[3999] == pytest.approx(3.7063, abs=5e-5)


def test_horizons_that_are_none_are_refused():
    printed = (theory.tree_norms, theory.tree_norms_as_printed, theory.toeplitz_norms, theory.toeplitz_norms_as_printed)
    for function, horizon in itertools.product(printed, (0, -1, 2.0, True)):
        with pytest.raises(InputError, match="horizon"):
            function(horizon)
