"""How many files a process may have open, and how many of them strangers may take.

A connection is an open file, from the first packet of whoever it is. A server that has none left
cannot write its checkpoint.
"""

from __future__ import annotations

import contextlib
import resource

_SPARE, _OWN = 4096, 64


def connections_allowed(peers: int) -> int:
    """How many connections to take on one port, for so many peers.

    The process's limit is raised as far as it may be. A third of it is for one port, or more where
    there are so many peers; the rest stays for files and for another port.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * peers + _SPARE
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, max(soft // 3, min(peers + _OWN, soft - _OWN))))
