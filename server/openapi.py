"""/openapi.json: every route with its fields and answers, made of the types that parse and write them. Thread: any.

Bounds, defaults and required fields are those of the bodies' types; what else a body may hold is in the table of known
fields: `x-aliases`, `x-refused` and `x-no-effect` of a body say what becomes of it.
"""

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from core.errors import ErrorKind, ServiceError
from server import __version__
from server.api import messages, ollama
from server.api.decoding import BUILDING, FUNCTION_KIND
from server.api.fields import LIMIT, RequestLimits
from server.api.known_fields import Does, Name, rules_of
from server.api.replies import EVENTS
from server.app import Operation, Route
from server.gate.identity import Scope

Routes = Mapping[str, Mapping[str, Route]]
_SchemaOf = Callable[[Any], dict[str, Any]]

_ABOUT = (
    "The routes of this server. In bodies null is as good as absent; a field that is not named here is ignored and "
    "counted. A request that says anthropic-version has its errors in Anthropic's form."
)
_CREDENTIALS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_BOUNDS = {"integer": "maximum", "array": "maxItems", "object": "maxProperties"}
_PARAMETER = re.compile(r"\{(\w+)\}")
_ALWAYS = (ErrorKind.INVALID_REQUEST, ErrorKind.RATE_LIMITED, ErrorKind.ENGINE, ErrorKind.UNAVAILABLE)
_OF_CALLERS = (ErrorKind.AUTHENTICATION, ErrorKind.PERMISSION, ErrorKind.NOT_FOUND, ErrorKind.CONFLICT)
_OF_BODIES = (ErrorKind.REQUEST_TIMEOUT, ErrorKind.BODY_TOO_LARGE, ErrorKind.UNSUPPORTED_MEDIA_TYPE)
_OF_WORK = (ErrorKind.CANCELLED, ErrorKind.UPSTREAM, ErrorKind.DEADLINE_EXCEEDED, ErrorKind.KEY_REUSED)


def document(routes: Routes, limits: RequestLimits) -> bytes:
    """The document, as JSON. A path that has the route of an earlier one is another name of it."""
    every = ((path, method, route) for path, methods in routes.items() for method, route in methods.items())
    told = [(path, method, route, route.operation) for path, method, route in every if route.operation is not None]
    types = list(dict.fromkeys(one for _, _, route, operation in told for one in _types_of(route, operation)))
    with BUILDING:
        schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    for one in components.values():
        one.get("properties", {}).pop("(sent as)", None)
        _bound(one, limits)
    for body, surface in {one.body: one.surface for *_, one in told if one.surface and one.body in by_type}.items():
        schema = components[by_type[body]["$ref"].rpartition("/")[2]]
        schema |= _known(surface)
        if (tools := schema["properties"].get("tools")) is not None:
            tools["anyOf"][0]["items"] = {"anyOf": [tools["anyOf"][0]["items"], _foreign_tool(surface)]}
    paths: dict[str, dict[str, Any]] = {}
    firsts: dict[tuple[str, Operation], str] = {}
    for path, method, route, operation in told:
        first = firsts.setdefault((method, operation), path)
        shown = _operation(path, method, route, operation, by_type.__getitem__)
        paths.setdefault(path, {})[method.lower()] = shown | ({} if first == path else {"x-alias-of": first})
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "steploop", "version": __version__, "description": _ABOUT},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": _CREDENTIALS},
        }
    )


def _bound(schema: Any, limits: RequestLimits) -> None:
    """Give values that a setting bounds their bound, in place."""
    if isinstance(schema, dict):
        if (name := schema.pop(LIMIT, None)) is not None:
            schema[_BOUNDS[schema["type"]]] = getattr(limits, name)
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        _bound(inner, limits)


def _types_of(route: Route, operation: Operation) -> list[Any]:
    found = [route.errors.shape, *operation.query.values()]
    found += [one for one in (operation.answer, operation.events) if one is not None and not isinstance(one, bytes)]
    return found if operation.body is None or isinstance(operation.body, tuple) else [*found, operation.body]


