"""Problems whose regret, optima and constants are known, for the tests of the bounds."""

import dataclasses
import functools
import math

import numpy as np
from hypothesis import strategies as st

from veilstream.research.theory import Constants

SEEDS = st.integers(0, 2**32 - 1)  # Of `some_constants`: any constants that fit together
RUNS = 20


def some_constants(seed=0, **changes):
    rng = np.random.default_rng(seed)
    L, alpha = rng.uniform(0.5, 5), rng.uniform(0.2, 1.5)
    R, tau, eta_g = int(rng.integers(2, 30)), int(rng.integers(1, 6)), rng.uniform(0.5, 4)
    values = {
        "smoothness": L,
        "regularity": rng.uniform(0, 2),
        "alpha": alpha,
        "mu": rng.uniform(0.05, 1) * L / alpha,
        "gradient_bound": rng.uniform(0.1, 3),
        "dim": int(rng.integers(1, 50)),
        "learners": int(rng.integers(1, 20)),
        "local_steps": tau,
        "rounds": R,
        "step_size": rng.uniform(0.1, 1) * alpha / (8 * L) / (eta_g * tau),
        "server_step_size": eta_g,
        "path_variation": rng.uniform(0, 5),
        "initial_distance_squared": rng.uniform(0.1, 5),
        "noise_std": rng.uniform(0.1, 3),
        "row_norms_squared": rng.uniform(0.5, 4, R * tau),
    }
    return Constants(**(values | changes))


def parts(terms):
    return np.array([terms.initial, terms.drift, terms.noise, terms.environment])


def per_round(bound, c):
    """What a bound charges, before its division by α·R, per unit of each squared distance.

    ‖z - x‖² of the local models, the noise in the released model, ‖x_r* - x*‖² of the environment.
    """
    moved = c.step_size**2 * 2 * c.local_steps**2 * c.gradient_bound**2
    local = bound.drift / moved
    if c.row_norms_squared is None:  # independent: V is in the round's sum, τ·d·V_i² in z
        spread = 2 * c.step_size**2 * c.local_steps * c.dim * c.noise_std**2
        size = c.dim * c.noise_variance / c.local_steps
    else:
        spread = c.step_size**2 * 8 * c.max_row_norm_squared * c.dim * c.noise_std**2
        size = (c.effective_step_size / c.local_steps) ** 2 * c.dim * c.noise_variance
        size *= c.round_row_norms_squared / c.rounds
    return (local, (bound.noise - local * spread) / size, c.rounds * bound.environment / c.path_variation)


def least_slack(c, h, charges, gain, *, against_best=False, fresh=False):
    """Smallest eigenvalue of (what a round is charged) - (what it gains), scaled to unit diagonal.

    On f^r(x) = h/2·(x - x_r*)², one dimension, both are quadratic in u = x - x_r*, the noise v,
    the local move z - x and w = x_r* - x*: the round's inequality holds for all of them at once
    if and only if no eigenvalue is negative. ``fresh`` noise has no mean product with the past.
    """
    te = c.effective_step_size
    u, v, z, w = np.eye(4)
    y, g = u + w, h * (u + z)
    if fresh:
        form = (np.outer(y, y) - np.outer(y - te * g, y - te * g)) / te
        form -= te * (np.outer(g, v) + np.outer(v, g) + np.outer(v, v))
    else:
        y = y + v
        form = (np.outer(y, y) - np.outer(y - te * g, y - te * g)) / te
    for charge, direction in zip(charges, (z, v, w), strict=True):
        form += charge * np.outer(direction, direction)
    form -= gain * h / 2 * (np.outer(u, u) - against_best * np.outer(w, w))
    if not (np.diag(form) > 0).all():
        return -math.inf
    scale = 1 / np.sqrt(np.diag(form))
    return np.linalg.eigvalsh(form * np.outer(scale, scale))[0]


