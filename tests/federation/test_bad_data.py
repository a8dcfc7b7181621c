"""Files that are not as the plan says, one by one, at a learner's real service: each is named and
counted, with the way out; none is silent, none spends a round."""

from __future__ import annotations

import logging
import os
import re
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.federation import connect_here, csv_of, options, rows_of, table_plan_of, wait_for
from veilstream.deployment.epochs import EpochLedger
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.local_account import read_account
from veilstream.federation.learner.process import LearnerService
from veilstream.federation.protocol.messages import Reply, Request
from veilstream.plans.plan import Plan

PEOPLE = [f"person {i}" for i in range(40)]


class Beside:
    """A learner's machine, and the server that asks it."""

    def __init__(self, root, plan: Plan | None = None) -> None:
        make_keys(root / "keys", ["127.0.0.1"], ["a"])
        self.root, self.plan = root, plan or table_plan_of(learners=1)
        self.server = ServerKeys.load(root / "keys/server")
        self.public = LearnerKeys.load(root / "keys/learners/a").identity.public
        self.file, self.store = root / "records.csv", root / "a.db"
        self.dim = 6
        self.handlers: dict = {}

    def service(self, **options) -> LearnerService:
        keys, at = self.root / "keys/learners/a", ("127.0.0.1", 1)
        service = LearnerService(self.plan, keys, self.store, str(self.file), at, new_store=True, **options)
        return connect_here(service, self.handlers)

    def write(self, content: str | bytes) -> Beside:
        self.file.write_bytes(content.encode() if isinstance(content, str) else content)
        return self

    def refuses_to_start(self, match: str, **options) -> None:
        with pytest.raises(InputError, match=match):
            self.service(**options).run()
        if self.store.exists():
            status = verify(self.store)
            assert (status.round, status.steps, status.clients) == (0, 0, 0)

    def warns_before_round_0(self, caplog, match: str) -> None:
        """What records say stops no start, which the server would see: the person beside the data is told."""
        with caplog.at_level(logging.WARNING), self.running():
            assert self.clients() == 0
        assert re.search(match, caplog.text), caplog.text
        assert "stop now, before their steps are spent" in caplog.text

    @contextmanager
    def running(self, **options):
        stop = threading.Event()
        failed: list[BaseException] = []

        def run():
            try:
                self.service(**options).run(stop)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(lambda: self.handlers or failed)
            assert not failed, failed
            yield thread
        finally:
            stop.set()
            thread.join(20)
            assert not failed, failed

    def ask(self, r: int) -> Reply:
        x = np.full(self.dim, 0.1, "<f4").tobytes()
        request = Request("round", "run", "a", "n", r, None, body=x).sign(self.server.identity)
        return Reply.read(self.handlers["a"](request), self.public)

    def clients(self) -> int:
        return verify(self.store).clients


@pytest.fixture
def beside(tmp_path):
    return Beside(tmp_path)


def features(**changes) -> dict:
    """A plan's [data] whose first feature is another."""
    first = {"name": "x0", "low": -1.0, "high": 1.0} | changes
    rest = tuple({"name": f"x{i}", "low": -1.0, "high": 1.0} for i in range(1, 6))
    return {"features": (first, *rest)}


def test_labels_that_the_plan_does_not_name(beside, caplog):
    beside.write(csv_of(rows_of(PEOPLE, lambda i: i % 2)))
    beside.warns_before_round_0(
        caplog,
        r"of the next 40 records 40 cannot be used \(40 in y: the label is none of the plan's; labels of the plan "
        r"among the others: no 0, yes 0\).*`veilstream data check ",
    )


def test_half_the_labels_unknown_is_said_with_those_that_are_known(beside, caplog):
    beside.write(csv_of(rows_of(PEOPLE, lambda i: ("0", "yes")[i % 2])))
    beside.warns_before_round_0(caplog, r"20 in y: .*labels of the plan among the others: no 0, yes 20")


def test_blank_cells(beside, caplog):
    rows = rows_of(PEOPLE)
    for row in rows[::3]:
        row["x2"] = ""
    beside.write(csv_of(rows))
    beside.warns_before_round_0(caplog, "14 in x2: the cell is empty")
    with beside.running():
        assert beside.ask(0).kind == "release"
    account = read_account(beside.store)
    assert (account["refused"], beside.clients()) == ({"x2: missing": 1}, 2)  # its client has come all the same


