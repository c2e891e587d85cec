"""A row of the table of settings, as the fields of the tables in server/settings tell it. Thread: main."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Required, TypedDict

ENVIRONMENT_PREFIX = "STEPLOOP_"
GiB = 2**30
MiB = 2**20
KiB = 2**10


class Setting(TypedDict, total=False):
    """What a field of a table says of itself as metadata: Option's arguments of the same names."""

    name: Required[str]
    parse: Required[Callable[[str], Any]]
    metavar: Required[str]
    help: Required[str]
    group: Required[str]
    show: Callable[[Any], str]
    is_list: bool
    is_secret: bool
    is_switch: bool
    in_file: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the table.

    Args:
        field_name: its unit is part of it.
        name: what operators write, with dashes.
        parse: from text; raises BadValueError.
        group: its heading in --help.
        show: the default, as the help says it.
        is_list: the flag may be repeated, the variable holds commas, the TOML value is a list.
        is_secret: its value is never printed.
        is_switch: the flag has no value; the variable and the TOML key say true or false.
        in_file: may stand in the TOML file.
    """

    field_name: str
    default: Any
    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    group: str
    show: Callable[[Any], str] = str
    is_list: bool = False
    is_secret: bool = False
    is_switch: bool = False
    in_file: bool = True

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.replace("-", "_").upper()

    @property
    def toml_key(self) -> str:
        return self.name.replace("-", "_")


def rows_of(table: type[Any]) -> tuple[Option, ...]:
    """The settings among the fields of a table."""
    return tuple(_row(one) for one in fields(table) if one.metadata)


def _row(config_field: Field[Any]) -> Option:
    assert config_field.default is not MISSING
    return Option(field_name=config_field.name, default=config_field.default, **config_field.metadata)
