"""A row of the table of settings, and how the fields of the tables in server/settings are made rows. Thread: main."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypedDict, TypeVar, Unpack

from server.values import count_between, duration_between, format_duration, format_size, size_between, yes_or_no

ENVIRONMENT_PREFIX = "STEPLOOP_"
GiB = 2**30
MiB = 2**20
KiB = 2**10

T = TypeVar("T")


class _Traits(TypedDict, total=False):
    """Option's arguments of the same names."""

    show: Callable[[Any], str]
    is_list: bool
    is_secret: bool
    is_switch: bool
    in_file: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A heading in --help. Its methods make fields of a table, each with what Option says of it as its metadata.

    All take the name that operators write, the default, what may be written (`within` both bounds, included), and the
    text of --help.
    """

    heading: str

    def setting(
        self, name: str, default: T, parse: Callable[[str], Any], metavar: str, text: str, **traits: Unpack[_Traits]
    ) -> T:
        """Of any kind."""
        metadata = {"name": name, "parse": parse, "metavar": metavar, "help": text, "group": self.heading, **traits}
        return field(default=default, repr=not traits.get("is_secret"), metadata=metadata)

    def count(self, name: str, default: T, within: tuple[int, int], text: str, metavar: str = "COUNT") -> T:
        return self.setting(name, default, count_between(*within), metavar, text)

    def size(self, name: str, default: T, within: tuple[int, int], text: str) -> T:
        """In bytes."""
        return self.setting(name, default, size_between(*within), "SIZE", text, show=format_size)

    def duration(self, name: str, default: T, within: tuple[float, float], text: str) -> T:
        """In seconds."""
        return self.setting(name, default, duration_between(*within), "TIME", text, show=format_duration)

    def switch(self, name: str, text: str) -> bool:
        """Off where nobody says otherwise."""
        return self.setting(name, False, yes_or_no, "BOOL", text, is_switch=True)


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
