"""Schemas of the OpenAPI document, generated from the request and response types.

Constraints on combinations of fields are added here. A schema never rejects what the server accepts: the server limits
UTF-8 bytes, and `maxLength` limits characters to the same number.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import NODEFAULT

from topics.api import config, requests
from topics.api.config import marks_of
from topics.api.fields import Answer
from topics.api.operations import OPERATIONS, SUBJECT_PATTERN
from topics.api.requests import TAG_CHARACTERS_MAX
from topics.api.responses.records import ErrorBody

Json: TypeAlias = dict[str, Any]

REF = "#/components/schemas/{name}"
TOPIC_PATTERN = config.TOPIC_PATTERN
ROUTER_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$"
# A pattern of topic names: tokens between dots, at least one of which is a wildcard; see `_narrow_forward`.
SOURCE_PATTERN = r"^(?:(?:[A-Za-z0-9_:-]+|[*])\.)*(?:[A-Za-z0-9_:-]+|[*]|>)$"


WILDCARD = r"(?:^|\.)(?:[*](?:\.|$)|>$)"
FILTERS_MAX = 32


def components() -> Json:
    """All schemas, by name."""
    record = _without_raw_default(requests.RecordBody)
    copies: dict[Any, type[msgspec.Struct]] = {
        requests.RecordBody: record,
        requests.WriteBody: _copy(requests.WriteBody, records=list[record]),  # type: ignore[valid-type]
        requests.StageBody: _copy(requests.StageBody, records=list[record]),  # type: ignore[valid-type]
    }
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    answers = [body for one in OPERATIONS for body, _ in one.answers.values() if body is not None]
    types: list[Any] = [
        copies.get(body, body) for body in dict.fromkeys([requests.RecordBody, *bodies, *answers, ErrorBody])
    ]
    _, found = msgspec.json.schema_components(types, ref_template=REF)
    described: list[type[msgspec.Struct]] = [
        *_answers(Answer),
        config.TopicSettings,
        config.ConsumerSettings,
    ]
    for answer in described:
        _describe_answer(answer, found)
    for component in found.values():  # only those of requests have defaults left
        for field in component["properties"].values():
            _describe_default(field)
    _narrow(found)
    return dict(sorted(found.items()))


def _describe_default(field: Json) -> None:
    """Defaults of requests are part of the description: tools that make types take a field with a `default` for a required one."""
    default = field.pop("default", None)
    if default:
        field["description"] += f" Default: {msgspec.json.encode(default).decode()}."


def _answers(base: type[Answer]) -> list[type[msgspec.Struct]]:
    return [one for answer in base.__subclasses__() for one in (answer, *_answers(answer))]


def _describe_answer(answer: type[msgspec.Struct], found: Json) -> None:
    """Defaults of answers are a matter of encoding and of the client: see `Answer`."""
    described = found.get(answer.__name__)
    if described is None:
        return
    properties, required = described["properties"], described.setdefault("required", [])
    for field in msgspec.structs.fields(answer):
        marks = {
            mark.extra["document"] for mark in marks_of(field) if mark.extra and "document" in mark.extra
        }
        if "hidden" in marks:
            del properties[field.encode_name]
        elif not field.required:
            schema = properties[field.encode_name]
            properties[field.encode_name] = _without_null(schema) if issubclass(answer, Answer) else schema
            schema.pop("default", None)
            if "always" in marks:
                required.append(field.encode_name)


def _without_null(schema: Json) -> Json:
    schema = {name: member for name, member in schema.items() if name != "default"}
    forms = [form for form in schema.pop("anyOf", []) if form != {"type": "null"}]
    if len(forms) == 1:
        only: Json = forms[0] | schema
        return only
    return schema | {"anyOf": forms} if forms else schema


def _without_raw_default(body: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A copy whose Raw fields have no default: msgspec cannot put a Raw default into a schema."""
    return _copy(
        body,
        **{
            f.name: get_args(f.type)[0] if marks_of(f) else f.type
            for f in msgspec.structs.fields(body)
            if isinstance(f.default, msgspec.Raw)
        },
    )


def _copy(body: type[msgspec.Struct], **types: Any) -> type[msgspec.Struct]:
    """A copy with other types for some fields, which lose their defaults."""
    fields: list[Any] = []
    for f in msgspec.structs.fields(body):
        if f.name in types:
            fields.append(
                (f.name, Annotated[(types[f.name], *marks_of(f))] if marks_of(f) else types[f.name])
            )
        elif f.default is not NODEFAULT:
            fields.append((f.name, f.type, f.default))
        else:
            fields.append((f.name, f.type))
    return msgspec.defstruct(body.__name__, fields, namespace={"__doc__": body.__doc__}, kw_only=True)


