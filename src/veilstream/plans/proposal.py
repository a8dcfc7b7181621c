"""A plan proposed for files of records: names and kinds of columns, and no cell's value.

A plan is shared, so ranges and texts come from what anybody knows: where they go stands `FILL_IN`, which every command
refuses with its line until a person has written there. Counts of rows and people are no secret: the promise is about
what records say (replace-one neighbours), and a plan's rounds tell them anyway.
"""

from __future__ import annotations

import json
import math

from veilstream.plans.column_profile import Column, Profile
from veilstream.plans.column_roles import FEW
from veilstream.plans.schema import FILL_IN
from veilstream.records.schema import EACH_ROW

_WIDTH = 32
_ROUNDS = 100
_LOCAL_STEPS = 10
_TAKEN = 0.7  # of the people: a fifth is held out, and learners differ in size
_MOST_TOGETHER = 256


def label_is_class(column: Column) -> bool:
    """Whether a label has classes: few different texts or whole numbers, or any text."""
    return column.classes <= FEW and (not column.is_number or column.whole_numbers == column.numbers)


def data_table(found: Profile, source: str) -> str:
    """A [data] table in TOML, with `FILL_IN` in the place of what a person must say."""
    roles, mark = found.roles, json.dumps(FILL_IN)
    lines = [
        f"# Roles of columns are guesses: check each. In the place of every {mark} write what anybody knows,",
        "# never what the records show: this file is shared with everyone who takes part.",
        "[data]",
        'kind = "table"',
        f"source = {_quoted(source)}",
    ]
    if roles.learner is not None:
        lines.append(f"learner = {_quoted(roles.learner)}  # leave it out where each has a file")
    if roles.client == EACH_ROW:
        lines.append(f"client = {_quoted(EACH_ROW)}  # nobody ever returns; else the column of who")
    else:
        lines.append(f"client = {_quoted(roles.client)}")
        lines.append(
            'returning = "first"  # of people who return, a simulation uses the visits that the promise allows'
        )
    if roles.time is not None and found.columns[roles.time].sorts_as_time:
        lines.append(f"time = {_quoted(roles.time)}")
    elif roles.time is not None:
        lines.append(f"# {_quoted(roles.time)} does not sort as time: rows are taken in the order of the file")
    if roles.label is not None:
        label = found.columns[roles.label]
        lines.append(f"label = {_quoted(roles.label)}")
        if label_is_class(label):
            lines.append(f'labels = {mark}  # its texts, such as ["no", "yes"]; of two the second is +1')
        else:
            lines.append(f"label_range = {mark}  # what anybody knows of it: [0.0, 100.0]")
    lines += [f"# {_quoted(name)} is different in nearly every row: no feature" for name in roles.left_out]
    for name, each in found.columns.items():
        if name in roles.by_column() or name == roles.time:
            continue
        lines += ["", "[[data.features]]", f"name = {_quoted(name)}"]
        if each.kind == "numeric":
            lines += [
                'kind = "numeric"',
                f"low = {mark}  # the range that anybody knows, such as 0.0",
                f"high = {mark}  # and 100.0",
            ]
        else:
            lines += ['kind = "hashed"', f"width = {_WIDTH}  # or categorical, with a vocabulary that anybody knows"]
        if each.missing:
            lines.append('missing = "flag"  # some cells are empty: a feature of its own; "refuse" gives up the record')
    return "\n".join(lines) + "\n"


def whole_plan(found: Profile, source: str, name: str) -> str:
    """A plan around `data_table`: rounds that the records last for, and a budget to choose."""
    learners = found.learners
    each = max(int(_TAKEN * min(found.people, found.fewest * learners) / learners), 1)
    rounds = min(_ROUNDS, each)
    per_round = each // rounds
    steps = min(_LOCAL_STEPS, per_round)
    together = min(per_round // steps, _MOST_TOGETHER)
    delta = 10.0 ** math.floor(math.log10(0.01 / max(rounds * steps * together, 1)))
    return "\n".join(
        [
            "# A plan: all that a run needs, the same file on every machine.",
            f"name = {_quoted(name)}",
            "",
            "[learning]",
            f"rounds = {rounds}           # how many models are released",
            f"local_steps = {steps}       # steps of a learner between two releases",
            f"clients_per_step = {together}   # clients that a step averages",
            f"learners = {learners}",
            f'task = "{_task(found)}"',
            "clip_norm = 0.5        # no client moves the model by more than this in a step",
            "",
            data_table(found, source),
            "[privacy]",
            "epsilon = 4.0          # lower is more private; docs/privacy.md says how to choose",
            f"delta = {delta:.0e}",
            "participations = 1     # how often one person may take part",
            "",
            "[run]",
            "seeds = 3              # repetitions of the simulation",
            "",
            "[[methods]]",
            'name = "private"',
            'kind = "auto"          # step sizes from public facts of the plan: none is tuned on records',
            "",
            "[[methods]]",
            'name = "noise-free"    # for comparison: protects no one, and is left out of a deployment',
            'kind = "noise-free"',
            "step_size = 0.5",
            "averaging = 3.0",
            "",
        ]
    )


def _task(found: Profile) -> str:
    if found.roles.label is None:
        return "logistic"
    label = found.columns[found.roles.label]
    if not label_is_class(label):
        return "huber"
    return "logistic" if label.classes <= 2 else "softmax"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
