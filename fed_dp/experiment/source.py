"""Where experiments come from: shipped names, TOML files, `--set` overrides, Flower's run config."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fed_dp import plugins
from fed_dp.data.options import Data
from fed_dp.errors import ConfigError
from fed_dp.experiment.schema import DEFAULTS, Experiment

Tables = dict[str, Any]
Valid = TypeVar("Valid", bound=BaseModel)
_NAMED = ("trainer", "strategy", "partition", "model")  # tables whose keys depend on their name
SHIPPED = Path(__file__).parent.parent / "simulations" / "experiments"


def shipped() -> dict[str, Path]:
    """Return the experiments that come with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def read_tables(source: str | Path) -> Tables:
    """Read an experiment's tables from a shipped name or a TOML file; `name` defaults to its stem."""
    path = Path(source)
    if not path.is_file():
        known = shipped()
        if str(source) not in known:
            raise ConfigError(
                f"experiment {str(source)!r}: neither a file nor a shipped experiment; "
                f"shipped: {', '.join(known)}"
            )
        path = known[str(source)]
    tables = read_toml(path)
    tables.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "experiment")
    return tables


def read_toml(path: Path) -> Tables:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def variants(tables: Tables) -> dict[str, Tables]:
    """Split a file into its variants: the base with each `[variants.NAME]` laid over it.

    A file without variants is its own only variant, under its own name. With `[repeats]`, every variant
    comes once for each seed and fold, under NAME~sSEED~fFOLD; `group_of` gives the name back.
    """
    base = copy.deepcopy(tables)
    base.pop("compare", None)  # what `fed-dp compare` makes of the variants
    repeats = _repeats(base.pop("repeats", {}))
    listed = base.pop("variants", {})
    if not isinstance(listed, dict) or not all(isinstance(v, dict) for v in listed.values()):
        raise ConfigError("variants: expected tables, as in [variants.NAME]")
    if not listed:
        found = {str(base.get("name", "experiment")): base}
    else:
        found = {
            name: merged(base, {**changes, "name": f"{base['name']}-{name}"})
            for name, changes in listed.items()
        }
    if not repeats:
        return found
    return {
        f"{name}{ending}": merged(
            each, {**changes, "name": f"{each.get('name', name)}{ending.replace('~', '_')}"}
        )
        for name, each in found.items()
        for ending, changes in repeats.items()
    }


def group_of(name: str) -> str:
    """Return the variant that a repetition belongs to: no experiment's own name has a tilde."""
    return name.partition("~")[0]


def _repeats(given: Any) -> dict[str, Tables]:
    """Return each repetition's ending and changes: `seeds` is a number or a list, `folds` a number."""
    if not isinstance(given, dict) or (wrong := set(given) - {"seeds", "folds"}):
        extra = f"unknown key repeats.{min(wrong)}; " if isinstance(given, dict) else ""
        raise ConfigError(f"{extra}repeats: expected a table of seeds and folds")
    if not given:
        return {}
    seeds, folds = given.get("seeds", 1), given.get("folds", 1)
    listed = list(range(1, seeds + 1)) if type(seeds) is int else seeds
    if not isinstance(listed, list) or not listed or not all(type(s) is int and s >= 0 for s in listed):
        raise ConfigError(f"repeats.seeds = {seeds!r}: expected a number of seeds from 1, or a list of them")
    if len(set(listed)) < len(listed):
        raise ConfigError(f"repeats.seeds = {seeds!r}: expected seeds that differ")
    if type(folds) is not int or folds < 1:
        raise ConfigError(f"repeats.folds = {folds!r}: expected a whole number from 1")
    if folds == 1:
        return {f"~s{seed}": {"seed": seed} for seed in listed}
    return {
        f"~s{seed}~f{fold}": {"seed": seed, "data": {"folds": folds, "fold": fold}}
        for seed in listed
        for fold in range(folds)
    }


def profile(tables: Tables, wanted: str | None = None) -> Tables:
    """Lay one `[profiles.NAME]` over a whole file, its variants included; the first, if none is named."""
    base = copy.deepcopy(tables)
    listed = base.pop("profiles", {})
    if not isinstance(listed, dict) or not all(isinstance(p, dict) for p in listed.values()):
        raise ConfigError("profiles: expected tables, as in [profiles.NAME]")
    if wanted is None and not listed:
        return base
    name = next(iter(listed)) if wanted is None else wanted
    if name not in listed:
        has = f"has: {', '.join(listed)}" if listed else "has none"
        raise ConfigError(f"experiment {base.get('name')!r} has no profile {name!r}; {has}")
    return merged(base, {**listed[name], "name": f"{base['name']}-{name}"})


