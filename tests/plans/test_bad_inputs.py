"""The bad-input table: what a newcomer gets wrong, and that each message has file, line, field, rule and way out."""

from __future__ import annotations

import re

import pytest

from veilstream.errors import InputError
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.plans.column_profile import profile
from veilstream.plans.data_check import check_data
from veilstream.plans.new_project import new_project
from veilstream.plans.plan import Plan
from veilstream.plans.schema import PlanError
from veilstream.streams.tables import open_table

# What was done, what is replaced in a new project's plan, by what; the field that is blamed, and a word of the way out.
MISTAKES = [
    ("a quote is missing", 'label = "answered"', 'label = "answered', "plan", "a quote is missing"),
    ("a quote is missing in front", 'label = "answered"', 'label = answered"', "plan", "a quote is missing"),
    ("quotes of a word processor", 'label = "answered"', "label = “answered”", "plan", "straight quotes"),
    ("no quotes", 'label = "answered"', "label = answered", "plan", "in quotes"),
    ("a decimal comma", "epsilon = 4.0", "epsilon = 4,0", "plan", "numbers have a point"),
    ("a colon for =", "rounds = 150", "rounds: 150", "plan", "either side of ="),
    ("a key without a value", "rounds = 150", "rounds =", "plan", "a value is missing"),
    ("a bracket is missing", '["no", "yes"]', '["no", "yes"', "plan", "bracket"),
    ("a table's bracket is missing", "[privacy]", "[privacy", "plan", "bracket"),
    ("a table twice", "[privacy]", "[learning]", "plan", "keep one"),
    ("a key twice", "rounds = 150", "rounds = 150\nrounds = 20", "plan", "keep one"),
    ("True for true", "clip_norm = 0.5", "clip_norm = True", "plan", "small letters"),
    ("a path of Windows", '"records/*.csv"', '"C:\\data\\*.csv"', "plan", "write / or"),
    ("a misspelt key", "rounds = 150", "ronds = 150", "learning.ronds", "did you mean 'rounds'"),
    ("a misspelt table", "[learning]", "[lerning]", "lerning", "did you mean 'learning'"),
    ("a text for a number", "epsilon = 4.0", 'epsilon = "4.0"', "privacy.epsilon", "try 1"),
    ("a negative budget", "epsilon = 4.0", "epsilon = -1.0", "privacy.epsilon", "more private"),
    ("delta as a percentage", "delta = 1e-5", "delta = 5", "privacy.delta", "well below"),
    ("a fraction of a round", "rounds = 150", "rounds = 1.5e2", "learning.rounds", "try 1000"),
    ("nobody learns", "learners = 3", "learners = 0", "learning.learners", "try 1"),
    ("low above high", "low = 0.0\nhigh = 24.0", "low = 24.0\nhigh = 0.0", "data.features[0].low", "swap"),
    ("low without high", "high = 24.0\n", "", "data.features[0].low", "anybody knows"),
    ("no vocabulary", 'vocabulary = ["phone", "mail", "door"]\n', "", "data.features[2].vocabulary", "add vocabulary"),
    ("a word twice", '"phone", "mail"', '"phone", "phone"', "data.features[2].vocabulary", "vocabulary ="),
    ("a kind that is none", 'kind = "hashed"', 'kind = "hash"', "data.features[3].kind", "did you mean 'hashed'"),
    ("one label", '["no", "yes"]', '["yes"]', "data.labels", "labels ="),
    ("three labels, two sides", '["no", "yes"]', '["no", "yes", "maybe"]', "data.labels", "softmax"),
    ("labels of a number", 'task = "logistic"', 'task = "huber"', "data.labels", "label_range ="),
    ("a range from high to low", 'labels = ["no", "yes"]', "label_range = [9.0, 1.0]", "data.labels", "labels ="),
    ("the label predicts itself", 'name = "hour"', 'name = "answered"', "data.features", "that predict"),
    ("a feature twice", 'name = "campaign"', 'name = "hour"', "data.features", "that predict"),
    ("a task that is none", 'task = "logistic"', 'task = "logistics"', "learning.task", "did you mean 'logistic'"),
    ("a noise that is none", 'mechanism = "buffered"', 'mechanism = "blt"', "methods[0].mechanism", "one of these"),
    ("no step size", "step_size = 0.3\naveraging", "averaging", "methods[0].step_size", "add step_size"),
    ("no budget", "epsilon = 4.0 ", "", "privacy.epsilon", "add epsilon"),
    ("a place not filled in", "high = 24.0", 'high = "?"', "data.features[0].high", "fill it in"),
]  # fmt: skip


@pytest.fixture
def project(tmp_path):
    new_project(tmp_path / "mine")
    return tmp_path / "mine"


def refused(path) -> InputError:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    return caught.value


