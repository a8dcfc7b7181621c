"""The same audit on two peers' noise: what they claim, and what their messages give.

    python benchmarks/audit_peers.py flower        [--rounds 20] [--dim 20000] [--json]
    python benchmarks/audit_peers.py jax-privacy   [--past 4]    [--dim 20000] [--json]

`flower`: `LocalDpMod` as shipped, called as a client app calls it, in each of R rounds in which the
same client's data take part. It is told (epsilon, delta) once and draws noise for one message.

`jax-privacy`: `matrix_factorization_privatizer` with a dense noising matrix of T rows, calibrated
for T steps, and asked for more.

Both are run by the audit's one-run statistic (`veilstream.audit.statistics.one_run`), which knows
the clipped updates, subtracts them, and asks how far one client moves what is left. Needs the
extras `flower` and `references`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from typing import Any

import numpy as np

import veilstream as vs
from veilstream.audit.statistics import CONFIDENCE, Law, OneRun, one_run
from veilstream.audit.statistics.many_run import epsilon_of
from veilstream.privacy.gaussian import mu_for

EPSILON, DELTA = 2.0, 1e-3


def flower_messages(rounds: int, dim: int, clip: float, sensitivity: float) -> np.ndarray:
    """(R, d): what the mod adds to clipped updates, read from the messages that it returns."""
    from flwr.app.message import Message
    from flwr.app.message_type import MessageType
    from flwr.clientapp.mod import LocalDpMod
    from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common import recorddict_compat as compat
    from flwr.supercore.task_identity import TaskIdentity

    # Who we are, as Flower's own process would say.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    mod = LocalDpMod(clip, sensitivity, EPSILON, DELTA)
    model = np.zeros(dim)
    update = np.zeros(dim)
    update[0] = 5.0 * clip  # far too long: clipping is part of what is looked at

    def client_app(message: Any, _: Any) -> Any:
        new = ndarrays_to_parameters([model + update])
        result = FitRes(Status(Code.OK, ""), new, 1, {})
        return Message(compat.fitres_to_recorddict(result, keep_input=True), reply_to=message)

    sent = []
    for _ in range(rounds):
        asked = compat.fitins_to_recorddict(FitIns(ndarrays_to_parameters([model]), {}), True)
        message = Message(asked, dst_node_id=1, message_type=MessageType.TRAIN)
        reply = mod(message, None, client_app)
        result = compat.recorddict_to_fitres(reply.content, keep_input=True)
        sent.append(parameters_to_ndarrays(result.parameters)[0] - model)
    known = update * min(1.0, clip / np.linalg.norm(update))
    return np.array(sent) - known


def flower(rounds: int, dim: int) -> list[dict[str, Any]]:
    clip, rows = 1.0, []
    for told, sensitivity in (("clip norm", clip), ("2 x clip norm", 2.0 * clip)):
        for r in (1, rounds):
            residuals = flower_messages(r, dim, clip, sensitivity)
            law = Law(np.ones((r, 1)), 2.0 * clip, mu_for(EPSILON, DELTA))
            rows.append({"what": f"LocalDpMod, sensitivity = {told}", "messages": r} | account(one_run(residuals, law)))
    return rows


def jax_privacy(past: int, dim: int) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from jax_privacy import noise_addition

    T, rows = 32, []
    factorization = vs.mechanisms.toeplitz(T)
    std, _ = vs.calibrate(vs.Budget(EPSILON, DELTA), factorization, clip_norm=1.0)
    privatizer = noise_addition.matrix_factorization_privatizer(
        jnp.asarray(factorization.noising_matrix(), jnp.float32), stddev=std, prng_key=jax.random.key(7)
    )
    update = jax.jit(privatizer.update)
    state = privatizer.init(jnp.zeros(dim))
    increments = []
    for _ in range(T + past):
        noisy, state = update(jnp.zeros(dim), state)
        increments.append(np.asarray(noisy, np.float64))
    prefixes = np.cumsum(increments, axis=0)
    for steps in (T, T + past):
        law = Law(np.tril(np.ones((steps, steps))), 2.0, mu_for(EPSILON, DELTA) * (1 + 1e-6))
        found = one_run(prefixes[:steps], law)
        what = f"dense noise of {T} rows, " + ("as planned" if steps == T else f"{past} steps more")
        rows.append({"what": what, "messages": steps} | account(found))
    return rows


def account(found: OneRun) -> dict[str, Any]:
    def plain(value: float) -> float | str:
        return round(value, 4) if math.isfinite(value) else "infinite"

    return {
        "claimed_epsilon": EPSILON,
        "claimed_mu": plain(found.claim),
        "mu_at_least": plain(found.mu_lower),
        "epsilon_at_least": plain(epsilon_of(found.mu_lower, DELTA)),
        "violation": found.violation,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=["flower", "jax-privacy"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--past", type=int, default=4)
    parser.add_argument("--dim", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.peer == "flower":
        rows = flower(options.rounds, options.dim)
    else:
        rows = jax_privacy(options.past, options.dim)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"claimed: epsilon = {EPSILON:g} at delta = {DELTA:g}; bounds at {CONFIDENCE:.0%}")
    print("| what | messages | claimed mu | mu at least | epsilon at least | verdict |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        verdict = "VIOLATION" if row["violation"] else "kept"
        print(
            f"| {row['what']} | {row['messages']} | {row['claimed_mu']} | {row['mu_at_least']} | "
            f"{row['epsilon_at_least']} | {verdict} |"
        )


if __name__ == "__main__":
    main()
