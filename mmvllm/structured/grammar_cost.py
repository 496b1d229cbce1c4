"""Estimates and limits the compile time of regular expressions and grammar terminals, which llguidance does not.

The time is quadratic in the number of consecutive parts that may be empty or repeated, and grows with the product of
the sizes of intersected expressions. If case is ignored, each character of a class is visited. A terminal includes the
terminals that it names, so a few short lines may define an expression of any length.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from math import prod

from mmvllm.errors import RequestError

MAX_COST = 16_000  # 0.2 s
MAX_INTERSECTIONS = 11
MAX_LENGTH = 100_000  # characters of a terminal, including the terminals that it names
MAX_CHAIN = 1000  # levels of rules or schemas; a few thousand overflow llguidance's stack, which ends the process
MAX_INTERSECTED = 25_000  # product of the sizes: the number of states of the intersection
_OF_CLASS = 400  # the cost of a character class if case is ignored
MAX_PARTS = 4000  # of a rule
_LARGEST = 10**9  # larger sizes are capped
_OF_REPEAT = 16  # the cost of a repetition; an alternative costs 1
TOO_COSTLY = (
    f"too many repetitions and alternatives; {MAX_COST // _OF_REPEAT} repetitions, {MAX_COST} alternatives, or "
    f"{MAX_COST // _OF_CLASS} classes of characters where case is ignored, can be enforced"
)
_NOT_OPERATORS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?", re.DOTALL)  # escapes and classes
# Operators, groups and flags, which match no character; in an expression without escapes and classes.
_NO_CHARACTER = re.compile(r"\(\?[a-zA-Z-]*:?|\{[^{}]*\}|[/()|*+?^$]")
# The tokens of llguidance; any other character is a token, too. An unterminated string or expression extends to the end
# of the grammar, so that no character is read twice.
_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*+"?) | (?P<comment>(?://|\#)[^\n]*) | (?P<regex>/(?:\\.|[^/\\])++/?)
    | (?P<name>[!?_]{0,2}[A-Za-z][A-Za-z0-9_-]*+) | (?P<times>~[ \t]*[0-9]) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
# A rule may have attributes or a parameter before the colon. Nothing is read twice.
_DEFINES = re.compile(r"[ \t]*+(?:\[[^\]\n]*+\]|::[^:\n]*+)?+[ \t]*+:(?!:)")
_CLASSES = re.compile(r"\\[wWdDsSpP]|(?P<other>\\.)|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\.", re.DOTALL)
_IGNORES_CASE = re.compile(r"\(\?[a-zA-Z]*i")
_FLAGS = re.compile(r"[imslux]+")  # after an expression of a grammar
_TIMES = re.compile(r"(?:\{(?:[^{},]*,)?|~(?:\s*\d+\s*\.\.)?)\s*(\d{1,9})")
_MARKS = "!?"  # before a name; "?" may also be an operator of the preceding part
_Token = tuple[str, str]  # kind, text


@dataclass(slots=True)
class _Cost:
    repeats: int = 0
    intersections: int = 0
    size: int = 0  # about the number of states
    length: int = 0  # in characters, without repetitions

    def __iadd__(self, other: "_Cost") -> "_Cost":
        # Capped just above the limits, to keep the numbers small.
        self.repeats = min(self.repeats + other.repeats, MAX_COST + 1)
        self.intersections = min(self.intersections + other.intersections, MAX_INTERSECTIONS + 1)
        self.size = min(self.size + other.size, _LARGEST)
        self.length = min(self.length + other.length, _LARGEST)
        return self

    def check(self, param: str, what: str) -> None:
        if self.repeats > MAX_COST:
            raise RequestError(f"{param}: {what} has {TOO_COSTLY}", param=param)
        if self.length > MAX_LENGTH:
            raise RequestError(
                f"{param}: {what} has more than {MAX_LENGTH} characters with the terminals that it names", param=param
            )
        if self.intersections > MAX_INTERSECTIONS:
            reason = f"{what} has more than {MAX_INTERSECTIONS} operators & and ~"
            raise RequestError(f"{param}: {reason}", param=param)
        if self.intersections and self.size > MAX_INTERSECTED:
            reason = f"{what} intersects expressions that are too large; the product of their sizes (length times "
            raise RequestError(f"{param}: {reason}repetitions) must be at most {MAX_INTERSECTED}", param=param)


def is_costly(expression: str) -> bool:
    """Return whether a regular expression may take too long to compile."""
    return _of_regex(expression).repeats > MAX_COST


def check_regex(expression: str, param: str) -> None:
    """Raise RequestError for a regular expression that may take too long to compile."""
    _of_regex(expression).check(param, "the expression")


def check_grammar(grammar: str, param: str) -> None:
    """Raise RequestError for a Lark grammar with a terminal that may take too long to compile."""
    bodies = _bodies(grammar)
    inner = _names_in(bodies)
    if longest_chain({name: 1 + _depth(body) for name, body in bodies.items()}, inner) > MAX_CHAIN:
        raise RequestError(f"{param} has rules that lead more than {MAX_CHAIN} levels deep", param=param)
    costs: dict[str, _Cost] = {}
    waiting, begun = [*bodies], set()
    while waiting:  # without recursion, since terminals may be nested as deeply as there are lines
        name = waiting[-1]
        left = [one for one in inner[name] if one not in begun] if name not in costs and _is_terminal(name) else []
        if name not in begun and left:
            begun.add(name)
            waiting += left
            continue
        if name not in costs:
            begun.add(name)
            costs[name] = _of_body(bodies[name], costs) if _is_terminal(name) else _of_rule(bodies[name])
            costs[name].check(param, f"{name!r:.50}")
        waiting.pop()


def _bodies(grammar: str) -> dict[str, list[_Token]]:
    """Read the bodies of rules and terminals, by name without the marks before it."""
    bodies: dict[str, list[_Token]] = {}
    for name, body in _definitions(grammar):  # an embedded grammar may define a name again
        bodies.setdefault(name.lstrip(_MARKS), []).extend(body)
    return bodies


def _names_in(bodies: Mapping[str, list[_Token]]) -> dict[str, list[str]]:
    """Find the rules and terminals that each body names."""
    found = {name: [text.lstrip(_MARKS) for kind, text in body if kind == "name"] for name, body in bodies.items()}
    return {name: [one for one in dict.fromkeys(names) if one in bodies] for name, names in found.items()}


@lru_cache(maxsize=32)  # called for every sequence
def has_complement(grammar: str) -> bool:
    """Return whether a grammar has the complement operator `~`, which matches all texts but the terminal's."""
    return "~" in grammar and any(
        kind == "other" and text == "~" for _, body in _definitions(grammar) for kind, text in body
    )


