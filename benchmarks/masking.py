"""What masks cost: a round of which only the sum is seen beside the plain round, in one process without a network.

    python benchmarks/masking.py --learners 3 10 100 --dim 61482

Both sides do all that they do with bytes: masks, shares, signatures, hashes, and on the plain side the prefix and its
hash. Gradients, noise and disks are left out on both sides.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from veilstream.deployment.release import decode, encode
from veilstream.federation.masking.learner_side import MaskingLearner
from veilstream.federation.masking.requests import MaskRequest
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.server_side import MaskingServer
from veilstream.federation.masking.statements import KeyList


def masked(learners: int, dim: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of one learner's and of the server's work in a round, and bytes both ways of one learner."""
    rules = Rules(learners, (learners + 1) // 2, 0)
    names = [f"l{k:05d}" for k in range(learners)]
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    identities = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    group = [
        MaskingLearner(MaskingLearner.fresh(name, 0, "run", os.urandom), rules, keys[name].sign, os.urandom)
        for name in names
    ]
    listed = KeyList("run", tuple(one.offer() for one in group))
    for one in group:
        one.keep(one.take_keys(listed.pack(), identities))
    server = MaskingServer(rules, listed, identities, dim)
    increment = np.random.default_rng(0).integers(-(2**30), 2**30, dim)
    model = bytes(4 * dim)
    of_learner, of_server, sent = [], [], 0
    for r in range(rounds):
        mine = theirs = 0.0
        opened = () if not r else (server.certificates[r - 1],)
        body = MaskRequest(server.at, opened, None, model).pack()
        for k, one in enumerate(group):
            began = time.perf_counter()
            told = MaskRequest.unpack(body)
            for certificate in told.opened:
                one.keep(one.take_opened(certificate)[0])
            state, message = one.mask(told.at, increment)
            one.keep(state)
            mine += time.perf_counter() - began
            began = time.perf_counter()
            server.take_masked(k, message)
            theirs += time.perf_counter() - began
        what = server.name()
        for k, one in enumerate(group):
            began = time.perf_counter()
            state, signed = one.sign_set(what)
            one.keep(state)
            mine += time.perf_counter() - began
            began = time.perf_counter()
            server.take_signed(k, signed)
            theirs += time.perf_counter() - began
        for k, one in enumerate(group):
            asked = server.share_request(k)
            began = time.perf_counter()
            state, shared = one.share(asked.what, asked.signatures, asked.sealed)
            one.keep(state)
            mine += time.perf_counter() - began
            began = time.perf_counter()
            server.take_shares(k, shared)
            theirs += time.perf_counter() - began
        sent = len(body) + len(message) + len(what.pack()) + len(signed) + len(asked.pack()) + len(shared)
        began = time.perf_counter()
        result = server.open()
        theirs += time.perf_counter() - began
        assert np.array_equal(result.total, learners * increment)
        of_learner.append(mine / learners)
        of_server.append(theirs)
    return statistics.median(of_learner), statistics.median(of_server), sent


def plain(learners: int, dim: int, rounds: int) -> tuple[float, float, float]:
    """The same of the plain round."""
    prefix = np.random.default_rng(0).integers(-(2**30), 2**30, dim)
    of_learner, of_server, sent = [], [], 0
    model = bytes(4 * dim)
    for r in range(rounds):
        mine = theirs = 0.0
        total = np.zeros(dim, np.int64)
        for _ in range(learners):
            began = time.perf_counter()
            hashlib.sha256(model).digest()
            payload = encode(0, r, r + 1, 2.0**-20, prefix)  # type: ignore[arg-type]
            hashlib.sha256(payload).digest()
            mine += time.perf_counter() - began
            began = time.perf_counter()
            total += decode(payload).prefix - prefix
            theirs += time.perf_counter() - began
        sent = len(model) + len(payload)
        of_learner.append(mine / learners)
        of_server.append(theirs)
    return statistics.median(of_learner), statistics.median(of_server), sent


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[3, 10, 100])
    parser.add_argument("--dim", type=int, default=61_482)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"d = {given.dim}; milliseconds of work and bytes both ways, a round")
    print("learners   plain learner  masked learner   plain server  masked server   bytes of plain    more a neighbour")
    for n in given.learners:
        one, two = plain(n, given.dim, given.rounds), masked(n, given.dim, given.rounds)
        print(
            f"{n:8d} {1e3 * one[0]:15.2f} {1e3 * two[0]:15.2f} {1e3 * one[1]:14.2f} {1e3 * two[1]:14.2f} "
            f"{two[2] / one[2]:15.3f}x {(two[2] - one[2]) / max(1, n - 1):19.0f}"
        )


if __name__ == "__main__":
    main()