def test_numbers_out_of_range_are_refused_where_the_plan_says(tmp_path, caplog):
    beside = Beside(tmp_path, table_plan_of(learners=1, data=features(outside="refuse")))
    rows = rows_of(PEOPLE)
    for row in rows[:10]:
        row["x0"] = 17.5
    beside.write(csv_of(rows))
    beside.warns_before_round_0(caplog, "10 in x0: the number is outside the plan's range")


def test_unknown_categories_are_refused_where_the_plan_says(tmp_path, caplog):
    words = {"kind": "categorical", "vocabulary": ("red",), "unknown": "refuse"}
    plan = table_plan_of(learners=1, data=features(low=None, high=None, **words))
    beside = Beside(tmp_path, plan)
    rows = rows_of(PEOPLE)
    for i, row in enumerate(rows):
        row["x0"] = "red" if i % 2 else "blue"
    beside.write(csv_of(rows))
    beside.warns_before_round_0(caplog, "20 in x0: the text is not in the plan's vocabulary")


def test_bytes_that_are_no_text(beside, caplog):
    lines = csv_of(rows_of(PEOPLE)).encode().splitlines(keepends=True)
    lines[1:9] = [b"\x81\xff" + line for line in lines[1:9]]
    beside.write(b"".join(lines))
    beside.warns_before_round_0(caplog, "8: the row cannot be read as a record")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("x1,x2", "x1,x1", 1), "among columns 4, 5 of 8 a name is there twice: rename one"),
        (lambda text: text.replace("x1,x2", "x1,temp", 1), "columns x2, which the plan names"),
        (lambda text: "".join(text.splitlines(keepends=True)[1:]), "columns person, y, x0"),
        (lambda text: "", "a header with the columns' names"),
    ],
    ids=["duplicate", "missing", "no header", "empty"],
)
def test_headers_that_are_none(beside, change, says):
    beside.write(change(csv_of(rows_of(PEOPLE))))
    beside.refuses_to_start(says)


def test_a_file_without_header_shows_no_cell_of_its_first_record(beside, caplog):
    rows = rows_of(["Ann Ablett", *PEOPLE])
    beside.write(csv_of(rows).partition("\n")[2])
    with caplog.at_level(logging.DEBUG), pytest.raises(InputError) as told:
        beside.service().run()
    for cell in rows[0].values():
        assert f"{cell}" not in str(told.value).replace("'records.csv'", "") + caplog.text or (len(str(cell)) < 4)
    assert "has 8 columns, and 0 of the 8 that the plan names" in str(told.value)


def test_a_quote_that_is_not_closed_names_its_line(beside):
    beside.write(csv_of(rows_of(PEOPLE)).replace("person 7", '"person 7'))
    os.utime(beside.file, (1, 1))  # nobody is writing it: it is not waited for
    beside.refuses_to_start("one that opens in line 9 is not, and takes 32 lines behind it")


def test_a_file_without_this_learners_rows(tmp_path):
    beside = Beside(tmp_path, table_plan_of(learners=1, data={"learner": "station"}))
    beside.write(csv_of([row | {"station": "A"} for row in rows_of(PEOPLE)]))
    beside.refuses_to_start("records of learner 'a' in column station.*all 40 rows are other learners'")


def test_a_task_that_cannot_be_imported(tmp_path):
    plan = table_plan_of(learners=1, learning={"task": "no_such_module_here:make_task"})
    with pytest.raises(InputError, match=r"no_such_module_here.*a module that can be imported"):
        Beside(tmp_path, plan).write(csv_of(rows_of(PEOPLE))).service().run()
    assert not (tmp_path / "a.db").exists()


def test_a_server_whose_model_has_another_dimension(beside):
    beside.write(csv_of(rows_of(PEOPLE)))
    with beside.running():
        other = Terms.of(beside.plan, 7).settings
        request = Request("enrol", "run", "a", "n", settings=other).sign(beside.server.identity)
        reply = Reply.read(beside.handlers["a"](request), beside.public)
        assert reply.kind == "refusal"
        assert "d: server 7, learner 6" in reply.facts["why"]
        beside.dim = 7
        wrong = beside.ask(0)
        assert wrong.kind == "refusal"
        assert "6" in wrong.facts["why"]
    assert beside.clients() == 0


