"""A site's script, by FLARE's Client API: answers with releases, and with nothing else.

Where its things are the site says itself: VEILSTREAM_DATA, VEILSTREAM_STORE and, where messages are signed,
VEILSTREAM_KEYS in the environment of its FLARE client. VEILSTREAM_NEW=1 begins the store, at the first start alone.
"""

import os
import sys
from pathlib import Path

import numpy as np
import nvflare.client as flare

import veilstream as vs


def open_site(name: str, plan: vs.Plan, words: list[str]) -> vs.Site:
    """The learner with its records and its ledger; a store that another plan began is refused."""
    if "VEILSTREAM_STORE" in os.environ:
        keys, new = os.environ.get("VEILSTREAM_KEYS"), os.environ.get("VEILSTREAM_NEW") == "1"
        who = {"keys": keys} if keys else {"name": name}
        return vs.Site.open(plan, os.environ["VEILSTREAM_STORE"], os.environ["VEILSTREAM_DATA"], create=new, **who)
    folder, *names = words  # FLARE's simulator: all sites on this machine, with the plan's made-up clients
    return vs.Site.open(plan, Path(folder) / name / "store.db", f"plan:{names.index(name)}", name=name, create=True)


def main() -> None:
    """Answer until the job ends."""
    flare.init()
    site: vs.Site | None = None
    while flare.is_running() and (task := flare.receive()) is not None:
        if site is None:
            site = open_site(flare.get_site_name(), vs.Plan.parse(task.params["plan"]), sys.argv[1:])
        reply = site.answer(np.asarray(task.params["request"], np.uint8).tobytes())
        flare.send(flare.FLModel(params={"reply": np.frombuffer(reply, np.uint8)}))
    if site is not None:
        site.close()


if __name__ == "__main__":
    main()
