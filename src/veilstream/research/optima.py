"""The optima that regret is measured against: of each round, and of the whole stream.

The trap is the logistic loss without a ridge. With z_i = y_i a_i the rows of Z:

- some x has Z x > 0 (separable): the infimum is 0 and no x attains it;
- some x has Z x >= 0 and Z x != 0, none has Z x > 0 (quasi-separable): the rows that some such x
  separates cost nothing in the limit; the infimum is the minimum over the other rows, and no x
  attains it;
- otherwise there is a minimiser. By Stiemke's theorem this is so exactly if Z^T q = 0 for some
  q > 0.

So each verdict has a certificate, and each is checked. Separable: margins that exceed their own
rounding error. Attained: with p_i = σ(-z_i·x) and a Newton step v, q_i = p_i (1 - (1 - p_i) z_i·v)
has Z^T q = 0, so a Newton step that raises no margin by 1 proves that the minimum exists (along a
separating direction, Newton's steps never get shorter than that). A linear program decides where
neither shows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from veilstream.errors import InputError, SolverError

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Chunks: TypeAlias = Callable[[], Iterable[tuple[ArrayLike, ArrayLike]]]

_EPS = float(np.finfo(np.float64).eps)
_BATCH_NUMBERS = 4_000_000  # float64 numbers in one array of a batch; about 8 such arrays live
_ITERATIONS = 200
_FLAT = 1e-14  # a loss within this of its infimum cannot be told from one that attains it
_SLACK = 1e-13  # relative rounding error of a loss, generously
_ACTIVE, _SEPARABLE, _STATIONARY, _UNDECIDED = range(4)


@dataclass(frozen=True, kw_only=True)
class RoundOptimum:
    """The best that any model could have done, for each of P problems.

    ``separable`` means strictly separable, with a certificate; it is looked for only without a
    ridge. A problem with neither ``separable`` nor ``attained`` is quasi-separable: its value is
    the infimum, and ``gradient_norm`` belongs to the rows that still cost something there.
    """

    value: Array  # (P,) the infimum (f^r)*
    minimiser: Array  # (P, d) the minimiser of least norm; NaN where none exists
    attained: Mask  # (P,) whether a minimiser exists
    separable: Mask  # (P,) whether some x has every margin > 0; the infimum is then 0
    gradient_norm: Array  # (P,) norm of the gradient at the minimiser; 0 where separable


@dataclass(frozen=True, kw_only=True)
class OfflineOptimum:
    """The best single model for a whole stream, as `RoundOptimum`; ``attained`` is False unless proved."""

    value: float
    minimiser: Array
    attained: bool
    separable: bool
    gradient_norm: float
    samples: int


def logistic_optimum(
    features: ArrayLike, labels: ArrayLike, ridge: float = 0.0, tolerance: float = 1e-8
) -> RoundOptimum:
    """Minimise mean_i log(1 + exp(-y_i a_i·x)) + ridge/2 ‖x‖² for P problems at once.

    ``features`` (P, N, d) are the a_i, ``labels`` (P, N) the y_i in {-1, +1}.

    Guarantees:

    - ``separable`` only where a vector was found whose margins all exceed their rounding error;
    - ``attained`` only where the gradient norm is at most ``tolerance`` (or what float64 can
      resolve for features of this size, if more) and Stiemke's certificate or a linear program
      excludes separation; with a ridge, separation does not matter and is not looked for;
    - `SolverError` if neither can be reached.
    """
    a, y = np.asarray(features), np.asarray(labels)
    count, _, dim = a.shape
    value, gradient_norm = np.zeros(count), np.zeros(count)
    minimiser = np.full((count, dim), np.nan)
    attained, separable = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for part in _batches(a.shape):
        batch = _finite("features", a[part])
        signs = _labels(y[part])
        if ridge == 0.0:
            separable[part] = _separates(batch, signs, _least_norm_fit(batch, signs))
        hard = np.arange(count)[part][~separable[part]]
        if not hard.size:
            continue
        z = (batch * signs[..., None])[~separable[part]]
        f, x, g, verdict = _newton(z, None, ridge, tolerance, certify=ridge == 0.0)
        unsure = np.flatnonzero(verdict == _UNDECIDED)
        if unsure.size:
            free = np.zeros((unsure.size, z.shape[1]), np.bool_)
            for row, problem in enumerate(unsure):
                free[row], direction = _separated_rows(z[problem])
                if _separates(z[problem][None], np.ones((1, z.shape[1])), direction[None])[0]:
                    verdict[problem] = _SEPARABLE
            f[unsure], x[unsure], g[unsure], _ = _newton(
                z[unsure] * ~free[..., None], ~free, ridge, tolerance, certify=False
            )
            proved = ~free.any(axis=1) & (verdict[unsure] != _SEPARABLE)
            verdict[unsure[proved]] = _STATIONARY
        strict, reached = verdict == _SEPARABLE, verdict == _STATIONARY
        separable[hard], attained[hard] = strict, reached
        value[hard], gradient_norm[hard] = np.where(strict, 0.0, f), np.where(strict, 0.0, g)
        minimiser[hard] = np.where(reached[:, None], x, np.nan)
    return RoundOptimum(
        value=value, minimiser=minimiser, attained=attained, separable=separable, gradient_norm=gradient_norm
    )


def least_squares_optimum(features: ArrayLike, targets: ArrayLike, ridge: float = 0.0) -> RoundOptimum:
    """Minimise mean_i ½(a_i·x - y_i)² + ridge/2 ‖x‖² for P problems at once: the minimiser of least norm."""
    a, y = np.asarray(features), np.asarray(targets)
    count, samples, dim = a.shape
    value, minimiser, gradient_norm = np.zeros(count), np.zeros((count, dim)), np.zeros(count)
    for part in _batches(a.shape):
        batch, goal = _finite("features", a[part]), _finite("targets", y[part])
        x = _ridge_fit(batch, goal, samples * ridge)
        residual = (batch @ x[..., None])[..., 0] - goal
        gradient = (residual[:, None, :] @ batch)[:, 0] / samples + ridge * x
        value[part] = 0.5 * (residual**2).mean(axis=1) + 0.5 * ridge * (x**2).sum(axis=1)
        minimiser[part], gradient_norm[part] = x, np.linalg.norm(gradient, axis=1)
    return RoundOptimum(
        value=value,
        minimiser=minimiser,
        attained=np.ones(count, np.bool_),
        separable=np.zeros(count, np.bool_),
        gradient_norm=gradient_norm,
    )


def offline_logistic_optimum(chunks: Chunks, dim: int, ridge: float = 0.0, tolerance: float = 1e-8) -> OfflineOptimum:
    """The x* of static regret: `logistic_optimum` over a whole stream, one chunk in memory.

    ``chunks()`` yields (features (N, d), labels (N,)) and is called once per Newton pass: it must
    give the same samples each time. Some 10 passes; about 30 if the data is quasi-separable.
    """
    triangle, samples = np.zeros((0, dim)), 0
    for a, y in _stream(chunks):
        _labels(y)
        triangle = _triangle(triangle, a)
        samples += len(a)
    if not samples:
        raise InputError("chunks", "no samples", "at least one sample", "check the stream")
    _, basis, scale, penalty = _whiten(triangle[None], samples, ridge)
    back = (basis[0] / scale[0][:, None]).T * (penalty[0] < 1.0)  # x = back · w

    def signed() -> Iterator[Array]:
        seen = 0
        for a, y in _stream(chunks):
            seen += len(a)
            yield a * y[:, None]
        if seen != samples:
            rule = f"the same {samples} samples in every pass"
            raise InputError("chunks", f"{seen} samples", rule, "return a new iterable each call")

    def sweep(w: Array) -> tuple[float, Array, Array, bool]:
        x = back @ w
        loss, gradient = 0.5 * float(penalty[0] @ w**2), penalty[0] * w
        hessian, separating = np.diag(penalty[0]), ridge == 0.0
        for z in signed():
            k, margin = z @ back, z @ x
            p = np.exp(-np.logaddexp(0.0, margin))
            loss += float(np.logaddexp(0.0, -margin).sum()) / samples
            gradient = gradient - p @ k / samples
            hessian = hessian + (k * (p * (1.0 - p))[:, None]).T @ k / samples
            if separating:
                separating = bool(_separates(z[None], np.ones((1, len(z))), x[None])[0])
        return loss, gradient, hessian, separating

    w = np.zeros(len(scale[0]))
    loss, gradient, hessian, separating = sweep(w)
    resolvable = 32.0 * _EPS * float(np.linalg.norm(triangle)) / np.sqrt(samples)
    for _ in range(_ITERATIONS):
        if separating:
            return OfflineOptimum(
                value=0.0,
                minimiser=np.full(dim, np.nan),
                attained=False,
                separable=True,
                gradient_norm=0.0,
                samples=samples,
            )
        step = -np.linalg.solve(_regular(hessian[None])[0], gradient)
        decrement = -float(gradient @ step)
        norm = float(np.linalg.norm(gradient * scale[0]))
        if norm <= max(tolerance, resolvable) and 0.5 * decrement <= 0.1 * tolerance:
            proved = ridge > 0.0
            if not proved:
                rise = max(_largest_rise(z @ back, w, step) for z in signed())
                proved = bool(_attained(np.array([rise]), hessian[None], samples)[0])
            if proved or 0.5 * decrement <= _FLAT:
                return OfflineOptimum(
                    value=loss,
                    minimiser=back @ w if proved else np.full(dim, np.nan),
                    attained=proved,
                    separable=False,
                    gradient_norm=norm,
                    samples=samples,
                )
        for halving in range(40):
            trial = sweep(w + 0.5**halving * step)
            if trial[0] <= loss - 1e-4 * 0.5**halving * decrement + _SLACK * loss:
                break
        else:
            break
        w = w + 0.5**halving * step
        loss, gradient, hessian, separating = trial
    raise SolverError(
        f"the offline logistic optimum stopped at gradient norm {norm:.1e}, tolerance "
        f"{tolerance:.1e} (raise tolerance, add a ridge or rescale the features)"
    )


def offline_least_squares_optimum(chunks: Chunks, dim: int, ridge: float = 0.0) -> OfflineOptimum:
    """The x* of static regret: `least_squares_optimum` over a stream, in one pass by QR."""
    triangle, samples = np.zeros((0, dim + 1)), 0
    for a, y in _stream(chunks):
        triangle = _triangle(triangle, np.hstack([a, y[:, None]]))
        samples += len(a)
    if not samples:
        raise InputError("chunks", "no samples", "at least one sample", "check the stream")
    a, y = triangle[:, :dim], triangle[:, dim]
    x = _ridge_fit(a[None], y[None], samples * ridge)[0]
    residual = a @ x - y
    return OfflineOptimum(
        value=0.5 * float(residual @ residual) / samples + 0.5 * ridge * float(x @ x),
        minimiser=x,
        attained=True,
        separable=False,
        gradient_norm=float(np.linalg.norm(residual @ a / samples + ridge * x)),
        samples=samples,
    )


# The solver. Coordinates w are those in which the Hessian at x = 0 is within [1/4, 1]: with
# Z = U S V^T, x = V (w / scale), scale² = S²/N + ridge. Badly scaled features then cost no digits.


def _whiten(z: Array, samples: int, ridge: float) -> tuple[Array, Array, Array, Array]:
    """K with Z x = K w, V^T, scale, and the penalty on w²; rank-deficient directions are dead."""
    u, s, basis = np.linalg.svd(z, full_matrices=False)
    live = s > s[:, :1] * max(z.shape[1:]) * _EPS
    scale = np.where(live, np.sqrt(s * s / samples + ridge), 1.0)
    # A dead direction has no feature and penalty 1, so its w stays 0: least norm.
    penalty = np.where(live, ridge / scale**2, 1.0)
    return u * np.where(live, s / scale, 0.0)[:, None, :], basis, scale, penalty


def _newton(
    z: Array, kept: Mask | None, ridge: float, tolerance: float, *, certify: bool
) -> tuple[Array, Array, Array, NDArray[np.intp]]:
    """Damped Newton on P problems; value, x, gradient norm and verdict of each.

    Rows that are not ``kept`` must be zero and cost nothing. With ``certify`` a problem ends as
    separable or stationary by certificate, else undecided; without, it must reach the tolerance.
    """
    count, samples, dim = z.shape
    k, basis, scale, penalty = _whiten(z, samples, ridge)
    rows = np.ones((count, samples)) if kept is None else kept.astype(np.float64)
    goal = np.maximum(tolerance, 32.0 * _EPS * np.linalg.norm(z, axis=2).max(axis=1))
    value, norm = np.zeros(count), np.zeros(count)
    x, verdict = np.zeros((count, dim)), np.zeros(count, np.intp)
    left = np.arange(count)
    w, stalled = np.zeros(scale.shape), np.zeros(count, np.bool_)
    for iteration in range(_ITERATIONS + 1):
        margin = (k @ w[..., None])[..., 0]
        f = _objective(margin, w, rows, penalty)
        p = rows * np.exp(-np.logaddexp(0.0, margin))
        gradient = penalty * w - (p[:, None, :] @ k)[:, 0] / samples
        curvature = p * (1.0 - p) / samples
        hessian = (k * curvature[..., None]).transpose(0, 2, 1) @ k
        diagonal = np.arange(hessian.shape[-1])
        hessian[:, diagonal, diagonal] += penalty
        step = -np.linalg.solve(_regular(hessian), gradient[..., None])[..., 0]
        decrement = -(gradient * step).sum(axis=1)
        g = np.linalg.norm(gradient * scale, axis=1)
        small = (g <= goal) & (0.5 * decrement <= 0.1 * tolerance)
        state = np.full(len(left), _ACTIVE, np.intp)
        if certify:
            near = np.flatnonzero(small)
            if near.size:
                rise = ((1.0 - p[near]) * (k[near] @ step[near, :, None])[..., 0]).max(axis=1)
                state[near[_attained(rise, hessian[near], samples)]] = _STATIONARY
            flat = small & (0.5 * decrement <= _FLAT)
            hopeless = stalled | flat | (iteration == _ITERATIONS)
            state[(state == _ACTIVE) & hopeless] = _UNDECIDED
            likely = np.flatnonzero(margin.min(axis=1) > 0.0)
            if likely.size:
                point = _point(w[likely], scale[likely], basis[left[likely]])
                proved = _separates(z[left[likely]], np.ones((likely.size, samples)), point)
                state[likely[proved]] = _SEPARABLE
        else:
            state[small | ((g <= goal) & stalled)] = _STATIONARY
            lost = (state == _ACTIVE) & (stalled | (iteration == _ITERATIONS))
            if lost.any():
                raise SolverError(
                    f"a logistic optimum stopped at gradient norm {g[lost].max():.1e}, tolerance "
                    f"{tolerance:.1e} (raise tolerance, add a ridge or rescale the features)"
                )
        done = state != _ACTIVE
        if done.any():
            ids = left[done]
            value[ids], norm[ids], verdict[ids] = f[done], g[done], state[done]
            x[ids] = _point(w[done], scale[done], basis[ids])
            go = ~done
            left, k, w, rows, scale, penalty = (v[go] for v in (left, k, w, rows, scale, penalty))
            goal, step, decrement, f = goal[go], step[go], decrement[go], f[go]
            if not left.size:
                break
        w, stalled = _line_search(k, w, step, decrement, f, rows, penalty)
    return value, x, norm, verdict


def _line_search(
    k: Array, w: Array, step: Array, decrement: Array, f: Array, rows: Array, penalty: Array
) -> tuple[Array, Mask]:
    """Halve each problem's step until its loss falls enough (Armijo); which found no such step."""
    margin, slope = (k @ np.stack([w, step], axis=-1)).transpose(2, 0, 1)
    length, waiting = np.ones(len(w)), np.arange(len(w))
    for _ in range(40):
        s = length[waiting, None]
        trial = _objective(
            margin[waiting] + s * slope[waiting], w[waiting] + s * step[waiting], rows[waiting], penalty[waiting]
        )
        enough = f[waiting] - 1e-4 * s[:, 0] * decrement[waiting] + _SLACK * f[waiting]
        waiting = waiting[~(trial <= enough)]
        if not waiting.size:
            break
        length[waiting] *= 0.5
    stalled = np.zeros(len(w), np.bool_)
    stalled[waiting] = True
    return w + np.where(stalled, 0.0, length)[:, None] * step, stalled