@pytest.mark.parametrize(("what", "old", "new", "field", "way_out"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_message_has_file_line_field_rule_and_way_out(project, what, old, new, field, way_out):
    path = project / "plan.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    error = refused(path).together[0]
    said = re.fullmatch(r"(?s)(.*?): (\S+) \(line (\d+)\) = .+: expected (.+) \((.+)\)", str(error))
    assert said is not None, str(error)
    file, blamed, line, rule, advice = said.groups()
    assert file == str(path)
    assert blamed == field
    assert rule.strip()
    assert way_out in advice
    # The line is the mistake's: within what was written, or, where nothing was, the table's.
    first = text[: text.index(old)].count("\n") + 1
    last = first + new.count("\n")
    table = max((i for i, t in enumerate(text.splitlines()[:last], 1) if t.startswith("[")), default=1)
    allowed = {*range(first - (not new), last + 1), table}
    if blamed == "data.features":  # all of them together
        allowed |= {i for i, t in enumerate(text.splitlines(), 1) if t.startswith("[[data.features]]")}
    if what == "labels of a number":  # the task was changed, and the labels no longer fit
        allowed |= {i for i, t in enumerate(text.splitlines(), 1) if t.startswith("labels =")}
    assert int(line) in allowed, (line, allowed)


def test_all_mistakes_of_a_plan_are_told_at_once(project):
    path = project / "plan.toml"
    text = path.read_text()
    changes = [("rounds = 150", "ronds = 150"), ("epsilon = 4.0", "epsilon = -1.0"), ("high = 24.0", "high = -1.0")]
    for old, new in changes:
        text = text.replace(old, new, 1)
    path.write_text(text)
    told = refused(path).together
    assert [re.sub(r" \(line.*", "", each.field) for each in told] == [
        "learning.ronds",
        "data.features[0].low",
        "privacy.epsilon",
    ]
    numbers = [int(re.search(r"\(line (\d+)\)", each.field)[1]) for each in told]
    assert numbers == sorted(numbers)
    assert str(refused(path)).count(f"{path}: ") == 3


@pytest.mark.parametrize(
    ("what", "content", "says"),
    [
        ("another encoding", "name = 'München'".encode("latin-1"), r"plan \(line 1\).*text in UTF-8.*save it as UTF-8"),
        ("UTF-16", "rounds = 3".encode("utf-16"), r"UTF-16.*save it as UTF-8"),
        ("a spreadsheet", b"PK\x03\x04 xl/workbook.xml", r"spreadsheet.*save it as UTF-8"),
        ("nothing in it", b"", r"learning = None.*add \[learning\]"),
    ],
)
def test_a_file_that_is_no_plan_is_told_apart(tmp_path, what, content, says):
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    assert re.search(says, str(refused(path))), what
    assert str(path) in str(refused(path))


def test_a_plan_that_is_not_there(tmp_path):
    said = str(refused(tmp_path / "plan.toml"))
    assert re.search(r"plan.toml.*a file that can be read \(No such file.*check the path", said)


def test_a_byte_order_mark_is_no_mistake(project):
    path = project / "plan.toml"
    plan = Plan.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Plan.load(path) == plan


FILES = [
    ("no header", lambda text: text.partition("\n")[2].replace("north-", "9"), "columns|header"),
    ("another column", lambda text: text.replace("hour", "stunde", 1), "columns hour.*it has .*stunde"),
    ("a name twice", lambda text: text.replace("temperature", "hour", 1), "names each column once.*rename one"),
    ("a quote that stays open", lambda text: text.replace(",phone,", ',"phone,', 1), r"opens in line \d+.*close it"),
    ("nothing in it", lambda _: "", "the file is empty"),
    ("a person at two places", None, "people who are at one learner each"),
]


@pytest.mark.parametrize(("what", "change", "says"), FILES, ids=[f[0] for f in FILES])
def test_mistakes_in_records_name_the_file_the_rule_and_the_way_out(project, monkeypatch, what, change, says):
    monkeypatch.chdir(project)
    files = sorted((project / "records").iterdir())
    if change is None:
        files[1].write_text(files[1].read_text().replace("south-", "north-"))
    else:
        files[0].write_text(change(files[0].read_text()))
    try:
        said = check_data(files, Plan.load("plan.toml")).run_refuses or ""
    except InputError as error:
        said = str(error)
        assert "north.csv" in said
    assert re.search(says, said), (what, said)
    assert re.search(r"expected .+ \(.+\)$", said, re.DOTALL), said


@pytest.mark.parametrize(("folder", "says"), [("server", "the server's keys, which no learner may hold; "), (".", "")])
def test_server_keys_at_a_learner(tmp_path, folder, says):
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["north"])
    with pytest.raises(InputError) as caught:
        LearnerKeys.load(tmp_path / "keys" / folder)
    assert "expected a learner's folder of keys" in str(caught.value)
    assert caught.value.way_out.endswith(f"{says}--keys {tmp_path / 'keys/learners/north'}")
    LearnerKeys.load(tmp_path / "keys/learners/north")
    with pytest.raises(InputError, match=r"expected the server.s folder of keys.*KEYS/server"):
        ServerKeys.load(tmp_path / "keys/learners/north")


def test_a_column_that_is_not_there_is_named_with_the_nearest(project):
    with pytest.raises(InputError, match=r"--label = 'answerd'.*did you mean 'answered'"):
        profile([open_table(project / "records/north.csv")], {"label": "answerd"})
