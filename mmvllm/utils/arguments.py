"""Checks of arguments: suggestions for unknown names; arguments that change nothing are accepted; keys stay secret."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
MAX_SECONDS = 1e6  # of a time limit
AcceptedArguments = Mapping[str, Collection[Any] | None]  # name -> accepted values; None accepts any value


def check_arguments(
    owner: str, given: Mapping[str, Any], known: Collection[str], accepted: AcceptedArguments
) -> dict[str, Any]:
    """The arguments to use: the `given` ones whose name is in `known`; those in `accepted` are checked and left out.

    Raises TypeError for a name in neither, ValueError for an accepted name with another value than those accepted.
    """
    for name, value in given.items():
        if name in known:
            continue
        if name not in accepted:
            raise TypeError(f"{owner} has no argument {name!r}{_hint(name, known)}")
        values = accepted[name]
        if values is not None and value not in values:
            raise ValueError(
                f"{owner} does not support {name}={value!r}; leave it out or give {' or '.join(map(repr, values))}"
            )
    return {name: value for name, value in given.items() if name in known}


def check_int(name: str, value: Any, at_least: int = 1) -> None:
    """Raise ValueError for anything but an integer of at least `at_least`; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def are_ints(values: Collection[Any]) -> bool:
    """Whether all values are Python integers, and no bools; takes a tenth of the time of looking at each."""
    return set(map(type, values)) <= {int}


def is_number(value: Any) -> bool:
    """Whether it is a real number, NaN and infinity included; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_key(source: str, key: str) -> str:
    """An API key or a token without the white space around it, such as the line break of a file.

    Raises ValueError for a key that no HTTP header can carry; the message names `source`, never the key.
    """
    key = key.strip()
    if not key:
        raise ValueError(f"{source} is empty; leave it out to give no key")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{source} must be a key of printable ASCII characters, as HTTP headers have; it has others")
    return key


def with_checked_arguments(
    accepted: AcceptedArguments, aliases: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Decorates a dataclass so that its constructor calls `check_arguments`; its signature stays the dataclass's.

    `aliases` are other names of its fields; one that is given by both names raises TypeError.
    """

    def decorate(cls: type[T]) -> type[T]:
        init, known = cls.__init__, [field.name for field in fields(cls)]

        @wraps(init)
        def checked_init(self, **given: Any) -> None:
            for alias, name in aliases.items():
                if alias in given and name in given:
                    raise TypeError(f"{cls.__name__} has {alias!r} and {name!r}, which are the same; give one")
                if alias in given:
                    given[name] = given.pop(alias)
            init(self, **check_arguments(cls.__name__, given, known, accepted))

        cls.__init__ = checked_init
        return cls

    return decorate


def _hint(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
