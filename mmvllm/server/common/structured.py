"""Request fields for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mmvllm.errors import RequestError
from mmvllm.server.common.messages import Flag, Ignored, StrictModel, Unsupported
from mmvllm.server.errors import renamed
from mmvllm.structured.params import MAX_CHARACTERS, NAMES, StructuredOutputsParams, as_structured
from mmvllm.utils.text import has_more_values

Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1)]


def _require_schema(value: Any) -> Any:
    if has_more_values(value, MAX_CHARACTERS):
        raise PydanticCustomError("schema", f"has more than {MAX_CHARACTERS} values")
    if isinstance(value, str | dict) and value:
        return value
    raise PydanticCustomError("schema", "must be a JSON schema, as an object that is not empty or as text")


Schema = Annotated[dict[str, Any] | str, BeforeValidator(_require_schema)]


class NamedSchema(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Ignored = None  # not shown to the model
    schema_: Schema = Field(alias="schema")
    strict: Flag = Field(None, description="The schema is enforced in any case.")


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(StrictModel):
    """vLLM's StructuredOutputsParams."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    whitespace_pattern: str | None = None
    structural_tag: Unsupported = None
    disable_any_whitespace: bool | None = Field(None, description='true is an alias of whitespace_pattern "".')
    disable_additional_properties: Unsupported = None
    disable_fallback: Ignored = None


class StructuredFields(StrictModel):
    """Request fields for structured output, on all routes that generate completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names of these fields.
    guided_json: Schema | None = None
    guided_json_object: bool | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Ignored = None


@dataclass(frozen=True, slots=True)
class StructuredField:
    """The structured output of a request: values and request paths, keyed by names of StructuredOutputsParams."""

    values: dict[str, Any]
    paths: dict[str, str]

    @property
    def path(self) -> str:
        """The top-level request field, for errors about the whole."""
        return next(iter(self.paths.values())).partition(".")[0]

    def params(self) -> StructuredOutputsParams | None:
        """Return the parameters, or None; raises RequestError, which `format_error` words for the client."""
        return as_structured(self.values) if self.values else None

    def format_error(self, error: ValueError) -> tuple[str, str] | None:
        """Return the message and the request path of an error about these values, or None for other errors."""
        param = getattr(error, "param", None) or ""
        kind, _, name = param.partition(".")
        if kind != "structured":
            return None
        path = self.paths.get(name, self.path) if self.paths else "structured_outputs"
        return str(error).replace(param, path, 1), path

    def renamed(self, names: Mapping[str, str]) -> "StructuredField":
        """Return a copy whose paths are renamed by `names` to the paths in the client's request."""
        return StructuredField(self.values, {name: renamed(path, names) for name, path in self.paths.items()})


def structured_field(body: StructuredFields) -> StructuredField:
    """Return the structured output of a request; raises RequestError if fields conflict or one is incomplete."""
    guided = {name: getattr(body, f"guided_{name}") for name in NAMES}
    fields = (_of_format(body.response_format), _of_outputs(body.structured_outputs), _of_guided(guided))
    asked = [field for field in fields if field is not None]
    if len(asked) > 1:
        given = " and ".join(field.path for field in asked)
        raise RequestError(f"{given} both say what the text must be; give one of them", param=asked[1].path)
    return asked[0] if asked else StructuredField({}, {})


def _of_format(form: ResponseFormat | None) -> StructuredField | None:
    name = "response_format"
    if form is None:
        return None
    if (form.type == "json_schema") != (form.json_schema is not None):
        needs = "needs json_schema" if form.json_schema is None else "does not take json_schema"
        raise RequestError(f"{name} with type {form.type!r} {needs}", param=f"{name}.json_schema")
    if form.type == "json_object":
        return StructuredField({"json_object": True}, {"json_object": name})
    if form.json_schema is None:
        return None
    return StructuredField({"json": form.json_schema.schema_}, {"json": f"{name}.json_schema.schema"})


def _of_outputs(given: StructuredOutputs | None) -> StructuredField | None:
    if given is None:
        return None
    values = given.model_dump(by_alias=True, include={*NAMES, "json_"}, exclude_none=True)  # json_ has the alias json
    if given.disable_any_whitespace and values.keys() & {"json", "json_object"}:
        values.setdefault("whitespace_pattern", "")
    paths = {name: f"structured_outputs.{name}" for name in NAMES}
    return StructuredField(values or {"json_object": None}, paths)


def _of_guided(given: Mapping[str, Any]) -> StructuredField | None:
    values = {name: value for name, value in given.items() if value not in (None, False)}
    return StructuredField(values, {name: f"guided_{name}" for name in values}) if values else None