def override(tables: Tables, assignments: Sequence[str]) -> Tables:
    """Apply `a.b=value` assignments; the value is read as TOML, or else taken as a string."""
    result = copy.deepcopy(tables)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set {assignment!r}: expected KEY=VALUE, as in rounds=20")
        change: Any = _toml_value(text.strip())
        for part in reversed(parts):
            change = {part: change}
        result = merged(result, change)
    return result


def build(given: Mapping[str, Any], *, where: str = "experiment") -> Experiment:
    """Validate tables into an Experiment; every mistake is one line naming key, value, allowed."""
    tables = copy.deepcopy(dict(given))
    if isinstance(tables.get("task"), str):  # task = "binary" is short for a table
        tables["task"] = {"name": tables["task"]}
    for kind, key in (("model", "factory"), ("data", "loader")):  # a network or data set of the user's own
        if isinstance(table := tables.get(kind), dict) and key in table:
            table.setdefault("name", "own")
    data = tables.get("data")
    if isinstance(data, dict):
        if isinstance(data.get("partition"), str):  # partition = "iid" is short for a table
            data["partition"] = {"name": data["partition"]}
        if isinstance(data.get("path"), str):  # workers run in other folders
            data["path"] = str(Path(data["path"]).expanduser().absolute())
        _drop_former_keys(data)
    return validated(Experiment, tables, where=where)


def _drop_former_keys(data: Tables) -> None:
    """Drop what earlier versions wrote for every data set: an influence of friends where there are none."""
    name = data.get("name", DEFAULTS["data"])
    if data.get("influence") is True and name in plugins.names("data"):
        if "influence" not in plugins.find("data", name).model_fields:
            del data["influence"]


def validated(model: type[Valid], tables: Mapping[str, Any], *, where: str) -> Valid:
    """Validate tables into a model; every mistake is one line naming key, value, allowed."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        lines: dict[str, list[str]] = {}
        for detail in error.errors():
            subject, expected = _explain(dict(detail), model, tables)
            lines.setdefault(subject, []).append(expected)
        raise ConfigError(
            "\n".join(f"{where}: {subject}{' or '.join(parts)}" for subject, parts in lines.items())
        ) from None


def select(source: str | Path, wanted_profile: str | None = None) -> tuple[str, dict[str, Tables]]:
    """Return an experiment's name and the tables of its variants: all, or the one of `NAME:VARIANT`."""
    name, colon, wanted = str(source).partition(":")
    tables = profile(read_tables(name), wanted_profile)
    found = variants(tables)
    if not colon:
        return str(tables["name"]), found
    chosen = {key: each for key, each in found.items() if wanted in (key, group_of(key))}
    if not chosen:
        has = ", ".join(dict.fromkeys(map(group_of, found)))
        raise ConfigError(f"experiment {name!r} has no variant {wanted!r}; has: {has}")
    return str(tables["name"]), chosen


def load_experiment(
    source: str | Path, assignments: Sequence[str] = (), *, wanted_profile: str | None = None
) -> Experiment:
    """Load one experiment; a file with several variants must be asked for one: `NAME:VARIANT`."""
    return build(one_of(source, assignments, wanted_profile=wanted_profile), where=str(source))


def one_of(
    source: str | Path, assignments: Sequence[str] = (), *, wanted_profile: str | None = None
) -> Tables:
    """Return the tables of one experiment, with overrides; a file with several variants is refused."""
    _, found = select(source, wanted_profile)
    if len(found) > 1:
        raise ConfigError(
            f"experiment {str(source)!r} has variants ({', '.join(found)}): name one, as in "
            f"{source}:{next(iter(found))}"
        )
    return override(next(iter(found.values())), assignments)


def to_run_config(experiment: Experiment) -> dict[str, bool | float | int | str]:
    """Pack an experiment into Flower's run config (flat scalars only)."""
    return {"experiment-json": json.dumps(experiment.tables()), "experiment": experiment.name}


