"""What expressions and terminals of grammars cost to compile, which llguidance does not limit.

The time grows with the square of what follows each other and may be empty or repeated, and is exponential in the
number of expressions that are intersected. A terminal has all that the terminals in it have, so that a few short lines
may make an expression of any length.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mmvllm.errors import RequestError

MAX_COST = 16_000  # 0.2 s
MAX_INTERSECTIONS = 11
MAX_PARTS = 4000  # of a rule
_OF_REPEAT = 16  # the cost of an alternative is 1
TOO_COSTLY = (
    f"too many repetitions and alternatives; {MAX_COST // _OF_REPEAT} repetitions, or {MAX_COST} alternatives, can be "
    "enforced"
)
_NOT_OPERATORS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?", re.DOTALL)  # of a regular expression
# The tokens of llguidance; any other character is a token, too. A string or an expression without an end extends to the
# end of the grammar, so that no character is read twice.
_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*+"?) | (?P<comment>(?://|\#)[^\n]*) | (?P<regex>/(?:\\.|[^/\\])++/?)
    | (?P<name>[!?_]{0,2}[A-Za-z][A-Za-z0-9_-]*+) | (?P<times>~[ \t]*[0-9]) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
# A rule may have attributes or a parameter before the colon.
_DEFINES = re.compile(r"[ \t]*(?:\[[^\]\n]*\]|::[^:\n]*)?[ \t]*:(?!:)")
_Token = tuple[str, str]  # kind, text


@dataclass(slots=True)
class _Cost:
    repeats: int = 0
    intersections: int = 0

    def __iadd__(self, other: "_Cost") -> "_Cost":
        # No more than what is refused, so that numbers stay small.
        self.repeats = min(self.repeats + other.repeats, MAX_COST + 1)
        self.intersections = min(self.intersections + other.intersections, MAX_INTERSECTIONS + 1)
        return self

    def check(self, param: str, what: str) -> None:
        if self.repeats > MAX_COST:
            raise RequestError(f"{param}: {what} has {TOO_COSTLY}", param=param)
        if self.intersections > MAX_INTERSECTIONS:
            reason = f"{what} has more than {MAX_INTERSECTIONS} operators & and ~"
            raise RequestError(f"{param}: {reason}", param=param)


def is_costly(expression: str) -> bool:
    """Whether a regular expression may take too long to compile."""
    return _of_regex(expression).repeats > MAX_COST


def check_regex(expression: str, param: str) -> None:
    """Raise RequestError for a regular expression that may take too long to compile."""
    _of_regex(expression).check(param, "the expression")


def check_grammar(grammar: str, param: str) -> None:
    """Raise RequestError for a Lark grammar with a terminal that may take too long to compile."""
    bodies: dict[str, list[_Token]] = {}
    for name, body in _definitions(grammar):  # a grammar in a grammar may define a name again
        bodies.setdefault(name, []).extend(body)
    costs: dict[str, _Cost] = {}
    waiting, begun = [*bodies], set()
    while waiting:  # without recursion, since terminals may be nested as deeply as there are lines
        name = waiting[-1]
        inner = [text for kind, text in bodies[name] if kind == "name" and text in bodies and text not in begun]
        if name not in begun and inner and _is_terminal(name):
            begun.add(name)
            waiting += inner
            continue
        if name not in costs:
            begun.add(name)
            costs[name] = _of_body(bodies[name], costs) if _is_terminal(name) else _of_rule(bodies[name])
            costs[name].check(param, f"{name!r:.50}")
        waiting.pop()


def _definitions(grammar: str) -> Iterator[tuple[str, list[_Token]]]:
    """Yield each rule and terminal, whose name begins a line and precedes a colon, with the tokens of its body."""
    name, body, begins_line = "", [], True
    for match in _TOKEN.finditer(grammar):
        kind, text = match.lastgroup, match[0]
        if kind == "name" and begins_line and _DEFINES.match(grammar, match.end()):
            yield name, body
            name, body = text, []
        else:
            body.append((kind, text))
        begins_line = text == "\n" or (begins_line and text.isspace())
    yield name, body


def _is_terminal(name: str) -> bool:
    return name.lstrip("!?_")[:1].isupper()


def _of_body(body: list[_Token], costs: Mapping[str, _Cost]) -> _Cost:
    """Compute the cost of a terminal from its body and the costs of the terminals that it names."""
    found = _Cost()
    for kind, text in body:
        if kind == "regex":
            found += _of_regex(text)
        elif kind == "other":
            found += _of_operator(text)
        elif kind == "name":
            found += _Cost(_OF_REPEAT * text.count("?"))  # which may be an operator of what precedes it
            found += costs[text] if text in costs and _is_terminal(text) else _Cost()
    return found


def _of_rule(body: list[_Token]) -> _Cost:
    """Compute the cost of a rule, which is that of its most costly regular expression.

    A rule with too many parts is too costly by itself, because the parser looks at every part that may be empty.
    """
    repeats = [_of_regex(text).repeats for kind, text in body if kind == "regex"]
    num_parts = sum(kind == "name" or (kind == "other" and text in "*+?") for kind, text in body)
    num_parts += sum(text.startswith("?") for kind, text in body if kind == "name")  # which may be an operator
    of_parts = MAX_COST + 1 if num_parts > MAX_PARTS else 0
    return _Cost(max([*repeats, of_parts]), sum(text in "&~" for kind, text in body if kind == "other"))


def _of_regex(text: str) -> _Cost:
    text = _NOT_OPERATORS.sub("", text)
    return _Cost(min(_OF_REPEAT * sum(map(text.count, "*+?{")) + text.count("|"), MAX_COST + 1))


def _of_operator(text: str) -> _Cost:
    return _Cost(_OF_REPEAT if text in "*+?{" else text == "|", text in "&~")
