"""Names that a loop body reads before it writes them: what a step carries over."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmover.worker.carried import line_of_carried, suspects, variables

BODY = """
for step in job.steps(3):
    with step:
        batch = next(batches)
        loss = model(ahead)
        ahead = batch
        seen += 1
        losses.append(loss)
        total = total + loss
        self.count += 1
    print(loss)
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("batch", 0),
        ("loss", 0),
        ("ahead", 6),
        ("seen", 7),
        ("losses", 8),
        ("total", 9),
        ("self.count", 10),
        ("model", 0),
        ("unknown", 0),
    ],
)
def test_read_before_written(tmp_path: Path, name: str, line: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(BODY)
    assert line_of_carried(str(script), name) == line


def test_only_what_has_changed_is_suspect() -> None:
    seen = 1
    before = variables()
    seen += 1
    after = variables()
    assert before["seen"].digest != after["seen"].digest
    assert suspects(before, after, frozenset()) == [], "no loop with a step here"
    assert seen == 2