def _objective(margin: Array, w: Array, rows: Array, penalty: Array) -> Array:
    loss = (rows * np.logaddexp(0.0, -margin)).sum(axis=1) / margin.shape[1]
    return np.asarray(loss + 0.5 * (penalty * w * w).sum(axis=1))


def _largest_rise(k: Array, w: Array, step: Array) -> float:
    """Of the certificate: max (1 - p_i) z_i·v."""
    return float((np.exp(-np.logaddexp(0.0, -(k @ w))) * (k @ step)).max())


def _regular(hessian: Array) -> Array:
    """A Hessian that can be solved with, however flat the loss has become."""
    size = hessian.shape[-1]
    trace = np.trace(hessian, axis1=1, axis2=2)
    return np.asarray(hessian + (_EPS * trace + 1e-300)[:, None, None] * np.eye(size))


def _point(w: Array, scale: Array, basis: Array) -> Array:
    return np.asarray(((w / scale)[:, None, :] @ basis)[:, 0])


# Certificates of separability.


def _separates(a: Array, y: Array, x: Array) -> Mask:
    """Whether each x gives all its margins y_i a_i·x > 0, beyond any doubt from rounding."""
    margin = y * (a @ x[..., None])[..., 0]
    size = np.sqrt(np.einsum("pnd,pnd->pn", a, a)) * np.linalg.norm(x, axis=1)[:, None]
    rounding = (a.shape[2] + 2) * _EPS
    proved = np.asarray((margin > rounding * size).all(axis=1))
    doubt = np.flatnonzero(~proved & (margin > 0.0).all(axis=1))
    if doubt.size:  # the exact bound, dear but blind to the scale of each feature
        size = (np.abs(a[doubt]) @ np.abs(x[doubt])[..., None])[..., 0]
        proved[doubt] = (margin[doubt] > rounding * size).all(axis=1)
    return proved


