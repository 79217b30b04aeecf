"""Render the pages of `docs/` that come from the code, so that they can't differ from it.

Decides how messages, journal records, phases, states and settings are laid out on a page. What a
page says about an entry is the entry's own docstring. `tests/policy` fails if a page is stale.

Run: python tools/render_docs.py [--check]
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "trainmover"
BEGIN = "<!-- rendered from code by `make docs`; do not edit below -->"


@dataclass(frozen=True)
class Entry:
    """A class with its docstring and fields, as the source has them."""

    name: str
    parents: tuple[str, ...]
    text: str
    fields: tuple[tuple[str, str, str, str], ...]
    """Name, annotation, default (or empty), docstring."""


def entries(file: Path) -> Iterator[Entry]:
    """Every class of a module, in its order."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield Entry(
                name=node.name,
                parents=tuple(ast.unparse(base) for base in node.bases),
                text=one_line(ast.get_docstring(node) or ""),
                fields=tuple(fields(node)),
            )


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Annotated attributes; the string behind one is its docstring."""
    for place, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        behind = node.body[place + 1] if place + 1 < len(node.body) else None
        text = ""
        if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
            text = one_line(str(behind.value.value))
        default = ast.unparse(statement.value) if statement.value is not None else ""
        yield statement.target.id, ast.unparse(statement.annotation), default, text


def one_line(text: str) -> str:
    """First paragraph on one line."""
    return " ".join(text.strip().split("\n\n", maxsplit=1)[0].split())


def cell(text: str) -> str:
    """Text that a table cell can hold."""
    return text.replace("|", "\\|")


def protocol_page() -> str:
    """Messages and journal records by module, then the named phases."""
    lines: list[str] = []
    for file in sorted((SOURCE / "protocol").glob("*.py")):
        found = [entry for entry in entries(file) if {"Message", "Record"} & set(entry.parents)]
        if not found:
            continue
        lines += [f"## Messages and records of `protocol/{file.name}`", ""]
        lines += ["| name | fields | what it says |", "| --- | --- | --- |"]
        for entry in found:
            names = ", ".join(f"`{name}`" for name, *_ in entry.fields)
            lines.append(f"| `{entry.name}` | {names} | {cell(entry.text)} |")
        lines.append("")
    phases = importlib.import_module("trainmover.protocol.phases").PHASES
    lines += ["## Phases of a switchover", ""]
    lines += ["| phase | switchover | passed by | what has happened |", "| --- | --- | --- | --- |"]
    for phase in phases:
        kinds, processes = " ".join(phase.kinds), " ".join(phase.passed_by)
        lines.append(f"| {phase.name} | {kinds} | {processes} | {cell(phase.text)} |")
    return "\n".join(lines) + "\n"


def states_page() -> str:
    """The deciders' phases: each is a frozen dataclass that holds only what that phase needs."""
    lines = [
        "# State machines",
        "",
        "Each phase is a frozen dataclass; `transition(state, event, now)` moves between them.",
        "",
        BEGIN,
        "",
    ]
    for title, file, unions in (
        ("The job, as its controller sees it", SOURCE / "controller" / "state.py", ("Phase",)),
        ("A worker", SOURCE / "worker" / "lifecycle_state.py", ("Main", "Switch")),
    ):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        known = {entry.name: entry for entry in entries(file)}
        lines += [f"## {title}", "", "```text", (ast.get_docstring(tree) or "").strip(), "```", ""]
        for union in unions:
            lines += [f"| `{union}` | holds | means |", "| --- | --- | --- |"]
            for name in members_of(tree, union):
                entry = known[name]
                holds = ", ".join(f"`{field}`" for field, *_ in entry.fields)
                lines.append(f"| `{name}` | {holds} | {cell(entry.text)} |")
            lines.append("")
    return "\n".join(lines)


def members_of(tree: ast.Module, union: str) -> list[str]:
    """Names in `union = A | B | C`."""
    for node in tree.body:
        is_it = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if is_it and isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == union:
            return ast.unparse(node.value).split(" | ")
    raise SystemExit(f"render_docs: no union named {union}")


def config_page() -> str:
    """Every setting by owner, with type, default and trade-off."""
    lines = [
        "# Settings",
        "",
        "In a TOML file (`--config FILE`, a section per owner) or one by one",
        "(`--set owner.field=value`).",
        "",
        BEGIN,
        "",
    ]
    settings = importlib.import_module("trainmover.daemons.settings")
    for owner, module, kind in settings.OWNERS:
        file = ROOT / "src" / (module.replace(".", "/") + ".py")
        entry = next(entry for entry in entries(file) if entry.name == kind)
        lines += [f"## [{owner}] `{kind}`", "", entry.text, ""]
        lines += ["| setting | type | default | what it decides |", "| --- | --- | --- | --- |"]
        for name, annotation, default, text in entry.fields:
            if f"{owner}.{name}" not in settings.NOT_SETTINGS:
                row = (f"`{owner}.{name}`", cell(annotation), f"`{default}`", cell(text))
                lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Every rendered page; `protocol.md` keeps what a person wrote above the mark."""
    protocol = ROOT / "docs" / "protocol.md"
    written = protocol.read_text(encoding="utf-8").split(BEGIN)[0]
    return {
        protocol: f"{written}{BEGIN}\n\n{protocol_page()}",
        ROOT / "docs" / "state-machine.md": states_page(),
        ROOT / "docs" / "config.md": config_page(),
    }


def main(arguments: list[str]) -> int:
    """Write the pages; with --check only say which are stale."""
    sys.path.insert(0, str(SOURCE.parent))
    stale = 0
    for file, text in pages().items():
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        name = file.relative_to(ROOT)
        if "--check" in arguments:
            print(f"{name} is stale; run `make docs`")
        else:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
