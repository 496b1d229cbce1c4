"""Random JSON schemas, and completions that a model without any sense would write under a constraint."""

import random

import numpy as np

from mmvllm.sampling.grammar import GrammarCompiler
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.sequence import Sequence
from mmvllm.structured.params import StructuredOutputsParams

NAMES = ["a", "b", "name", "größe", "a b", "x/y", 'q"q', "back\\slash", "1", "type", "line\nbreak", "~0"]
TEXTS = ["", "red", "blue", "é", "日本", "😀", 'say "hi"', "a/b", "tab\t", "</s>", "<|im_end|>", "{", "0"]
PATTERNS = ["^[a-z]{2,5}$", "^(red|green)-[0-9]+$", "ab", "^x", r"^\d{4}$", "[A-F]{3}$", "^é+$", r"^a\.b$", "^a/b$"]
FORMATS = ["uuid", "ipv4", "time", "date-time", "hostname", "email"]


class SchemaMaker:
    """Schemas of a seed that have at least one instance, with every keyword that is enforced."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.defs: dict[str, dict] = {}

    def schema(self) -> dict:
        """A schema with definitions."""
        found = self._any(depth=3)
        if self.rng.random() < 0.2:
            tree = {"type": "object", "properties": {"v": self._leaf(), "next": {"$ref": "#/$defs/tree"}}}
            self.defs["tree"] = tree | {"required": ["v"], "additionalProperties": False}
            found = {"type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}, "it": found}}
            found |= {"required": ["it", "tree"], "additionalProperties": False}
        return found | ({"$defs": self.defs} if self.defs else {}) | {"title": "A schema"}

    def _any(self, depth: int) -> dict:
        kinds = [self._leaf] if depth == 0 else [self._leaf, self._object, self._object, self._array, self._union]
        made = self.rng.choice(kinds)
        return made() if made == self._leaf else made(depth - 1)

    def _leaf(self) -> dict:
        return self.rng.choice(
            [self._string, self._string, self._integer, self._number, self._enum, self._const, self._simple]
        )()

    def _simple(self) -> dict:
        return {"type": self.rng.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}

    def _string(self) -> dict:
        rng = self.rng
        low = rng.randrange(4)
        return {"type": "string", "description": "words"} | rng.choice(
            [
                {},
                {"minLength": low, "maxLength": low + rng.randrange(12)},
                {"maxLength": rng.randrange(1, 30)},
                {"pattern": rng.choice(PATTERNS)},
                {"pattern": "^[a-c]+$", "minLength": 2, "maxLength": 6},
                {"format": rng.choice(FORMATS)},
            ]
        )

    def _integer(self) -> dict:
        rng, low = self.rng, self.rng.randrange(-50, 1000)
        return {"type": "integer"} | rng.choice(
            [
                {"minimum": low, "maximum": low + rng.randrange(1, 500)},
                {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randrange(2, 50)},
                {"multipleOf": rng.randrange(2, 12), "minimum": 0},
                {"maximum": low},
                {},
            ]
        )

    def _number(self) -> dict:
        rng, low = self.rng, self.rng.randrange(-5, 100)
        return {"type": "number"} | rng.choice(
            [{"minimum": low, "maximum": low + 0.5}, {"exclusiveMinimum": low}, {"minimum": 0, "maximum": 1}, {}]
        )

    def _enum(self) -> dict:
        values = [*self.rng.sample(TEXTS, 3), self.rng.randrange(9), None, {"a": [1, "x"]}, True]
        return {"enum": self.rng.sample(values, self.rng.randrange(1, 4))}

    def _const(self) -> dict:
        return {"const": self.rng.choice([*TEXTS, 7, -1.5, None, False, [1, "a"], {"k": "v/w"}])}

    def _object(self, depth: int) -> dict:
        rng = self.rng
        names = rng.sample(NAMES, rng.randrange(1, 5))
        made = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        made |= rng.choice([{}, {"required": rng.sample(names, rng.randrange(len(names) + 1))}, {"required": names}])
        made |= rng.choice([{"additionalProperties": False}, {"additionalProperties": self._leaf()}, {}])
        if rng.random() < 0.15:
            made |= {"patternProperties": {"^k[0-9]": self._leaf()}, "additionalProperties": False}
        if made.get("required") == names and rng.random() < 0.3:
            made |= {"minProperties": len(names), "maxProperties": len(names) + 1}
        return made

    def _array(self, depth: int) -> dict:
        rng = self.rng
        low = rng.randrange(3)
        bounds = rng.choice([{"minItems": low, "maxItems": low + rng.randrange(4)}, {"maxItems": 3}, {}])
        if rng.random() < 0.2:
            first = [self._any(depth), self._leaf()]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
        return {"type": "array", "items": self._any(depth), **bounds}

    def _union(self, depth: int) -> dict:
        rng = self.rng
        if rng.random() < 0.3:
            kinds = [{"type": "object", "properties": {"kind": {"const": k}, "v": self._any(depth)}} for k in "xyz"]
            return {"oneOf": [kind | {"required": ["kind", "v"], "additionalProperties": False} for kind in kinds]}
        if rng.random() < 0.3:
            return {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 9, "pattern": "^[a-z ]*$"}]}
        return {"anyOf": [self._any(depth) for _ in range(rng.randrange(2, 4))]}


def write(
    compiler: GrammarCompiler, params: StructuredOutputsParams, tokenizer, width: int, seed: int, max_tokens: int = 300
) -> tuple[str, bool]:
    """A random completion under a constraint, and whether it is finished.

    The ends of texts and containers are likely, more so the longer it is, else few would be finished.
    """
    rng = np.random.default_rng(seed)
    seq = Sequence([0], SamplingParams(structured=params), request_id="", block_size=4)
    constraint, bias = compiler.constraint(params), _ends(tokenizer, width)
    for i in range(max_tokens):
        allowed = np.full(-(-width // 32), 0xFFFFFFFF, np.uint32)
        constraint.restrict(seq, allowed)
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:width]
        logits = np.where(bits, rng.normal(0, 2, width) + bias * (i / 20), -np.inf)
        token_id = int(logits.argmax())
        if token_id == tokenizer.eos_token_id:
            return tokenizer.decode(seq.completion_token_ids, skip_special_tokens=True), True
        seq.append_token(token_id)
    return tokenizer.decode(seq.completion_token_ids, skip_special_tokens=True), False


def _ends(tokenizer, width: int) -> np.ndarray:
    bias = np.zeros(width)
    for text in ('"', "}", "]", "null"):
        if len(ids := tokenizer.encode(text, add_special_tokens=False)) == 1:
            bias[ids] = 1
    bias[tokenizer.eos_token_id] = 2
    return bias


def doubling() -> str:
    """A grammar of 2^900 letters a, of which each rule may be one b: it grows with what is written."""
    rules = (f'r{i}: r{i + 1} r{i + 1} | r{i + 1} "y" | r{i + 1} "z" | "b"' for i in range(900))
    return "\n".join(["start: r0", *rules, 'r900: "a"'])


def wide() -> str:
    """A grammar of more alternatives than the parser follows at a time."""
    return "start: " + " | ".join(f'"a{i}" r' for i in range(2100)) + '\nr: "x"'
