"""House lints: what ruff and mypy can't know about this project.

Decides whether sizes, names and texts keep the house rules and says what to do instead. Does not
judge formatting (ruff), types (mypy) or who imports whom (import-linter).

Exceptions stand in `tidy_exceptions.toml`, each with a reason. They may only shrink: an exception
that is larger than what it excuses, or excuses nothing, is itself a finding.

Run: python tools/tidy.py [ROOT]
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODULE_LINES = 400
FUNCTION_LINES = 70
NESTING_LEVELS = 3
PARAMETERS = 6

VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}
CODE_FOLDERS = ("src", "tools", "examples", "tests")
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".sh",
    ".yaml",
    ".yml",
    ".cfg",
    ".ini",
    ".css",
    ".js",
}
TEXT_NAMES = {"Makefile", "run", ".gitignore", "LICENSE"}
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    "build",
    "dist",
    "runs",
    "demo-report",
    "__pycache__",
    "node_modules",
}
TIMELESS_TESTS = ("tests/unit/", "tests/simulation/", "tests/policy/")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Patterns are put together from pieces so that this file doesn't find itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.$}])/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me")) + r")/\w"
)
REGISTRY_HOST = re.compile(
    "|".join((r"py" + r"pi\.org", r"python" + r"hosted\.", r"download\.py" + r"torch\."))
)
WORKPLACE_WORD = re.compile(
    "|".join(("cl" + "aude", "anth" + "ropic", "sub" + "agent", "farm" + "-studio")), re.IGNORECASE
)
OPEN_END = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\s*\(#\d+\))")
PAGE = re.compile(r"(?<![\w*/.{-])((?:[\w-]+/)*[\w-]+\.md)\b")


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule; `subject` is a function's qualified name or empty, `size` the count."""

    path: str
    line: int
    rule: str
    subject: str
    size: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Excuse:
    """One entry of the exception list."""

    rule: str
    path: str
    subject: str
    limit: int
    reason: str


