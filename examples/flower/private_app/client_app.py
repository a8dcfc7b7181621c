"""A site: answers the server's requests with releases, and with nothing else.

A deployed SuperNode says where its things are, and it alone:

    flower-supernode --node-config 'name="north" data="/srv/north/records.csv" store="/srv/north/store.db"' ...

with `keys="/srv/north/keys"` where messages are signed, and `new-store=true` at the first start.
"""

import logging
import secrets
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import veilstream as vs

log = logging.getLogger("flwr")
PLAN = vs.Plan.load(Path(__file__).parents[1] / "plan.toml")


def only_releases(message: Message, context: Context, call_next) -> Message:
    """Let nothing else leave: a loss, an accuracy or a count of examples would tell of people without any noise."""
    reply = call_next(message, context)
    if reply.has_content() and set(reply.content) != {"veilstream"}:
        raise ValueError(
            f"{sorted(reply.content)} may not leave: [telemetry] in plan.toml tells how well it goes, privately"
        )
    return reply


app = ClientApp(mods=[only_releases])


@app.query()
def answer(message: Message, context: Context) -> Message:
    """The reply to one request; the ledger is opened for it and closed."""
    try:
        with open_site(context) as site:
            reply = site.answer(message.content["veilstream"]["request"])
    except Exception as error:  # Flower would send its text, which might quote a record
        log.error("veilstream: %s", error)
        raise RuntimeError("the site could not answer; its own log says why") from None
    # The random bytes: Flower keeps equal records once, and forgets them with the first.
    record = ConfigRecord({"reply": reply, "nonce": secrets.token_bytes(16)})
    return Message(RecordDict({"veilstream": record}), reply_to=message)


def open_site(context: Context) -> vs.Site:
    """The learner with its records and its ledger."""
    here, run = context.node_config, context.run_config
    if "store" in here:
        keys = str(here["keys"]) if "keys" in here else None
        name = None if keys else str(here["name"])
        new = bool(here.get("new-store", False))
        return vs.Site.open(PLAN, str(here["store"]), str(here["data"]), keys=keys, name=name, create=new)
    place = int(here["partition-id"])  # Flower's simulation engine: all sites on this machine or cluster
    name = str(run["learners"]).split(",")[place] if run["learners"] else str(place)
    data = f"{run['records']}/{name}.csv" if run["records"] else f"plan:{place}"
    return vs.Site.open(PLAN, Path(str(run["sites"])) / name / "store.db", data, name=name, create=True)