def from_run_config(config: Mapping[str, bool | float | int | str]) -> Experiment:
    """Read the experiment of a Flower run: packed whole, or a name or file with overrides."""
    if packed := str(config.get("experiment-json", "")):
        return build(json.loads(packed))
    assignments = str(config.get("set", "")).split()
    wanted = str(config.get("profile", "")) or None
    return load_experiment(str(config.get("experiment", "")), assignments, wanted_profile=wanted)


def merged(base: Tables, changes: Tables) -> Tables:
    """Lay `changes` over `base`. A table with another `name` replaces the old one's own keys."""
    result = dict(base)
    for key, new in changes.items():
        old = result.get(key)
        if isinstance(new, dict) and isinstance(old, str):  # partition = "x", then partition.y
            old = {"name": old}
        if isinstance(new, dict) and isinstance(old, dict):
            if key in _NAMED and new.get("name", old.get("name")) != old.get("name"):
                old = {}
            result[key] = merged(old, new)
        else:
            result[key] = copy.deepcopy(new)
    return result


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(detail: dict[str, Any], root: type[BaseModel], tables: Mapping[str, Any]) -> tuple[str, str]:
    """Say what is wrong with which key, in two halves: the subject, and what was expected."""
    context = detail.get("ctx", {})
    keys, model = _without_tags([str(part) for part in detail["loc"]], root, tables)
    key = ".".join(keys)
    kind = detail["type"]
    if kind == "extra_forbidden":
        allowed = list(model.model_fields) if model else []
        close = get_close_matches(keys[-1], allowed, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else _belongs_to(keys, model)
        return f"unknown key {key} = {detail['input']!r}", f"{hint}; allowed: {', '.join(allowed)}"
    if kind == "union_tag_invalid":
        return f"{key}.name = {context['tag']!r}: expected one of ", context["expected_tags"]
    if kind == "union_tag_not_found":
        return f"{key}.name is missing", ""
    if kind == "value_error":
        return str(context["error"]), ""
    if kind == "missing":
        return f"{key} is missing", ""
    return f"{key} = {detail['input']!r}: expected ", _WORDS.get(kind, _plain(detail["msg"]))


def _belongs_to(keys: list[str], model: type[BaseModel] | None) -> str:
    """Say which other trainer, strategy, network, data set or partition takes the key."""
    if model is None:
        return ""
    if len(keys) == 2 and keys[0] in plugins.GROUPS:
        others = plugins.own_components(keys[0])
    else:
        others = {_name_of(member): member for member in _union_with(model)}
    owners = [repr(name) for name, other in others.items() if keys[-1] in other.model_fields]
    verb = "has" if len(owners) == 1 else "have"
    return f" (only {', '.join(owners)} {verb} it)" if owners else ""


def _union_with(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the members of the union of partitions, if the model is one."""
    federation = [m for m in get_args(Data.model_fields["partition"].annotation) if _is_section(m)]
    return federation if model in federation else []


def _name_of(section: type[BaseModel]) -> str:
    return str(get_args(section.model_fields["name"].annotation)[0])


_WORDS = {
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
    "tuple_type": "a list",
}


def _plain(message: str) -> str:
    message = message.removeprefix("Input should be ")
    return message[0].lower() + message[1:]


def _without_tags(
    path: list[str], root: type[BaseModel], tables: Mapping[str, Any]
) -> tuple[list[str], type[BaseModel] | None]:
    """Drop what pydantic adds to a location (union tags, types); find the model it points into."""
    keys: list[str] = []
    model: type[BaseModel] | None = root
    federation: dict[str, type[BaseModel]] = {}
    for part in path:
        if part in federation:
            model, federation = federation[part], {}
            continue
        if "[" in part or part in ("constrained-int", "number", "list"):
            continue
        keys.append(part)
        if len(keys) == 1 and part in plugins.GROUPS:
            model = _component(part, tables)
            continue
        field = model.model_fields.get(part) if model else None
        choices = (
            [a for a in (field.annotation, *get_args(field.annotation)) if _is_section(a)] if field else []
        )
        federation = {_name_of(m): m for m in choices if len(choices) > 1}
        if len(choices) == 1:
            model = choices[0]
    return keys, model


def _component(kind: str, tables: Mapping[str, Any]) -> type[BaseModel] | None:
    """Return the class of the component that a table names, where it names one."""
    table = tables.get(kind)
    name = table.get("name", DEFAULTS[kind]) if isinstance(table, Mapping) else None
    known = plugins.names(kind)  # type: ignore[arg-type]
    return plugins.find(kind, name) if name in known else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