def _depth(body: list[_Token]) -> int:
    """Return the nesting depth of brackets."""
    depth = most = 0
    for kind, text in body:
        if kind == "other" and text in "([{":
            depth += 1
            most = max(most, depth)
        elif kind == "other" and text in ")]}":
            depth -= 1
    return most


def longest_chain(weights: Mapping[str, int], following: Mapping[str, Sequence[str]]) -> int:
    """Return the largest total weight of a chain of references; with a cycle, the total weight of all names."""
    longest: dict[str, int] = {}
    for start in weights:
        waiting, begun = [start], set()
        while waiting:
            name = waiting[-1]
            inner = [] if name in longest else [one for one in following.get(name, ()) if one in weights]
            left = [one for one in inner if one not in longest]
            if any(one in begun for one in left):
                return sum(weights.values())
            if left:
                begun.add(name)
                waiting += dict.fromkeys(left)
                continue
            if name not in longest:
                longest[name] = weights[name] + max((longest[one] for one in inner), default=0)
                begun.discard(name)
            waiting.pop()
    return max(longest.values(), default=0)


def _definitions(grammar: str) -> Iterator[tuple[str, list[_Token]]]:
    """Yield each rule and terminal with the tokens of its body; its name begins a line and precedes a colon."""
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
    found, sizes, operators = _Cost(), [0], [""]  # sizes and operators of each intersected expression
    for (kind, text), (_, following) in pairwise([*body, ("other", "")]):
        if kind == "regex":
            own = _of_regex(text, _has_flag_i(following))
        elif kind == "text":
            own = _Cost(size=len(text), length=len(text))
        elif kind == "name":
            own = _Cost(_OF_REPEAT * text.count("?"))  # "?" may be an operator of the preceding part
            name = text.lstrip(_MARKS)
            own += costs[name] if name in costs and _is_terminal(name) else _Cost()
        else:
            own = _of_operator(text) if kind == "other" else _Cost()
            operators[-1] += text
        if text == "&":
            sizes.append(0)
            operators.append("")
        sizes[-1] += own.size
        found += own
    found.size = min(prod(max(1, size) * _times(text) for size, text in zip(sizes, operators, strict=True)), _LARGEST)
    return found


def _has_flag_i(following: str) -> bool:
    """Return whether the flags after an expression in a grammar make it ignore case."""
    return "i" in following and _FLAGS.fullmatch(following) is not None


def _times(text: str) -> int:
    """Return the product of the largest numbers of repetitions."""
    return min(prod(max(1, int(number)) for number in islice(_TIMES.findall(text), 100)), _LARGEST)


def _of_rule(body: list[_Token]) -> _Cost:
    """Compute the cost of a rule, which equals the cost of its most costly regular expression.

    A rule with too many parts is too costly by itself, because the parser visits every part that may be empty.
    """
    tokens = pairwise([*body, ("other", "")])
    of_texts = [(text, following) for (kind, text), (_, following) in tokens if kind == "regex"]
    repeats = [_of_regex(text, _has_flag_i(following)).repeats for text, following in of_texts]
    num_parts = sum(kind == "name" or (kind == "other" and text in "*+?") for kind, text in body)
    num_parts += sum(text.startswith("?") for kind, text in body if kind == "name")  # or an operator
    of_parts = MAX_COST + 1 if num_parts > MAX_PARTS else 0
    return _Cost(max([*repeats, of_parts]), sum(text in "&~" for kind, text in body if kind == "other"))


def _of_regex(text: str, ignores_case: bool = False) -> _Cost:
    times, length = _times(text), len(text)
    ignores_case |= _IGNORES_CASE.search(text) is not None
    num_classes = sum(match["other"] is None for match in _CLASSES.finditer(text)) if ignores_case else 0
    size = min(len(_NO_CHARACTER.sub("", _NOT_OPERATORS.sub("x", text))) * times, _LARGEST)
    text = _NOT_OPERATORS.sub("", text)
    repeats = _OF_REPEAT * sum(map(text.count, "*+?{")) + text.count("|") + _OF_CLASS * num_classes
    return _Cost(min(repeats, MAX_COST + 1), size=size, length=length)


def _of_operator(text: str) -> _Cost:
    return _Cost(_OF_REPEAT if text in "*+?{" else text == "|", text in "&~")