def _narrow(found: Json) -> None:
    """Add constraints on combinations of fields."""
    record, write, delete = found["RecordBody"], found["WriteBody"], found["DeleteBody"]
    absent, text = {"type": "null"}, {"type": "string"}
    record.pop("required", None)
    record["anyOf"] = [
        {"required": ["data"], "properties": {"data_base64": absent}},
        {
            "required": ["data_base64"],
            "properties": {"data_base64": text, "data": False, "meta": absent},
        },
    ]
    for body in (write, found["StageBody"]):
        # With `anyOf`, which says the same, tools that make types lose the type of the records.
        has_bytes: Json = {"required": ["data_base64"], "properties": {"data_base64": text}}
        body["properties"]["records"] |= {"if": {"contains": has_bytes}, "then": {"items": has_bytes}}
    delete["anyOf"] = [
        {"required": [name], "properties": {name: {"not": absent}}}
        for name in ("before_seq", "match", "subject", "seqs", "keep")
    ]
    delete["properties"]["subject"]["anyOf"] = [text | {"pattern": SUBJECT_PATTERN}, absent]
    found["WatchBody"]["not"] = {
        "required": ["group", "node"],
        "properties": {"group": text, "node": {"not": absent}},
    }
    for body, field, name in (("DiffBody", "tag", "ReadPredicate"), ("DeleteBody", "match", "TagPredicate")):
        properties = found[body]["properties"]
        # A reference or `null`; the description stays with the field.
        properties[field] = {
            "anyOf": [{"$ref": REF.format(name=name)}, absent],
            "description": properties[field]["description"],
        }
    for name in ("DeliverFrom", "ResetTo"):
        found[name]["oneOf"] = [{"required": [field]} for field in found[name]["properties"]]
    forms = {"Eq": text, "Glob": text | {"pattern": "[*]$"}, "Subject": text | {"pattern": SUBJECT_PATTERN}}
    found["TagPredicate"] = _predicate({op: forms[op] for op in ("Eq", "Glob")})
    found["ReadPredicate"] = _predicate(forms)
    _narrow_filter(found, forms)
    _narrow_forward(found, forms)


def _narrow_filter(found: Json, forms: dict[str, Json]) -> None:
    """A predicate, or a list of patterns and predicates that is not itself a predicate."""
    short: Json = {"maxLength": TAG_CHARACTERS_MAX}
    predicates = [_tuple(op, value | short) for op, value in forms.items()]
    is_predicate: Json = {
        "prefixItems": [{"const": "tag"}, {"enum": [*forms]}, {"type": "string"}],
        "minItems": 3,
        "maxItems": 3,
    }
    several: Json = {
        "type": "array",
        "maxItems": FILTERS_MAX,
        "items": {"anyOf": [forms["Subject"] | short, *predicates]},
        "not": is_predicate,
    }
    field = found["ConsumerBody"]["properties"]["filter"]
    plain: Json = {"type": "string", "not": {"pattern": requests.PATTERN_IN_A_STRING}}
    field["anyOf"] = [plain | short, *predicates, several, {"type": "null"}]


def _narrow_forward(found: Json, forms: dict[str, Json]) -> None:
    properties = found["ForwardBody"]["properties"]
    wild: Json = {"allOf": [{"pattern": SOURCE_PATTERN}, {"pattern": "[*>]"}], "maxLength": 255}
    properties["source"]["anyOf"] = [{"pattern": TOPIC_PATTERN}, wild]
    short: Json = {"maxLength": TAG_CHARACTERS_MAX}
    predicates = [_tuple(op, value | short) for op, value in forms.items()]
    # A wildcard is required: otherwise a malformed predicate would pass as three patterns.
    pattern: Json = {"type": "string", "allOf": [{"pattern": SUBJECT_PATTERN}, {"pattern": WILDCARD}]}
    several: Json = {
        "type": "array",
        "minItems": 1,
        "maxItems": FILTERS_MAX,
        "items": {"anyOf": [pattern | short, *predicates]},
    }
    properties["filter"]["anyOf"] = [{"type": "string"} | short, *predicates, several, {"type": "null"}]


def _tuple(op: str, value: Json) -> Json:
    return {
        "type": "array",
        "prefixItems": [{"const": "tag"}, {"const": op}, value],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    }


def _predicate(forms: dict[str, Json]) -> Json:
    tuples = [_tuple(op, value) for op, value in forms.items()]
    text = 'A tag; a prefix with a final `*`; or `["tag", op, value]`: `Eq` is the tag itself, `Glob` a prefix with a final `*`'
    if "Subject" in forms:
        text += ", `Subject` a dotted pattern in which `*` matches one token and a final `>` one or more"
    return {
        "description": text + ". Records without a tag never match.",
        "anyOf": [{"type": "string"}, *tuples],
    }
