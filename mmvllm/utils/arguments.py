"""Argument checks: suggest known names, accept arguments without effect, and keep API keys secret in messages."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
MAX_SECONDS = 1e6  # upper bound of time limits
AcceptedArguments = Mapping[str, Collection[Any] | None]  # name -> accepted values; None accepts any value


def check_arguments(
    owner: str, given: Mapping[str, Any], known: Collection[str], accepted: AcceptedArguments
) -> dict[str, Any]:
    """Return the `given` arguments whose names are in `known`; check and drop arguments in `accepted`.

    Raises TypeError for any other name, and ValueError for an accepted name with an unsupported value.
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
    """Raise ValueError for anything but an integer of at least `at_least`; bools are refused, too."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def are_ints(values: Collection[Any]) -> bool:
    """Return whether all values are Python integers and not bools; ten times as fast as a loop."""
    return set(map(type, values)) <= {int}


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, including NaN and infinity, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_key(source: str, key: str) -> str:
    """Return an API key or token without surrounding white space, such as the line break at the end of a file.

    Raises ValueError for a key that no HTTP header can carry; the message names `source`, never the key.
    """
    key = key.strip()
    if not key:
        raise ValueError(f"{source} is empty; leave it out to give no key")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{source} must be a key of printable ASCII characters, since HTTP headers allow no others")
    return key


def with_checked_arguments(
    accepted: AcceptedArguments, aliases: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a dataclass's constructor call `check_arguments`, with an unchanged signature.

    `aliases` maps other names to fields; a field that is given under both names raises TypeError.
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