def test_the_command_ends_with_code_2_and_no_traceback(beside):
    from tests.cli.test_plan import veilstream

    beside.write(csv_of(rows_of(PEOPLE)).replace("x1,x2", "x1,temp", 1))
    plan = beside.root / "plan.toml"
    plan.write_text(beside.plan.to_toml())
    done = veilstream(
        "learner",
        *options(plan=plan, keys=beside.root / "keys/learners/a", data=beside.file, server="127.0.0.1:1"),
        *options(store=beside.store, new_store=True),
    )
    assert done.returncode == 2
    assert "columns x2, which the plan names" in done.stderr
    assert "Traceback" not in done.stderr
    assert "person 1" not in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: csv_of([row | {"note": "any text"} for row in rows]),
        lambda rows: csv_of([dict(sorted(row.items(), reverse=True)) for row in rows]),
        lambda rows: "\ufeff" + csv_of(rows),
        lambda rows: csv_of(rows).replace("\n", "\r\n"),
        lambda rows: csv_of(rows, comma=";").replace(".", ","),
    ],
    ids=["another column", "another order", "byte-order mark", "Windows", "semicolons"],
)
def test_the_same_records_in_another_form_give_the_same_release(change, tmp_path, monkeypatch):
    from tests.support.known_secrets import NamedRounds

    monkeypatch.setattr(EpochLedger, "new_rounds", lambda self, epoch: NamedRounds(self.terms, epoch, "same"))
    bodies = []
    for name, content in (("usual", csv_of), ("other", change)):
        (tmp_path / name).mkdir()
        beside = Beside(tmp_path / name).write(content(rows_of(PEOPLE)))
        with beside.running():
            bodies.append([beside.ask(r).body for r in range(2)])
        assert beside.clients() == 4
    assert bodies[0] == bodies[1]
    assert all(bodies[0])


def test_numbers_out_of_range_are_moved_and_counted(beside, caplog):
    rows = rows_of(PEOPLE)
    for row in rows:
        row["x0"] = 17.5
    with caplog.at_level(logging.WARNING), beside.write(csv_of(rows)).running():
        assert beside.ask(0).kind == "release"
    assert "40 of the next 40 records have a cell in x0 outside the plan's range or vocabulary" in caplog.text
    assert "17.5" not in caplog.text
    assert read_account(beside.store)["clamped"] == {"x0": 2}


def test_one_class_only_is_warned_of(beside, caplog):
    with caplog.at_level(logging.WARNING):
        with beside.write(csv_of(rows_of(PEOPLE, lambda i: "yes"))).running():
            assert beside.ask(0).kind == "release"
        assert "one label" in caplog.text


def spend(beside: Beside, rounds: int) -> None:
    for r in range(rounds):
        assert beside.ask(r).kind == "release"


@pytest.mark.parametrize("how", ["shorter", "rotated", "written over"])
def test_a_file_that_is_cut_or_replaced_costs_no_round(how, beside, caplog):
    beside.write(csv_of(rows_of(PEOPLE[:4])))
    with caplog.at_level(logging.INFO), beside.running():
        spend(beside, 2)
        if how == "shorter":
            beside.write(csv_of(rows_of(PEOPLE[:2])))
        elif how == "written over":
            beside.write(csv_of(rows_of(PEOPLE[4:30])))
        else:
            new = beside.root / "new.csv"
            new.write_text(csv_of(rows_of(PEOPLE[4:30])))
            new.replace(beside.file)
        assert [beside.ask(2).kind for _ in range(3)] == ["absent"] * 3
    what = {"shorter": "has become shorter", "rotated": "is another file now"}.get(how, how)
    said = [r.getMessage() for r in caplog.records if what in r.getMessage()]
    assert len(said) == 1
    assert "give new records in a file of another name" in said[0]
    status = verify(beside.store)
    assert (status.round, status.clients) == (2, 4)
    with pytest.raises(InputError, match="another name"):
        beside.service().run()