def _least_norm_fit(a: Array, y: Array) -> Array:
    """Nearly the least-norm solution of A x = y: a cheap guess at a separator."""
    transposed = a.transpose(0, 2, 1)
    wide = a.shape[1] <= a.shape[2]
    gram = a @ transposed if wide else transposed @ a
    size = gram.shape[-1]
    trace = np.trace(gram, axis1=1, axis2=2)
    # The shift makes repeated points solvable; whether the guess is good, its margins will say.
    gram[:, np.arange(size), np.arange(size)] += np.where(trace > 0, 1e-12 * trace, 1.0)[:, None]
    right = y[..., None] if wide else transposed @ y[..., None]
    solution = np.linalg.solve(gram, right)
    return np.asarray((transposed @ solution if wide else solution)[..., 0])


def _separated_rows(z: Array) -> tuple[Mask, Array]:
    """Rows i with z_i·x > 0 for some x with Z x >= 0, and one x that separates all of them.

    max Σ s over Z x >= s, 0 <= s <= 1: since x may be scaled, s_i is 1 on these rows, 0 elsewhere.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    length = np.linalg.norm(z, axis=1, keepdims=True)
    unit = z / np.where(length > 0, length, 1.0)
    k, basis, scale, penalty = _whiten(unit[None], len(z), 0.0)
    k, back = k[0], (basis[0] / scale[0][:, None]).T * (penalty[0] < 1.0)
    k = k * (length > 0)
    samples, rank = k.shape
    found = linprog(
        np.concatenate([np.zeros(rank), -np.ones(samples)]),
        A_ub=sparse.hstack([sparse.csr_array(-k), sparse.eye_array(samples)], format="csr"),
        b_ub=np.zeros(samples),
        bounds=[(None, None)] * rank + [(0.0, 1.0)] * samples,
        method="highs",
    )
    if found.x is None:
        raise SolverError(f"the separability of a round was not decided: {found.message}")
    w = np.asarray(found.x[:rank], dtype=np.float64)
    return np.asarray((found.x[rank:] > 0.5) & (k @ w > 0.25)), np.asarray(back @ w)


def _attained(rise: Array, hessian: Array, samples: int) -> Mask:
    """Whether the largest rise of a margin in a Newton step proves that a minimum exists.

    The gradient carries rounding errors of about ε; through the inverse Hessian they move margins
    by up to ε √N over its least eigenvalue, which must be small beside the 1 of the certificate.
    """
    flattest = np.linalg.eigvalsh(hessian)[:, 0]
    return np.asarray((rise < 0.5) & (flattest > 64.0 * np.sqrt(samples) * _EPS))


# Linear algebra and checks shared by the above.


def _ridge_fit(a: Array, y: Array, shift: float) -> Array:
    """The argmin of ‖A x - y‖² + shift ‖x‖² for each problem, of least norm."""
    u, s, basis = np.linalg.svd(a, full_matrices=False)
    live = s > s[:, :1] * max(a.shape[1:]) * _EPS
    gain = np.where(live, s / np.where(live, s * s + shift, 1.0), 0.0)
    return np.asarray(((gain * (y[:, None, :] @ u)[:, 0])[:, None, :] @ basis)[:, 0])


def _triangle(above: Array, chunk: Array) -> Array:
    """The R of a QR factorization with ``chunk`` below: R^T R = Σ a a^T, at no loss of digits."""
    return np.asarray(np.linalg.qr(np.vstack([above, chunk]), mode="r"), dtype=np.float64)


def _batches(shape: tuple[int, ...]) -> Iterator[slice]:
    count, samples, dim = shape
    size = max(1, _BATCH_NUMBERS // (max(samples, dim) * max(dim, min(samples, dim))))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _stream(chunks: Chunks) -> Iterator[tuple[Array, Array]]:
    for features, other in chunks():
        a, y = _finite("features", features), _finite("targets", other)
        if len(a):
            yield a, y


def _finite(field: str, values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise InputError(field, "NaN or infinite entries", "finite numbers", "clean the data")
    return array


def _labels(values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    wrong = ~((array == 1.0) | (array == -1.0))
    if wrong.any():
        example = float(array[wrong][0])
        raise InputError("labels", example, "-1 or +1", "map 0/1 labels with 2 * labels - 1")
    return array