def _known(surface: Name) -> dict[str, Any]:
    """What becomes of fields that the body's type does not have."""
    rules = rules_of(surface).values()
    refused = {one.name: one.neutral for one in rules if one.does in (Does.REFUSED, Does.CONTAINER)}
    return {
        "x-aliases": {one.name: one.target for one in rules if one.does is Does.ALIAS},
        "x-refused": refused,
        "x-no-effect": [one.name for one in rules if one.does is Does.IGNORED],
    }


def _foreign_tool(surface: Name) -> dict[str, Any]:
    kind = {"type": "string", "not": {"const": messages.FUNCTION_KIND if surface == "messages" else FUNCTION_KIND}}
    about = "No function: left out, with a warning in the server's log."
    return {"type": "object", "required": ["type"], "properties": {"type": kind}, "description": about}


def _operation(path: str, method: str, route: Route, operation: Operation, schema_of: _SchemaOf) -> dict[str, Any]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]
    in_query = [{"name": name, "in": "query", "schema": schema_of(one)} for name, one in operation.query.items()]
    shown = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "tags": [_surface_of(route)],
        "summary": operation.summary,
        "security": [{name: [str(route.scope.value)]} for name in _CREDENTIALS] if route.scope else [],
        "parameters": in_path + in_query,
        "responses": _answers(route, operation, schema_of),
    }
    return shown if operation.body is None else shown | {"requestBody": _body(operation, schema_of)}


def _surface_of(route: Route) -> str:
    if route.errors is not ollama.ERRORS and route.errors is not messages.ERRORS:
        if route.scope is Scope.ADMIN:
            return "Operators"
        return "Monitoring" if route.scope in (None, Scope.METRICS) else "OpenAI's and others'"
    return "Ollama's" if route.errors is ollama.ERRORS else "Anthropic's"


def _body(operation: Operation, schema_of: _SchemaOf) -> dict[str, Any]:
    if isinstance(operation.body, tuple):
        fields = {name: {"type": "string"} for name in operation.body}
        content: dict[str, Any] = {"multipart/form-data": {"schema": {"type": "object", "properties": fields}}}
    else:
        content = {"application/json": {"schema": schema_of(operation.body), "example": operation.example}}
    return {"required": True, "content": content}


def _answers(route: Route, operation: Operation, schema_of: _SchemaOf) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.answer, bytes):
        content[_plain(operation.answer)] = {"schema": {"type": "string"}}
    elif operation.answer is not None:
        content["application/json"] = {"schema": schema_of(operation.answer)}
    if operation.events is not None:
        media_type = _plain(operation.media_type)
        content[media_type] = {"schema": _event(route, operation, schema_of)}
    errors: dict[int, str] = {}
    for kind in _kinds(route, operation):
        status = route.errors.status(ServiceError(kind, ""))
        errors[status] = f"{errors[status]}, {kind.value}" if status in errors else kind.value
    form = {"application/json": {"schema": schema_of(route.errors.shape)}}
    return {str(operation.status): {"description": HTTPStatus(operation.status).phrase, "content": content}} | {
        str(status): {"description": errors[status].replace("_", " "), "content": form} for status in sorted(errors)
    }


def _event(route: Route, operation: Operation, schema_of: _SchemaOf) -> dict[str, Any]:
    """Of server-sent events each one, as OpenAPI 3.2 has them: JSON as its data, perhaps an error; of lines all."""
    schema = {"anyOf": [schema_of(operation.events), schema_of(route.errors.shape)]}
    json = {"contentMediaType": "application/json", "contentSchema": schema}
    if operation.media_type != EVENTS:
        return {"type": "string", **json}
    data: dict[str, Any] = {"anyOf": [{"const": "[DONE]"}, json]} if operation.ends_with_done else json
    return {"type": "object", "properties": {"data": {"type": "string", **data}}, "required": ["data"]}


def _kinds(route: Route, operation: Operation) -> list[ErrorKind]:
    """The errors that an answer may be."""
    has = ((True, _ALWAYS), (route.scope, _OF_CALLERS), (operation.body, _OF_BODIES), (route.is_counted, _OF_WORK))
    return [kind for is_so, kinds in has if is_so for kind in kinds]


def _plain(media_type: bytes) -> str:
    return media_type.decode().partition(";")[0]
