"""The JSON Schema of experiment files: editors complete and check them with it (`fed-dp schema`)."""

from __future__ import annotations

from typing import Any

from fed_dp import plugins
from fed_dp.experiment.schema import DEFAULTS, Clients, Experiment, Privacy, Ray
from fed_dp.options import Section

_SECTIONS: dict[str, type[Section]] = {"clients": Clients, "privacy": Privacy, "ray": Ray}
_FREE = {"type": "object"}


def json_schema() -> dict[str, Any]:
    """Return the schema of an experiment file, with every component that is installed."""
    definitions: dict[str, Any] = {}
    tables: dict[str, Any] = {key: _of(section, definitions) for key, section in _SECTIONS.items()}
    for kind, default in DEFAULTS.items():
        tables[kind] = _component(kind, default, definitions)  # type: ignore[arg-type]
    plain = Experiment.model_fields.keys() - tables.keys()
    whole = {key: value for key, value in _plain_fields().items() if key in plain}
    # Of a variant or a profile: what is not given, also within a table, is as in the file.
    parts = {key: {"type": ["object", "string"]} for key in tables}
    changes = {"type": "object", "properties": {**whole, **parts, "repeats": _FREE, "compare": _FREE}}
    lists = {
        "extends": {"type": "string", "description": "An experiment whose keys are taken over."},
        "variants": {"type": "object", "additionalProperties": changes},
        "profiles": {"type": "object", "additionalProperties": changes},
        "repeats": _FREE,
        "compare": _FREE,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fed_dp experiment",
        "type": "object",
        "additionalProperties": False,
        "properties": {**whole, **tables, **lists},
        "$defs": definitions,
    }


def _plain_fields() -> dict[str, Any]:
    """Return the schema of the keys that are no tables."""

    class Plain(Section):
        pass

    fields = {
        key: (field.annotation, field)
        for key, field in Experiment.model_fields.items()
        if key not in _SECTIONS and key not in DEFAULTS
    }
    from pydantic import create_model

    found: dict[str, Any] = create_model("Plain", __base__=Plain, **fields).model_json_schema()["properties"]  # type: ignore[call-overload]
    return found


def _component(kind: plugins.Kind, default: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a table that is any component of a kind, told by its name; or a plug-in's import path."""
    choices = []
    for name, component in plugins.components(kind).items():
        schema = _of(component, definitions)
        properties = {**schema.get("properties", {}), "name": {"const": name}}
        if "partition" in properties:  # partition = "iid" is short for a table
            properties["partition"] = {"anyOf": [properties["partition"], {"type": "string"}]}
        required = [] if name == default else ["name"]
        choices.append({**schema, "title": f"{kind} {name}", "properties": properties, "required": required})
    path = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": ":"}},
        "required": ["name"],
    }
    names = [{"type": "string"}] if kind == "task" else []
    return {"anyOf": [*choices, path, *names]}


def _of(section: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a section's schema; what it refers to goes into `definitions`."""
    schema = section.model_json_schema()
    definitions |= schema.pop("$defs", {})
    about = (section.__doc__ or "").strip().partition("\n")[0]
    return {**schema, "description": about}