def test_a_file_that_has_ended_costs_no_round_and_what_is_appended_is_read(beside, caplog):
    rows = rows_of(PEOPLE[:5])
    beside.write(csv_of(rows[:3]))
    with caplog.at_level(logging.INFO), beside.running():
        spend(beside, 2)  # two, then one and an empty step
        assert [beside.ask(2).kind for _ in range(3)] == ["absent"] * 3
        with beside.file.open("a") as file:
            file.write(csv_of(rows[3:]).partition("\n")[2])
        assert beside.ask(2).kind == "release"
    assert caplog.text.count("records.csv has ended") == 1
    assert (beside.clients(), read_account(beside.store)["empty_steps"]) == (5, 1)


def test_a_learner_ends_with_its_file_where_that_is_asked(beside, caplog):
    beside.write(csv_of(rows_of(PEOPLE[:4])))
    with caplog.at_level(logging.INFO), beside.running(end_with_file=True) as thread:
        spend(beside, 2)
        thread.join(20)  # also if nobody asks again
        assert not thread.is_alive()
    assert f"ends with its file {beside.file}" in caplog.text
    assert "4 records used" in caplog.text


def test_a_file_under_another_name_is_not_read_twice(tmp_path):
    plan = table_plan_of(learners=1)
    beside = Beside(tmp_path, plan).write(csv_of(rows_of(PEOPLE)))
    with beside.running():
        spend(beside, 2)
    beside.file = beside.file.rename(tmp_path / "tuesday.csv")
    with pytest.raises(InputError, match=r"its rows 1 to 4 were read as records\.csv"):
        beside.service().run()


@pytest.mark.parametrize("how", ["saved again", "a row less"])
def test_a_copy_that_was_saved_again_brings_no_further_visits(tmp_path, caplog, how):
    plan = table_plan_of(learners=1, privacy={"participations": 3, "min_separation": 1})
    rows = rows_of(PEOPLE)
    beside = Beside(tmp_path, plan).write(csv_of(rows))
    with beside.running():
        spend(beside, 2)
    beside.file = tmp_path / "tuesday.csv"
    if how == "saved again":
        other = [dict(sorted(row.items())) for row in rows]
        beside.write(csv_of(other, comma=";").replace("\n", "\r\n"))
        with pytest.raises(InputError, match=r"rows 1 to 4 were read as records\.csv"):
            beside.service().run()
        return
    beside.write(csv_of(rows[1:]))  # what a digest of the first four cannot tell is said
    with caplog.at_level(logging.WARNING), beside.running():
        pass
    assert "tuesday.csv is new, but other files were read before" in caplog.text


def test_rows_that_are_not_in_the_order_of_time_are_counted_before_round_0(tmp_path, caplog):
    plan = table_plan_of(learners=1, data={"time": "minute"})
    rows = [row | {"minute": i} for i, row in enumerate(rows_of(PEOPLE))]
    rows[3], rows[9] = rows[9], rows[3]
    beside = Beside(tmp_path, plan).write(csv_of(rows))
    for told in (True, False):  # later the file cannot be sorted any more
        caplog.clear()
        with caplog.at_level(logging.WARNING), beside.running():
            spend(beside, 1) if told else None
        assert ("2 of 40 rows come after a row with a later minute" in caplog.text) == told


def test_a_file_that_is_deleted_is_named_in_the_log(beside, caplog):
    beside.write(csv_of(rows_of(PEOPLE[:4])))
    with caplog.at_level(logging.INFO), beside.running():
        spend(beside, 2)
        beside.file.unlink()
        assert beside.ask(2).kind == "absent"
    assert "records.csv" in caplog.text
    assert "it is gone" in caplog.text


def test_people_who_may_not_return_are_nobody(beside):
    """A file of people who all took part: no round is spent on them."""
    beside.write(csv_of(rows_of(PEOPLE[:4] * 5)))
    with beside.running():
        spend(beside, 2)
        assert beside.ask(2).kind == "absent"
    account = read_account(beside.store)
    assert (account["used"], account["returning"]) == (4, 16)


def test_a_plan_that_asks_for_every_round_gets_it(tmp_path):
    plan = table_plan_of(learners=1, federation={"min_clients": 0})
    beside = Beside(tmp_path, plan).write(csv_of(rows_of(PEOPLE[:2])))
    with beside.running():
        spend(beside, 3)
    assert (beside.clients(), read_account(beside.store)["empty_steps"]) == (2, 4)