def text_files(root: Path) -> Iterator[Path]:
    """Every file of ours that a person reads, in a fixed order."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(part in SKIPPED_FOLDERS or part.endswith(("_cache", ".egg-info")) for part in parts):
            continue
        if path.is_file() and (path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES):
            yield path


def check_name(path: str) -> Iterator[Finding]:
    """Names that say nothing about what is inside."""
    parts = Path(path).with_suffix("").parts
    for part in parts:
        vague = VAGUE_NAMES.intersection(part.lower().split("_"))
        if vague:
            word = sorted(vague)[0]
            message = f"'{word}' names a drawer; name the file after the one noun it holds"
            yield Finding(path, 1, "vague-name", "", 0, message)


def check_text(path: str, text: str, pages: set[str]) -> Iterator[Finding]:
    """Rules for every line of every text file."""
    for number, line in enumerate(text.splitlines(), start=1):
        for rule, pattern, advice in (
            (
                "machine-path",
                MACHINE_PATH,
                "a path of one machine; derive it or take it as an argument",
            ),
            (
                "registry-host",
                REGISTRY_HOST,
                "a registry's host; let pip's own configuration name it",
            ),
            (
                "workplace-word",
                WORKPLACE_WORD,
                "names where this was written; readers have no use for it",
            ),
            ("open-end", OPEN_END, "finish it, or file an issue and write its number: (#12)"),
        ):
            found = pattern.search(line)
            if found:
                yield Finding(path, number, rule, "", 0, f"'{found.group()}': {advice}")
        if path.startswith("tests/"):
            continue  # samples in tests name pages that only live there
        for found in PAGE.finditer(line):
            name = found.group(1)
            if not any(page == name or page.endswith("/" + name) for page in pages):
                message = f"'{name}' is no page of this repository; say it here or write the page"
                yield Finding(path, number, "dead-page", "", 0, message)


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without self and cls."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in {"self", "cls"} for argument in every)


def is_command(path: str, name: str) -> bool:
    """True for a subcommand's function: its parameters are the command line's options."""
    return Path(path).parent.name == "cli" and Path(path).stem == name.rstrip("_")


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring: explaining is never punished."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def nesting(node: ast.AST, level: int = 0) -> int:
    """Deepest block inside `node`; `elif` adds nothing, inner functions count for themselves."""
    deepest = level
    for name, value in ast.iter_fields(node):
        children = [
            child
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
        is_elif = isinstance(node, ast.If) and name == "orelse" and len(children) == 1
        for child in children:
            if isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
                continue
            if is_elif and isinstance(child, ast.If):
                deepest = max(deepest, nesting(child, level))
                continue
            deeper = level + 1 if isinstance(child, BLOCKS) else level
            deepest = max(deepest, nesting(child, deeper))
    return deepest


def functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, outermost first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def check_sizes(path: str, text: str, tree: ast.AST) -> Iterator[Finding]:
    """Module, function, nesting and parameter limits."""
    lines = len(text.splitlines())
    if lines > MODULE_LINES:
        message = f"{lines} lines, at most {MODULE_LINES}; split it by phase or noun"
        yield Finding(path, 1, "module-lines", "", lines, message)
    for name, function in functions(tree):
        for rule, size, limit, advice in (
            (
                "function-lines",
                body_lines(function),
                FUNCTION_LINES,
                "name its parts and call them",
            ),
            (
                "nesting",
                nesting(function),
                NESTING_LEVELS,
                "return early, or give the inner block a name",
            ),
            (
                "parameters",
                parameter_count(function),
                PARAMETERS,
                "gather them in a frozen dataclass",
            ),
        ):
            if size > limit and not (rule == "parameters" and is_command(path, name)):
                message = f"{name} has {size}, at most {limit}; {advice}"
                yield Finding(path, function.lineno, rule, name, size, message)


def names_everything(node: ast.expr | None) -> bool:
    """True for a bare `except` and for Exception or BaseException."""
    return node is None or (
        isinstance(node, ast.Name) and node.id in {"Exception", "BaseException"}
    )


def is_swallowing(handler: ast.ExceptHandler) -> bool:
    """True if the handler takes everything and says nothing."""
    silent = all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body)
    return silent and names_everything(handler.type)


def check_habits(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Swallowed exceptions anywhere; sleeping in tests that must not depend on time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and is_swallowing(node):
            message = "an exception is swallowed; catch what you expect, report the rest"
            yield Finding(path, node.lineno, "swallowed", "", 0, message)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "suppress" and any(
            names_everything(argument) for argument in node.args
        ):
            message = "suppress() of everything; name what you expect"
            yield Finding(path, node.lineno, "swallowed", "", 0, message)
        if node.func.attr == "sleep" and path.startswith(TIMELESS_TESTS):
            message = "this tier never sleeps; hand the decider a later `now`"
            yield Finding(path, node.lineno, "sleep", "", 0, message)


def findings(root: Path) -> list[Finding]:
    """Every finding in the tree at `root`, exceptions not yet applied."""
    files = list(text_files(root))
    pages = {path.relative_to(root).as_posix() for path in files if path.suffix == ".md"}
    found: list[Finding] = []
    for file in files:
        path = file.relative_to(root).as_posix()
        text = file.read_text(encoding="utf-8")
        found += check_text(path, text, pages)
        if file.suffix != ".py" or not path.startswith(CODE_FOLDERS):
            continue
        tree = ast.parse(text, filename=path)
        found += check_name(path)
        found += check_sizes(path, text, tree)
        found += check_habits(path, tree)
    return sorted(found)


def read_excuses(file: Path) -> list[Excuse]:
    """The exception list; every entry must carry a reason."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("exception", [])
    excuses = [
        Excuse(
            e["rule"], e["path"], e.get("subject", ""), int(e.get("limit", 0)), e.get("reason", "")
        )
        for e in entries
    ]
    for excuse in excuses:
        if len(excuse.reason.split()) < 4:
            raise SystemExit(f"{file.name}: {excuse.rule} for {excuse.path} has no reason")
    return excuses


def judge(found: list[Finding], excuses: list[Excuse], list_name: str) -> list[str]:
    """Lines to print: findings that nothing excuses, then excuses that are too wide."""
    by_key = {(excuse.rule, excuse.path, excuse.subject): excuse for excuse in excuses}
    largest = dict.fromkeys(by_key, -1)
    lines = []
    for finding in found:
        key = (finding.rule, finding.path, finding.subject)
        excuse = by_key.get(key)
        if excuse is None or finding.size > excuse.limit:
            lines.append(str(finding))
        if excuse is not None:
            largest[key] = max(largest[key], finding.size)
    for key, size in largest.items():
        rule, path, subject = key
        where = f"{list_name}: {rule} for {path}" + (f" {subject}" if subject else "")
        if size < 0:
            lines.append(f"{where} excuses nothing any more; delete it")
        elif size < by_key[key].limit:
            lines.append(f"{where} has limit {by_key[key].limit}; lower it to {size}")
    return lines


def main(arguments: list[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    root = Path(arguments[0] if arguments else Path(__file__).parent.parent).resolve()
    exceptions = root / "tools" / "tidy_exceptions.toml"
    excuses = read_excuses(exceptions) if exceptions.exists() else []
    lines = judge(findings(root), excuses, exceptions.name)
    print("\n".join(lines) if lines else "tidy: nothing to say")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
