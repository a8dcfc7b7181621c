"""Which column says who, when, where and what: guesses from names and cells."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from veilstream.records.schema import EACH_ROW

if TYPE_CHECKING:
    from veilstream.plans.column_profile import Column


FEW = 20  # a column with at most this many different cells is a list of words

# Words in the names of columns, of several languages; the first has precedence.
_LABELS = "label target class y outcome ziel klasse ergebnis zielwert cible etiqueta resultado classe esito"
_CLIENTS = """
    client person people patient user customer member subject kunde kunden nutzer personne utilisateur
    paciente cliente usuario persona paziente klant pid tag id who name
"""
_TIMES = """
    time timestamp date datetime when day period hour datum zeit uhrzeit zeitpunkt zeitstempel jour
    heure fecha hora ora tijd
"""
_LEARNERS = """
    learner station site hospital clinic region carrier branch device center centre klinik krankenhaus
    standort filiale praxis clinique hopital clinica sede ziekenhuis
"""
_NUMBERS_OF_THINGS = """
    id uuid guid nr no num number nummer numero key code ssn phone telefon email mail iban index row
    record
"""
_STEM = 5  # a word of this length also counts as the beginning of a longer one (patientennummer)
_MOST_LEARNERS = 1000


@dataclass(frozen=True)
class Roles:
    """Columns by what they say: guesses."""

    client: str
    time: str | None
    learner: str | None
    label: str | None
    left_out: tuple[str, ...]  # columns that are no features either: they tell rows apart
    remarks: tuple[str, ...]  # for the person beside the data: counts, no cells

    def as_dict(self) -> dict[str, str | None]:
        """For ``--json``."""
        return {"client": self.client, "time": self.time, "learner": self.learner, "label": self.label}

    def by_column(self) -> dict[str, str]:
        """Column to role."""
        held = {column: role for role, column in self.as_dict().items() if column is not None and column != EACH_ROW}
        return held | dict.fromkeys(self.left_out, "left out")


def guessed_roles(
    columns: Mapping[str, Column], *, one_file: bool = True, known: Mapping[str, str] | None = None
) -> Roles:
    """Guess each role that is not ``known``; only in a single file may a column say at which learner a record is."""
    known = known or {}
    remarks: list[str] = []
    names = list(columns)
    label = known.get("label") or _called(_LABELS, [n for n in names if n != known.get("client")])
    if label is None:
        label = _last_of_few(columns)
        if label is not None:
            remarks.append(f'label = "{label}" is a guess from its place: no name says label')
    rest = [name for name in names if name != label]
    client = known.get("client") or _client(columns, rest, remarks)
    rest = [name for name in rest if name != client]
    time = _time(columns, rest, remarks)
    rest = [name for name in rest if name != time]
    learner = _called(_LEARNERS, [n for n in rest if 2 <= columns[n].distinct <= _MOST_LEARNERS])
    if learner is not None and (not one_file or columns[learner].nearly_unique):
        learner = None
    if learner is not None:
        remarks.append(
            f'learner = "{learner}" is a guess from its name: each of its '
            f"{columns[learner].distinct} words would be a learner of its own. Leave it out where "
            "each learner has its own file; make it a feature where it only predicts"
        )
    left_out = tuple(n for n in rest if n != learner and _tells_rows_apart(columns[n]))
    remarks += [
        f'"{name}" is different in nearly every row, so it is proposed as no feature: it tells '
        f'rows apart and predicts nobody else. Does it say who? Then client = "{name}"'
        for name in left_out
    ]
    if label is not None and columns[label].classes < columns[label].distinct <= FEW:
        remarks.append(
            f'"{label}" has {columns[label].distinct} spellings of {columns[label].classes} texts, in upper '
            "and lower case: each counts as the text in the plan's labels, however it is written"
        )
    return Roles(client, time, learner, label, left_out, tuple(remarks))


def column_of_people(names: list[str]) -> str | None:
    """The column that says who, by its name alone."""
    return _called(_CLIENTS, names)


def _client(columns: Mapping[str, Column], names: list[str], remarks: list[str]) -> str:
    named = _called(_CLIENTS, [n for n in names if columns[n].distinct > 1])
    if named is not None:
        if columns[named].nearly_unique:
            remarks.append(
                f'client = "{named}" is different in nearly every row. Is it the person\'s, or the '
                "row's own number? A row's number hides people who return, and the promise would "
                "protect each of their rows alone"
            )
        return named
    alike = [n for n in names if _tells_rows_apart(columns[n])]
    if alike:
        remarks.append(
            f'client = "{alike[0]}" is a guess from its cells, which differ in nearly every row. '
            "Keep it if it says who, the same for the same person whenever they come. If it only "
            "numbers rows, name the column that says who"
        )
        return alike[0]
    remarks.append(
        f'client = "{EACH_ROW}" because no column looks like a name: it takes every row for '
        "another person. If people return, name the column that says who, or the promise does not "
        "hold for them"
    )
    return EACH_ROW


def _time(columns: Mapping[str, Column], names: list[str], remarks: list[str]) -> str | None:
    dates = [n for n in names if columns[n].is_date]
    # An hour of the day predicts; it orders nothing.
    varied = [n for n in names if columns[n].names_people or n in dates]
    time = _called(_TIMES, varied)
    if time is None and dates:
        time = dates[0]
        remarks.append(f'time = "{time}" is a guess from its cells, which are dates')
    if time is not None and not columns[time].sorts_as_time:
        remarks.append(
            f'"{time}" holds dates that can be read in two ways (is 03/04 in March or in April?): write them as '
            "2026-01-31 12:00, as 31.1.2026, or as numbers; until then rows are in the order of the file"
        )
    return time


def _last_of_few(columns: Mapping[str, Column]) -> str | None:
    few = [name for name, column in columns.items() if 2 <= column.distinct <= FEW]
    return few[-1] if few else next(reversed(list(columns)), None)


def _tells_rows_apart(column: Column) -> bool:
    """Nearly unique, and no measurement: text, or whole numbers that are called a number."""
    if not column.nearly_unique or column.is_date:
        return False
    if not column.is_number:
        return True
    counts = column.whole_numbers == column.numbers
    return counts and _called(_NUMBERS_OF_THINGS, [column.name]) is not None


def _called(words: str, names: list[str]) -> str | None:
    """The first column with one of these words in its name: a whole word, else a beginning."""
    cut = {name: _words(name) for name in names}
    whole = (name for wanted in words.split() for name in names if wanted in cut[name])
    begun = (
        name
        for wanted in words.split()
        for name in names
        if len(wanted) >= _STEM and any(word.startswith(wanted) for word in cut[name])
    )
    return next(whole, None) or next(begun, None)


def _words(name: str) -> list[str]:
    """patientId, patient_id and Patient-ID are patient and id; letters lose their accents."""
    plain = unicodedata.normalize("NFKD", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))
    letters = "".join(c for c in plain if not unicodedata.combining(c)).lower()
    return [word for word in re.split(r"[^a-z]+", letters) if word]
