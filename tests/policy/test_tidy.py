"""Each house lint finds what it is there for, and its exception list can only shrink."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tidy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tidy"] = module
    spec.loader.exec_module(module)
    return module


def rules(tidy: ModuleType, root: Path, path: str, text: str) -> list[str]:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return [finding.rule for finding in tidy.findings(root)]


DEEP = "def f(a):\n  if a:\n    for b in a:\n      while b:\n        with b:\n          pass\n"
FLAT = "def f(a):\n" + "".join(f"  {'el' if i else ''}if a == {i}:\n    pass\n" for i in range(9))


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("src/p/long.py", "a = 1\n" * 401, "module-lines"),
        ("src/p/function.py", "def f():\n" + "    a = 1\n" * 71, "function-lines"),
        ("src/p/deep.py", DEEP, "nesting"),
        ("src/p/many.py", "def f(a, b, c, d, *, e, f, g):\n    pass\n", "parameters"),
        ("src/p/cli/run.py", "def walk(a, b, c, d, e, f, g): ...\n", "parameters"),
        ("src/p/utils.py", "", "vague-name"),
        ("src/p/common/x.py", "", "vague-name"),
        ("src/p/rank_helpers.py", "", "vague-name"),
        ("src/p/path.py", "a = '/wo" + "rk/main'\n", "machine-path"),
        ("docs/a.md", "see /ro" + "ot/x\n", "machine-path"),
        ("Makefile", "pip install -i https://py" + "pi.org/simple\n", "registry-host"),
        ("docs/a.md", "written by Cl" + "aude\n", "workplace-word"),
        ("src/p/later.py", "# TO" + "DO: later\n", "open-end"),
        ("src/p/page.py", "# see design" + ".md section 2\n", "dead-page"),
        ("src/p/silent.py", "try:\n  f()\nexcept Exception:\n  pass\n", "swallowed"),
        ("src/p/bare.py", "try:\n  f()\nexcept:\n  pass\n", "swallowed"),
        ("src/p/hush.py", "with contextlib.suppress(Exception):\n  f()\n", "swallowed"),
        ("tests/unit/test_a.py", "import time\ntime.sleep(1)\n", "sleep"),
    ],
)
def test_each_rule_fires(tidy: ModuleType, tmp_path: Path, path: str, text: str, rule: str) -> None:
    assert rules(tidy, tmp_path, path, text) == [rule]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/p/flat.py", FLAT),
        ("src/p/documented.py", 'def f():\n    """A.\n' + "\n" * 90 + '    """\n'),
        ("src/p/method.py", "class A:\n  def f(self, a, b, c, d, e, f): ...\n"),
        ("src/p/cli/run.py", "def run(a, b, c, d, e, f, g): ...\n"),
        ("src/p/baseline.py", "# TO" + "DO(#12): later\n"),
        ("src/p/expected.py", "try:\n  f()\nexcept OSError:\n  pass\n"),
        ("tests/process/test_a.py", "import time\ntime.sleep(1)\n"),
        ("docs/one.md", "see docs/one.md, one.md and https://example.com/roots/workers\n"),
    ],
)
def test_what_the_rules_allow(tidy: ModuleType, tmp_path: Path, path: str, text: str) -> None:
    assert rules(tidy, tmp_path, path, text) == []


def test_exceptions_are_exactly_as_wide_as_needed(tidy: ModuleType, tmp_path: Path) -> None:
    rules(tidy, tmp_path, "src/p/long.py", "a = 1\n" * 410)
    found = tidy.findings(tmp_path)

    def judged(limit: int) -> list[str]:
        excuse = tidy.Excuse("module-lines", "src/p/long.py", "", limit, "because of a reason")
        lines: list[str] = tidy.judge(found, [excuse], "list")
        return lines

    assert judged(410) == []
    assert "lower it to 410" in judged(420)[0]
    assert "410 lines" in judged(405)[0]
    assert "delete it" in tidy.judge([], [tidy.Excuse("nesting", "a", "f", 4, "")], "list")[0]


def test_an_exception_needs_a_reason(tidy: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "exceptions.toml"
    file.write_text('[[exception]]\nrule = "nesting"\npath = "a.py"\nreason = "so"\n')
    with pytest.raises(SystemExit, match="no reason"):
        tidy.read_excuses(file)


def test_this_tree_is_tidy(tidy: ModuleType) -> None:
    excuses = tidy.read_excuses(ROOT / "tools" / "tidy_exceptions.toml")
    lines = tidy.judge(tidy.findings(ROOT), excuses, "tidy_exceptions.toml")
    assert not lines, "\n" + "\n".join(lines)
