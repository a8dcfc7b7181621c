"""Tables: strict types, rules beside the fields, errors that say where and what instead."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from enum import StrEnum
from typing import Literal

import pytest

from veilstream.errors import InputError
from veilstream.plans.schema import Table, agreed, value


class Wheel(Table):
    size: float = value(gt=0, hint="try 0.7")
    spokes: int | None = None


class Bike(Table):
    gears: int = value(default=7, ge=1, le=30)
    colour: Literal["red", "green"] = "red"
    owner: str = value(default="Me", empty=False)
    lock: str = value(default="chain", choices=("chain", "wheel"), pattern=r"\w+:\w+", shape="a:b")
    ratios: tuple[float, ...] = value(default=(), gt=0)
    front: Wheel
    wheels: tuple[Wheel, ...] = value(default=(), empty=True)
    bell: bool = False

    def check(self) -> None:
        if len(self.wheels) > self.gears:
            raise InputError("gears", self.gears, "one for each wheel", "more gears")


FRONT = {"size": 0.5}


def test_a_table_is_a_frozen_dataclass_with_its_defaults():
    bike = Bike(front={"size": 1}, ratios=[1, 2.5])
    assert bike == Bike(front=Wheel(size=1.0), ratios=(1.0, 2.5))
    assert (bike.gears, bike.colour, bike.bell, bike.front.spokes) == (7, "red", False, None)
    assert isinstance(bike.front.size, float)
    assert isinstance(bike.ratios[0], float)
    assert asdict(bike)["front"] == {"size": 1.0, "spokes": None}
    assert hash(bike) == hash(pickle.loads(pickle.dumps(bike)))
    with pytest.raises(FrozenInstanceError):
        bike.gears = 3


class Paint(StrEnum):
    GREEN = "green"


def test_members_of_a_str_enum_become_their_names():
    assert type(Bike(front=FRONT, colour=Paint.GREEN).colour) is str


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gears": 0}, r"^gears = 0: expected a whole number >= 1 and <= 30 \(try 7\)$"),
        ({"gears": 31}, r"^gears = 31"),
        ({"gears": 7.0}, r"^gears = 7\.0"),
        ({"gears": True}, r"^gears = True"),
        ({"gears": None}, r"^gears = None"),
        ({"gears": 10**5000}, r"^gears = '<whole number beyond 64 bits>'"),
        ({"bell": 1}, r"^bell = 1: expected true or false \(try false\)$"),
        ({"colour": "gren"}, r"^colour = 'gren': expected one of red, green \(did you mean 'green'"),
        ({"colour": 3}, r"^colour = 3: expected one of red, green \(take one of these\)"),
        ({"owner": ""}, r"^owner = '': expected text that is not empty \(try Me\)$"),
        ({"owner": "\udcff"}, r"^owner = '\\udcff'"),
        ({"lock": "a:"}, r"^lock = 'a:': expected one of chain, wheel, or a:b"),
        ({"ratios": 1.0}, r"^ratios = 1\.0: expected an array, each item a finite number > 0"),
        ({"ratios": [1.0, -1]}, r"^ratios\[1\] = -1: expected a finite number > 0"),
        ({"ratios": [10**400]}, r"^ratios\[0\] = '<whole"),
        ({"front": 3}, r"^front = 3: expected a table \(write \[front\]\)$"),
        ({"front": {}}, r"^front\.size = None: expected .* \(add size = ...; try 0\.7\)$"),
        ({"front": {"size": float("nan")}}, r"^front\.size = nan"),
        ({"front": {"siez": 1}}, r"^front\.siez = 1: expected one of size, spokes \(did you mean"),
        ({"front": {"size": 1, "spokes": "3"}}, r"^front\.spokes = '3': .* \(or leave it out\)$"),
        ({"front": {1: 1}}, r"^front\.1 = 1"),
        ({"front": {"self": 1}}, r"^front\.self = 1"),
        ({"wheels": {}}, r"^wheels = '<table>': expected an array, each item a table \(write \[\[wheels"),
        ({"wheels": [FRONT, []]}, r"^wheels\[1\] = '<array>': expected a table"),
        ({"wheels": [FRONT, {"size": 0}]}, r"^wheels\[1\]\.size = 0"),
        ({"wheels": 8 * [FRONT]}, r"^gears = 7: expected one for each wheel"),
        ({"gears": 0, "wheels": [{"spoke": 1}]}, r"(?m)^gears = 0.*\n^wheels\[0\]\.spoke = 1"),
    ],
)
def test_what_a_field_excludes_is_refused_with_its_rule_and_a_way_out(given, message):
    with pytest.raises(InputError, match=message):
        Bike(**({"front": FRONT} | given))


def test_texts_may_be_a_choice_or_fit_a_pattern():
    assert Bike(front=FRONT, lock="wheel").lock == "wheel"
    assert Bike(front=FRONT, lock="my:lock").lock == "my:lock"


def test_copies_are_checked_again():
    with pytest.raises(InputError, match="gears"):
        replace(Bike(front=FRONT), gears=0)


class Lamp(Table):
    kind: Literal["bulb", "tube"] = "bulb"
    watts: int = value(default=40, only_where=("kind", "bulb"))
    switch: str | None = None
    dimmer: str | None = agreed(default=None, only_with="switch")


def test_a_field_stands_only_where_another_has_its_value_or_is_given():
    assert Lamp(watts=60, switch="wall", dimmer="wheel").allows("watts")
    assert not Lamp(kind="tube").allows("watts")
    with pytest.raises(InputError, match=r'watts = 60: expected nothing unless kind is "bulb" \(kind = "bulb", or'):
        Lamp(kind="tube", watts=60)
    with pytest.raises(InputError, match=r"dimmer = 'wheel': expected switch beside it \(add switch, or remove"):
        Lamp(dimmer="wheel")


def test_agreed_values_are_those_that_decide_the_model():
    assert Lamp(switch="wall", dimmer="wheel").agreed_values() == {"dimmer": "wheel"}
