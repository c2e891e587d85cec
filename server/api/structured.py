"""What holds an answer to a form: the fields that ask for it, by the APIs that define them, and their one constraint.

OpenAI's response_format and text.format, vLLM's structured_outputs and its older guided_* fields; those of SGLang and
llama-server are other names of these (known_fields.py). Thread: loop, or wherever a long body is parsed.
"""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core import constraints
from core.client_grammars import client_grammar
from core.constraints import ANY_OBJECT, Allowance, GrammarSpec, Tag
from core.errors import InvalidRequest
from server.api.decoding import parse_object, shaped

Choices = Annotated[list[str], Meta(min_length=1, max_length=constraints.MAX_CHOICES)]
Source = Annotated[str, Meta(min_length=1)]


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True):
    """response_format.json_schema. Whether it is strict makes no difference: a schema is always held."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Of chat and completions; text.format of responses, which has the schema beside its name.

    Args:
        schema: beside json_object as llama-server takes it.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None
    structures: Any = None
    triggers: Any = None
    format: Any = None


class TagContent(msgspec.Struct, frozen=True, kw_only=True):
    """Of one of xgrammar's tags."""

    type: Literal["json_schema", "const_string"]
    json_schema: Any = None
    value: str = ""


class TagOf(msgspec.Struct, frozen=True, kw_only=True):
    """Args: schema: of the older form, which has no content."""

    begin: str
    end: str
    schema: Any = None
    content: TagContent | None = None


class TagFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["triggered_tags"]
    triggers: list[str]
    tags: list[TagOf]
    at_least_one: bool = False
    stop_after_first: bool = False


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's, in its older form (structures and triggers) or xgrammar's (format)."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TagOf] = []
    triggers: list[str] = []
    format: TagFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's. One of the constraints; what is another would not be held."""

    json: Any = None
    json_object: bool | None = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    structural_tag: Any = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every surface that generates.

    Args:
        sent_as: by the names here, those of other APIs that the client has used for them; decoding.py writes it.
    """

    sent_as: dict[str, str] = msgspec.field(default_factory=dict, name="(sent as)")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None


def constraint_of(
    fields: StructuredFields, response_format: ResponseFormat | None, param: str = "response_format"
) -> GrammarSpec | None:
    """What the fields hold an answer to; None: nothing.

    Args:
        param: the field's name that response_format came in.

    Raises:
        InvalidRequest: several of them, or one that cannot be held.
    """
    found = _asked(fields)
    if response_format is not None and response_format.type != "text":
        found.append((param, lambda: _of_format(response_format, param)))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names} each constrain the answer. Send one of them.", found[1][0])
    return found[0][1]() if found else None


def _asked(fields: StructuredFields) -> list[Any]:
    """(param, what makes its constraint) of each that is asked for."""
    outputs = fields.structured_outputs or StructuredOutputs()
    prefixed = "structured_outputs."
    candidates: list[tuple[str, Any, Any]] = [
        (prefixed + "json_object", outputs.json_object or None, _any_object),
        (prefixed + "structural_tag", outputs.structural_tag, _tagged),
    ]
    for name, make in _MAKERS.items():
        candidates.append((prefixed + name, getattr(outputs, name), make))
        candidates.append((f"guided_{name}", getattr(fields, f"guided_{name}"), make))
    named = [(fields.sent_as.get(param, param), value, make) for param, value, make in candidates if value is not None]
    return [(param, partial(make, value, param)) for param, value, make in named]


def _of_format(response_format: ResponseFormat, param: str) -> GrammarSpec:
    if response_format.type == "structural_tag":
        parts = {name: getattr(response_format, name) for name in ("structures", "triggers", "format")}
        return _tagged({name: one for name, one in parts.items() if one is not None}, param)
    if response_format.type == "json_object":
        schema = ANY_OBJECT if response_format.schema is None else response_format.schema
        return _schema(schema, f"{param}.schema" if response_format.schema is not None else param)
    named = response_format.json_schema
    if named is not None:
        return _schema(named.schema, f"{param}.json_schema.schema")
    is_named = response_format.schema is not None or response_format.name is not None  # as in responses
    return _schema(response_format.schema, f"{param}.{'schema' if is_named else 'json_schema'}")


def _schema(schema: Any, param: str, allowance: Allowance | None = None) -> GrammarSpec:
    if schema is None:
        raise InvalidRequest(f"{param} is missing.", param, "missing_required_parameter")
    if isinstance(schema, str):
        schema = _read(schema, param)
    return constraints.json_schema(schema, param, allowance)


def _read(text: str, param: str) -> dict[str, Any]:
    """An object that is written as a string, as vLLM and SGLang take it."""
    try:
        return parse_object(text.encode())
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("The body", param, 1), param) from None


def _tagged(value: Any, param: str) -> GrammarSpec:
    try:
        asked = shaped(_read(value, param) if isinstance(value, str) else value, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{param} is not a supported structural tag: {error}.", param) from None
    form, allowance = asked.format, Allowance()
    if form is None:
        tags = [
            Tag(one.begin, _schema(one.schema, f"{param}.structures[{i}].schema", allowance), one.end)
            for i, one in enumerate(asked.structures)
        ]
        return constraints.tagged_text(asked.triggers, tags, param)
    tags = []
    for i, one in enumerate(form.tags):
        at = f"{param}.format.tags[{i}].content"
        if one.content is None:
            raise InvalidRequest(f"{at} is missing.", at, "missing_required_parameter")
        content = one.content
        is_text = content.type == "const_string"
        held = content.value if is_text else _schema(content.json_schema, f"{at}.json_schema", allowance)
        tags.append(Tag(one.begin, held, one.end))
    return constraints.tagged_text(form.triggers, tags, param, form.at_least_one, form.stop_after_first)


def _any_object(_: bool, param: str) -> GrammarSpec:
    return constraints.json_schema(ANY_OBJECT, param)


_MAKERS: dict[str, Any] = {
    "json": _schema,
    "regex": constraints.regex,
    "choice": constraints.choice,
    "grammar": client_grammar,
}
