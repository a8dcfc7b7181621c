"""`veilstream new`: a folder with a plan, sample records and the next commands."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

from veilstream.errors import InputError
from veilstream.files import write_file

_STATIONS = ("north", "south", "west")
_ROWS = 9000

_PLAN = """\
# A plan: all that a run needs, the same file on every machine.
#   veilstream plan plan.toml      what it promises, and which noise suits it
#   veilstream data check records/north.csv --plan plan.toml
#   veilstream run plan.toml       simulate it on the records below
name = "{name}"

[learning]
rounds = 150           # how many models are released; with local_steps, how long the promise runs
local_steps = 10       # clients that a learner meets between two releases
learners = 3           # how many are averaged: one for each file below
task = "logistic"      # or softmax, least_squares, huber, poisson, "my_model:make_task"
clip_norm = 0.5        # no client moves the model by more than this in a step

[data]
kind = "table"
source = "records/*.csv"    # one file for each learner; or one file and learner = "station"
client = "person"           # who: the same text whenever the same person comes; "#row" if nobody
                            # ever returns
time = "minute"             # orders records; leave it out for the order of the file
label = "answered"          # what is predicted
labels = ["no", "yes"]      # its texts, the second is +1; label_range = [low, high] for a number

# Columns that predict. Constants are public: what anybody knows, never what records show.
[[data.features]]
name = "hour"
kind = "numeric"
low = 0.0
high = 24.0

[[data.features]]
name = "temperature"
kind = "numeric"
center = 10.0               # center and scale instead of low and high: three scales either way
scale = 10.0
missing = "flag"            # an empty cell is a feature of its own; "zero", or "refuse" the record

[[data.features]]
name = "channel"
kind = "categorical"
vocabulary = ["phone", "mail", "door"]
unknown = "other"           # a place for all other words; "zero", or "refuse" the record

[[data.features]]
name = "campaign"
kind = "hashed"             # any word, hashed to one of so many places
width = 16

[privacy]
epsilon = 4.0               # lower is more private
delta = 1e-5                # well below one in the number of people
participations = 1          # how often one person may take part

# What the server learns of how well it goes, under the same promise; leave it out for nothing.
[telemetry]
# Was the model right, before it learned from a person: the newest one, which learners start from,
# and not the average of models that is published. It costs 1.1% more noise.
metrics = ["accuracy"]
scale = 0.3                 # wider is seen better and needs more noise

[run]
seeds = 3                   # repetitions of the simulation

[[methods]]
name = "private"
mechanism = "buffered"      # noise that is correlated in time; `veilstream plan` compares all kinds
step_size = 0.3
averaging = 2.0             # publish an average of the models so far

[[methods]]
name = "noise-free"         # for comparison: protects no one, and is left out of a deployment
kind = "noise-free"
step_size = 0.3
"""

_README = """\
# {name}

A project for veilstream: one model, trained from records
that stay where they are. The records here are made up: `answered` depends on `hour`, `temperature`
and `channel`.

    {command} data check records/north.csv --plan plan.toml     # what would be used, what refused
    {command} run plan.toml --out run                           # simulate it
    {command} plan plan.toml                                    # what it promises, at which price
    {command} federation demo --plan plan.toml --out federation # the real thing, on this machine
    {command} model show federation/model.npz                   # the model that came out
    {command} predict federation/model.npz records/north.csv --out predicted.csv  # what it says

Your own file: `{command} data check FILE --label COLUMN --client COLUMN --plan mine.toml` proposes a plan for it.

To deploy it between machines: `{command} keys make`, then `{command} server` on one and
`{command} learner` beside each file. `{command} learner --help` says how.
"""


def new_project(folder: Path, command: str = "veilstream") -> list[Path]:
    """Write a project into a new or empty folder; its README calls the ``command`` by this name."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("DIR", str(folder), "a new or empty folder", "name another")
    name = folder.resolve().name
    files = {
        folder / "plan.toml": _plan(name, command),
        folder / "README.md": _README.format(name=name, command=command),
        **{folder / "records" / f"{s}.csv": _records(i, s) for i, s in enumerate(_STATIONS)},
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    return list(files)


_APP = ("pyproject.toml", "private_app/__init__.py", "private_app/client_app.py", "private_app/server_app.py")


def new_flower_app(folder: Path, command: str = "veilstream") -> list[Path]:
    """`new_project`, and beside its plan the Flower app that runs it: `flwr run .` there."""
    files = new_project(folder, command)
    here = folder.resolve()
    # Flower may find an app of the same name in the folder where it was started: each project has its own.
    own = re.sub(r"\W", "_", here.name) + "_app"
    for name in _APP:
        text = (_template("flower") / name).read_text("utf-8").replace("private_app", own)
        if name == "pyproject.toml":
            for key in ("out", "sites", "records"):
                setting = f"{key} = {json.dumps(str(here / key))}   "
                text = re.sub(rf'^{key} = "[^"]*" *', setting.replace("\\", r"\\"), text, flags=re.MULTILINE)
        files.append(folder / name.replace("private_app", own))
        write_file(files[-1], text)
    readme, about = folder / "README.md", (_template("flower") / "README.md").read_text("utf-8")
    about = about.replace("# A Flower app", "## A Flower app").replace("private_app", own)
    write_file(readme, readme.read_text("utf-8") + "\n" + about)
    return files


def _template(name: str) -> Path:
    """The folder of an example, in an installed package or in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "_examples" / name
    return installed if installed.is_dir() else package.parent.parent / "examples" / name


def _plan(name: str, command: str) -> str:
    text = _PLAN.format(name=name.replace('"', ""))
    return text.replace("#   veilstream ", f"#   {command} ")


def without_sample_data(plan: str) -> str:
    """A plan's text without the [data] of a new project, if that is as it was written."""
    sample = _PLAN[_PLAN.index("[data]") : _PLAN.index("[privacy]")]
    return plan.replace(sample, "")


def _records(index: int, station: str) -> str:
    dice = random.Random(index)  # the same for everyone, and nobody's data
    lines = ["person,minute,hour,temperature,channel,campaign,answered"]
    for row in range(_ROWS // len(_STATIONS)):
        hour, degrees = dice.uniform(7, 22), dice.gauss(8 + 4 * index, 7)
        channel = dice.choices(["phone", "mail", "door", "radio"], [5, 4, 2, 0.1])[0]
        campaign = f"c{dice.randrange(12)}"
        liking = 0.35 * (hour - 14) - 0.09 * (degrees - 10) + (1.6 if channel == "phone" else -0.8)
        answered = dice.random() < 1 / (1 + math.exp(-liking))
        shown = "" if dice.random() < 0.02 else f"{degrees:.1f}"
        lines.append(f"{station}-{row:04d},{row},{hour:.2f},{shown},{channel},{campaign},{'yes' if answered else 'no'}")
    return "\n".join(lines) + "\n"
