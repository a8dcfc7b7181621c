"""The server: hands out what `vs.Server` wants to be sent, and gives it what comes back."""

import logging
import secrets
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

import veilstream as vs

PLAN = vs.Plan.load(Path(__file__).parents[1] / "plan.toml")
log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run to the horizon, and tell the sites that it is over."""
    out = Path(str(context.run_config["out"]))
    server = open_server(context, out / "server.state")
    log.info("veilstream: %s", server.guarantee)
    nodes, learners = len(list(grid.get_node_ids())), len(server.fold.seats)
    if nodes < learners:  # in the simulation engine there will never be more
        way_out = f"flwr run . --federation-config 'num-supernodes={learners}'"
        log.warning("veilstream: %d nodes for %d learners: rounds wait for the others (%s)", nodes, learners, way_out)
    places: dict[str, int] = {}  # at which node a learner sits
    began, wait_s = time.monotonic(), PLAN.federation.deadline_s
    while server.ended != set(server.fold.seats):
        server.check_possible()
        replies = list(grid.send_and_receive(due(grid, server, places), timeout=wait_s))
        for reply in replies:
            take(server, reply, places)
        if any(reply.has_error() for reply in replies):
            time.sleep(5.0)  # who failed is asked again, and not at once
        late = time.monotonic() - began > wait_s
        if server.complete or (late and server.enough):
            if late:
                log.warning("veilstream: without %s, who did not answer in time", ", ".join(server.waiting))
            server.close_round()
            began = time.monotonic()
            log.info("veilstream: %d of %d rounds", server.round, server.rounds)
            keep(server, out)
        if late and server.finished:
            break  # who is away is told by the next run
        if late and not server.seated and not server.round:
            raise RuntimeError("no site has answered; the lines before say why")
    keep(server, out)


def due(grid: Grid, server: vs.Server, places: dict[str, int]) -> list[Message]:
    """What there is to send: to nodes without a learner the question who they are, to others what is next."""
    nodes = set(grid.get_node_ids())
    for name in [name for name, node in places.items() if node not in nodes or name not in server.seated]:
        del places[name]  # it left, or has to enrol again
    requests = {node: server.request(name) for name, node in places.items()}
    requests |= {node: server.enrol(str(node)) for node in nodes - requests.keys()}
    if not any(requests.values()):
        time.sleep(1.0)
    return [
        Message(
            RecordDict({"veilstream": ConfigRecord({"request": request, "nonce": secrets.token_bytes(16)})}),
            dst_node_id=node,
            message_type="query",
        )
        for node, request in requests.items()
        if request is not None
    ]


def take(server: vs.Server, reply: Message, places: dict[str, int]) -> None:
    """Give the server a reply; no message may end the run."""
    node = reply.metadata.src_node_id
    if reply.has_error():
        log.warning("veilstream: node %d: %s", node, reply.error.reason)
        return
    try:
        told = server.accept(reply.content["veilstream"]["reply"], str(node))
    except (vs.VeilstreamError, KeyError) as error:
        log.warning("veilstream: node %d: %s", node, error)
        return
    if told.kind == "enrolled":
        places[told.learner] = node
    if told.why:
        log.warning("veilstream: learner %s refuses: %s", told.learner, told.why)


def open_server(context: Context, state: Path) -> vs.Server:
    """Go on with the run whose state is there, or begin one."""
    keys = str(context.run_config["keys"]) or None
    if state.exists():
        return vs.Server.from_bytes(PLAN, state.read_bytes(), keys)
    names = str(context.run_config["learners"])
    learners = names.split(",") if names else [str(place) for place in range(PLAN.learning.learners)]
    return vs.Server(PLAN, keys, learners=None if keys else learners)


def keep(server: vs.Server, out: Path) -> None:
    """The state to go on from, and the newest model, for `veilstream predict` and `vs.load`."""
    out.mkdir(parents=True, exist_ok=True)
    server.released.save(out / "model.npz")
    (out / "server.new").write_bytes(server.to_bytes())
    (out / "server.new").replace(out / "server.state")
