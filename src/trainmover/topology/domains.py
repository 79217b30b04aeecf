"""What fails together: machine, rack, switch, power domain; from labels or from a file.

Decides nothing about copies: says which domains two machines are known to share. A domain that
nobody has named counts as shared, because nothing proves otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from trainmover.errors import ConfigError

Level = Literal["rack", "switch", "power"]
LEVELS: Final[tuple[Level, ...]] = ("rack", "switch", "power")
"""From the smallest to the greatest; each fails as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Domains:
    """Fault domains of one machine; an empty name is not known."""

    machine: str
    rack: str = ""
    switch: str = ""
    power: str = ""

    def at(self, level: Level) -> str:
        """Name at one level."""
        names: dict[Level, str] = {"rack": self.rack, "switch": self.switch, "power": self.power}
        return names[level]


def domains_of(machine: str, labels: Iterable[tuple[str, str]]) -> Domains:
    """From an agent's labels; those of other names are somebody else's."""
    known = dict(labels)
    return Domains(
        machine=machine,
        rack=known.get("rack", ""),
        switch=known.get("switch", ""),
        power=known.get("power", ""),
    )


def labels_of(domains: Domains) -> tuple[tuple[str, str], ...]:
    """What an agent says of a machine that a topology file names."""
    return tuple((level, domains.at(level)) for level in LEVELS if domains.at(level))


def labels_by_machine(
    places: Mapping[str, Domains],
) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Every machine of a topology file with its labels, sorted."""
    return tuple((name, labels_of(places[name])) for name in sorted(places))


def merged_labels(
    file: Iterable[tuple[str, str]], own: Iterable[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """What a file says of a machine, and what its agent says: the agent knows better."""
    return tuple(sorted({**dict(file), **dict(own)}.items()))


def parse_topology(text: str) -> dict[str, Domains]:
    """A topology file: per line a machine and its domains, ``m3 rack=r1 switch=s1 power=p1``.

    Empty lines and what follows a ``#`` mean nothing. Raises ConfigError naming the line.
    """
    found: dict[str, Domains] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        machine, *pairs = words
        if machine in found:
            raise ConfigError(f"topology, line {number}: {machine} is named twice")
        labels = tuple(_pair(pair, number) for pair in pairs)
        found[machine] = domains_of(machine, labels)
    return found


def _pair(text: str, number: int) -> tuple[str, str]:
    level, equals, name = text.partition("=")
    if level not in LEVELS or not equals or not name:
        expected = ", ".join(f"{level}=NAME" for level in LEVELS)
        raise ConfigError(f"topology, line {number}: expected {expected}, got '{text}'")
    return level, name


def separate_levels(one: Domains, other: Domains) -> tuple[Level, ...]:
    """Levels at which the two are known to be in different domains."""
    if one.machine == other.machine:
        return ()
    return tuple(
        level
        for level in LEVELS
        if one.at(level) and other.at(level) and one.at(level) != other.at(level)
    )


def is_outside(one: Domains, other: Domains) -> bool:
    """Whether no loss of a single domain can take both."""
    return len(separate_levels(one, other)) == len(LEVELS)


def members_by_domain(domains: Mapping[str, Domains]) -> dict[tuple[Level, str], tuple[str, ...]]:
    """Machines of each named domain, sorted."""
    found: dict[tuple[Level, str], list[str]] = {}
    for machine in sorted(domains):
        for level in LEVELS:
            name = domains[machine].at(level)
            if name:
                found.setdefault((level, name), []).append(machine)
    return {key: tuple(machines) for key, machines in sorted(found.items())}
