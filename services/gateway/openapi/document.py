"""The OpenAPI document, made of the application's own routes.

Paths, parameters and typed answers are what Litestar has read of the handlers, the rest is their `Described`. Schemas
come from msgspec, which also reads and writes the bodies: so the document says what is taken, to the bound of a number.
(Litestar's own document has no place for a body that a handler reads itself.)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import UnionType
from typing import Any, get_args

import msgspec
from litestar import Litestar, Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import ParameterKwarg
from litestar.routes import HTTPRoute
from litestar.typing import FieldDefinition

from services.gateway.openapi.described import EVENTS, JSON, KEY, Described

VERSION = "3.1.0"

_REF = "#/components/schemas/{name}"
_PHRASES = {499: "Client Closed Request", 529: "Overloaded"}
"""Of statuses that HTTP itself does not know."""
_TRY_AGAIN = (503, 529)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

Json = dict[str, Any]


def document(app: Litestar, keys: bool) -> Json:
    """`keys`: the server demands API keys. Raises KeyError for a handler without a description."""
    endpoints = list(_endpoints(app, keys))
    types = list(dict.fromkeys(type for endpoint in endpoints for type in endpoint.types))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = endpoint.operation(by_type)
    parts: Json = {"schemas": components}
    if keys:
        parts["securitySchemes"] = _KEYS
    return {
        "openapi": VERSION,
        "info": {"title": "Samovar", "version": "1", "summary": "Models on this machine, for agents."},
        "paths": paths,
        "components": parts,
    }


def _endpoints(app: Litestar, keys: bool) -> "Iterator[_Endpoint]":
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            if method != "OPTIONS":  # Litestar's own, for the preflight of browsers
                about: Described = handler.opt[KEY]
                yield _Endpoint(route.path_format, method, handler, tuple(route.path_parameters), about, keys)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    path: str
    method: str
    handler: HTTPRouteHandler
    path_parameters: Sequence[str]
    about: Described
    keys: bool

    @property
    def types(self) -> Iterator[Any]:
        """Those whose schemas `operation` needs."""
        if self.about.body is not None:
            yield self.about.body
        yield from self._answers
        yield self.about.error_body

    @property
    def _answers(self) -> Sequence[Any]:
        """The types that a whole answer may have."""
        answer = self.about.answer
        if answer is None:
            returned = self.handler.parsed_fn_signature.return_type
            inner = returned.inner_types[0] if returned.is_subclass_of(Response) else returned
            answer = inner.annotation
        if answer in (None, type(None)):
            return ()
        return get_args(answer) if isinstance(answer, UnionType) else (answer,)

    def operation(self, schemas: Mapping[Any, Json]) -> Json:
        about = self.about
        operation: Json = {
            "operationId": re.sub(r"\W+", "_", f"{self.method.lower()}{self.path}").rstrip("_"),
            "summary": about.summary,
            "parameters": list(self._parameters()),
            "responses": {str(self.handler.status_code): self._answer(schemas)} | dict(self._errors(schemas)),
        }
        if about.body is not None:
            body: Json = {"schema": schemas[about.body]}
            if about.example is not None:
                body["example"] = about.example
            operation["requestBody"] = {"required": True, "content": {JSON: body}}
        if self.keys and not about.open:
            operation["security"] = [{name: []} for name in _KEYS]
        return operation

    def _answer(self, schemas: Mapping[Any, Json]) -> Json:
        content: Json = {}
        if answers := [schemas[type] for type in self._answers]:
            content[self.about.media_type] = {"schema": answers[0] if len(answers) == 1 else {"anyOf": answers}}
        if self.about.events:
            content[EVENTS] = {}  # each event is JSON of its own; OpenAPI 3.1 has no words for that
        response = _response(self.handler.status_code, content)
        links = {
            name: {"operationId": name, "parameters": {parameter: "$response.body#/id"}}
            for name, parameter in self.about.links
        }
        return response | {"links": links} if links else response

    def _errors(self, schemas: Mapping[Any, Json]) -> Iterator[tuple[str, Json]]:
        demanded = (401,) if self.keys and not self.about.open else ()
        for status in sorted({*self.about.errors, *demanded}):
            response = _response(status, {JSON: {"schema": schemas[self.about.error_body]}})
            if status in _TRY_AGAIN:
                response["headers"] = {"retry-after": {"description": "Seconds.", "schema": {"type": "integer"}}}
            yield str(status), response

    def _parameters(self) -> Iterator[Json]:
        for name, field in self.handler.parsed_fn_signature.parameters.items():
            if name == "request":
                continue
            schema = _parameter_schema(field)
            if name in self.path_parameters:
                yield {"name": name, "in": "path", "required": True, "schema": schema | {"minLength": 1}}
            else:
                yield {"name": name, "in": "query", "required": field.is_required, "schema": schema}


def _parameter_schema(field: FieldDefinition) -> Json:
    schema = msgspec.json.schema(field.annotation)
    bounds = field.kwarg_definition
    if isinstance(bounds, ParameterKwarg):
        given = (("minimum", bounds.ge), ("maximum", bounds.le), ("description", bounds.description))
        schema |= {name: value for name, value in given if value is not None}
    return schema if field.is_required else schema | {"default": field.default}


def _response(status: int, content: Json) -> Json:
    response: Json = {"description": _PHRASES.get(status) or HTTPStatus(status).phrase}
    return response | {"content": content} if content else response
