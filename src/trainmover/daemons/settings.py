"""One namespace for every owner's settings: ``owner.field``, from a TOML file and ``--set``.

Decides what is a setting (each owner's dataclass says so), that types fit, and that unknown names
are refused with the nearest right one. What a value means is its owner's business.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from trainmover import controller
from trainmover.checkpoint.cadence_text import parse_cadence
from trainmover.errors import ConfigError

OWNERS: Final[tuple[tuple[str, str, str], ...]] = (
    ("controller", "trainmover.controller.config", "Config"),
    ("agent", "trainmover.agent.config", "Config"),
    ("worker", "trainmover.worker.lifecycle_state", "LifecycleConfig"),
    ("worker", "trainmover.worker.config", "WorkerConfig"),
    ("communicator", "trainmover.communicator.settings", "CommunicatorConfig"),
    ("rehearsal", "trainmover.rehearsal.config", "RehearsalConfig"),
    ("snapshot", "trainmover.topology.keeping", "SnapshotConfig"),
    ("checkpoint", "trainmover.topology.keeping", "CheckpointConfig"),
)
"""Section, module (imports no torch), dataclass; two owners may share a section."""
NOT_SETTINGS: Final = frozenset({"worker.without"})
"""Fields that only the simulation sets."""

Scalar = int | float | bool | str | tuple[str, ...]
C = TypeVar("C")


def owner_classes() -> tuple[tuple[str, type[Any]], ...]:
    """Section and dataclass of every owner."""
    return tuple(
        (section, getattr(importlib.import_module(module), kind))
        for section, module, kind in OWNERS
    )


def fields_of(section: str, kind: type[Any]) -> list[tuple[str, dataclasses.Field[Any]]]:
    """Full name and field of each setting of one owner."""
    named = [(f"{section}.{field.name}", field) for field in dataclasses.fields(kind)]
    return [(name, field) for name, field in named if name not in NOT_SETTINGS]


def defaults() -> dict[str, Scalar]:
    """Every setting with its default, in the owners' order."""
    found: dict[str, Scalar] = {}
    for section, kind in owner_classes():
        for name, field in fields_of(section, kind):
            default: Any = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            found[name] = default
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Flat ``owner.field`` -> value of a TOML file. Raises ConfigError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    flat: dict[str, Any] = {}
    for owner, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: expected a section [{owner}] around '{owner}'")
        for name, value in table.items():
            flat[f"{owner}.{name}"] = tuple(value) if isinstance(value, list) else value
    return flat


def read_assignments(assignments: Sequence[str]) -> dict[str, str]:
    """``owner.field=value`` arguments as text. Raises ConfigError."""
    found = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"expected --set owner.field=value, got '{text}'")
        found[name.strip()] = value.strip()
    return found


def resolve(*layers: Mapping[str, Any]) -> dict[str, Scalar]:
    """All settings, later layers over earlier ones over defaults; checked. Raises ConfigError."""
    settings = defaults()
    types_of = _types()
    for layer in layers:
        for name, value in layer.items():
            if name not in settings:
                raise ConfigError(f"unknown setting '{name}'{_nearest(name, list(settings))}")
            settings[name] = _converted(name, value, types_of[name])
    for section, kind in owner_classes():
        build(section, kind, settings)
    check_relations(settings)
    return settings


def build(section: str, kind: type[C], settings: Mapping[str, Any], **given: Any) -> C:
    """The owner's dataclass from resolved settings, `given` fields on top. Raises ConfigError."""
    values = {field.name: settings[name] for name, field in fields_of(section, kind)}
    return kind(**{**values, **given})


def check_relations(settings: Mapping[str, Any]) -> None:
    """Time-outs of all owners against each other, and texts that have a grammar.

    Raises ConfigError naming both sides, or the forms there are.
    """
    for name in ("snapshot.cadence", "checkpoint.cadence"):
        if str(settings[name]).strip():
            parse_cadence(str(settings[name]))
    controller.check_relations(
        build("controller", controller.Config, settings),
        controller.ForeignTimeouts(
            heartbeat_interval_s=settings["agent.heartbeat_interval_s"],
            gate_timeout_s=settings["worker.gate_timeout_s"],
            run_out_timeout_s=settings["worker.run_out_timeout_s"],
            worker_controller_timeout_s=settings["worker.controller_timeout_s"],
            agent_controller_timeout_s=settings["agent.controller_timeout_s"],
            collective_timeout_s=settings["communicator.collective_timeout_s"],
            outside_step_limit_s=settings["communicator.outside_step_limit_s"],
            tcp_user_timeout_s=settings["communicator.tcp_user_timeout_s"],
        ),
    )


def flatten(settings: Mapping[str, Scalar]) -> tuple[tuple[str, str], ...]:
    """Settings as text, for `JobSpec.settings`."""
    return tuple(sorted((name, _text(value)) for name, value in settings.items()))


def unflatten(pairs: Sequence[tuple[str, str]]) -> dict[str, Scalar]:
    """Settings of a `JobSpec` with their types again. Raises ConfigError."""
    return resolve(dict(pairs))


def _text(value: Scalar) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _types() -> dict[str, Any]:
    found = {}
    for section, kind in owner_classes():
        hints = typing.get_type_hints(kind)
        for name, field in fields_of(section, kind):
            found[name] = hints[field.name]
    return found


def _converted(name: str, value: Any, kind: Any) -> Scalar:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(choice for choice in typing.get_args(kind) if choice is not type(None))
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(str(part) for part in value)
    try:
        return _scalar(value, kind)
    except ValueError as error:
        expected = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{name}: expected {expected}, got '{value}'") from error


def _scalar(value: Any, kind: Any) -> Scalar:
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() not in words:
            raise ValueError(value)
        return words[str(value).lower()]
    if isinstance(value, bool):
        raise ValueError(value)
    if kind is int:
        if isinstance(value, float):
            raise ValueError(value)
        return int(value)
    return float(value) if kind is float else str(value)


def _nearest(name: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else "; `trainmover config` lists all"