def one_dimensional_problems(count=300):
    for seed in range(count):
        rng = np.random.default_rng([77, seed])
        c = some_constants(seed)
        h = c.smoothness * rng.choice([rng.uniform(0.05, 1), 1.0])
        alpha = rng.uniform(0.1, 1.9)
        mu = min((2 - alpha) * h, c.smoothness / alpha)  # all that h/2·u² allows
        te = rng.choice([rng.uniform(0.01, 1), 1.0]) * alpha / (8 * c.smoothness)
        step = te / (c.server_step_size * c.local_steps)
        yield rng, h, dataclasses.replace(c, alpha=alpha, mu=mu, step_size=step, regularity=0)


@functools.cache
def matrices(mechanism, horizon):
    factorization = mechanism(horizon)
    return factorization.row_norms_squared(), factorization.noising_matrix()


def simulate(seed, mechanism, tau, *, share=None, noise=None, move=None, start=None, alpha=1.0):
    """Algorithm 1 on f_i^{r,t}(x) = ½(x - θ_i^{r,t})ᵀH(x - θ_i^{r,t}) with H diagonal.

    f^r is the quadratic around the round's mean θ̄_r, so its regret, optimum, α, μ, σ = 0 and C_R
    are known. B_g is the largest gradient norm that the runs meet. Isotropic H allows every
    α in (0, 2) with μ = (2 - α)L.
    """
    rng = np.random.default_rng([seed, tau])
    n, d, R = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.choice([8, 15, 24]))
    T = R * tau
    L = rng.uniform(0.3, 3)
    H = np.full(d, L) if alpha != 1 else rng.uniform(0.2, 1, d) * L
    H[0] = L
    mu = (2 - alpha) * L if alpha != 1 else H.min()
    eta_g = rng.choice([1.0, np.sqrt(n), 3.0])
    share = rng.uniform(0.05, 1) if share is None else share
    te = share * alpha / (8 * L)
    eta = te / (eta_g * tau)
    std = rng.choice([0.0, 0.3, 3.0]) if noise is None else noise
    move = rng.choice([0.0, 0.1, 1.0]) if move is None else move
    start = rng.choice([0.0, 1.0, 10.0]) if start is None else start

    walk = move * rng.standard_normal((R, d)).cumsum(0)
    optima = walk[:, None, None] + move * rng.standard_normal((R, n, tau, d))
    round_optimum = optima.mean((1, 2))
    best = round_optimum.mean(0)
    direction = rng.standard_normal(d)
    x = np.tile(best + start * direction / np.linalg.norm(direction), (RUNS, 1))
    distance = ((x[0] - best) ** 2).sum()

    rows, noising = matrices(mechanism, T)
    xi = std * rng.standard_normal((RUNS, n, T, d))
    w = np.einsum("st,kntd->knsd", noising, xi)
    dynamic = static = largest = 0.0
    for r in range(R):
        dynamic += (H * (x - round_optimum[r]) ** 2).sum(1).mean() / 2
        static -= (H * (best - round_optimum[r]) ** 2).sum() / 2
        z = np.repeat(x[:, None], n, axis=1)
        for t in range(tau):
            g = H * (z - optima[r, :, t])
            largest = max(largest, np.linalg.norm(g, axis=-1).max())
            z = z - eta * (g + w[:, :, r * tau + t])
        x = x - te * ((x[:, None] - z) / (eta * tau)).mean(1)
    static += dynamic
    constants = Constants(
        smoothness=L,
        regularity=0.0,
        alpha=alpha,
        mu=mu,
        gradient_bound=max(largest, 1e-12),
        dim=d,
        learners=n,
        local_steps=tau,
        rounds=R,
        step_size=eta,
        server_step_size=eta_g,
        path_variation=((round_optimum - best) ** 2).sum(),
        initial_distance_squared=distance,
        noise_std=std,
        row_norms_squared=rows,
    )
    return dynamic / R, static / R, constants
