"""Records for people: losses once per step, of the last lineage; findings once; lines numbered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainmover.daemons.records import KEPT_REPORTS, JobRecords, read_losses
from trainmover.protocol.journal import IncidentReport
from trainmover.protocol.messages import Finding, StepLogged


def logged(step: int, lineage: int, value: float) -> StepLogged:
    values = (("loss", value.hex()),)
    return StepLogged(incarnation="m0.0.1", step=step, lineage=lineage, values=values)


def test_a_step_logged_by_two_lineages_counts_once_with_the_last(tmp_path: Path) -> None:
    records = JobRecords(tmp_path)
    for message in (logged(0, 1, 3.0), logged(1, 1, 2.0), logged(1, 2, 1.0), logged(2, 2, 0.5)):
        records.add_step(message)
    losses = read_losses(tmp_path / "losses.jsonl")
    assert [float.fromhex(record.values["loss"]) for record in losses.values()] == [3.0, 1.0, 0.5]


def test_who_takes_the_primarys_place_changes_nothing_that_was_told(tmp_path: Path) -> None:
    """A joiner knows what was logged in front of the gate; behind it the primary may have told
    another value of the same name, which stands."""
    records = JobRecords(tmp_path)
    records.add_step(logged(3, 2, 0.5))
    early = (("early", "7"), ("loss", (0.9).hex()))
    again = StepLogged(incarnation="m1.0.1", step=3, lineage=2, values=early, is_again=True)
    records.add_step(again)
    records.add_step(again)
    lines = (tmp_path / "losses.jsonl").read_text().splitlines()
    assert len(lines) == 2, "the value that was never told is added, once"
    (known,) = read_losses(tmp_path / "losses.jsonl").values()
    assert known.values == {"early": "7", "loss": (0.5).hex()}
    records.add_step(StepLogged(**{**_fields(again), "step": 4}))
    assert read_losses(tmp_path / "losses.jsonl")[4].values["loss"] == (0.9).hex()


def _fields(message: StepLogged) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_repeated_message_is_stored_once(tmp_path: Path) -> None:
    records = JobRecords(tmp_path)
    records.add_step(logged(0, 1, 3.0))
    records.add_step(logged(0, 1, 3.0))
    assert len((tmp_path / "losses.jsonl").read_text().splitlines()) == 1


def test_a_restarted_controller_goes_on_where_it_was(tmp_path: Path) -> None:
    first = JobRecords(tmp_path)
    first.add_step(logged(4, 1, 3.0))
    first.say("decision", "one")
    second = JobRecords(tmp_path)
    second.say("decision", "two")
    assert second.last is not None
    assert second.last.step == 4
    assert [(line.sequence, line.text) for line in second.lines_after(0)] == [
        (1, "one"),
        (2, "two"),
    ]


def test_the_same_finding_of_two_ranks_is_said_once(tmp_path: Path) -> None:
    records = JobRecords(tmp_path)
    for rank in (0, 1):
        records.add_finding(Finding(incarnation="m", rank=rank, kind="untracked", text="x.py:3"))
    assert len(records.findings) == 1
    assert len(records.lines_after(0)) == 1


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    JobRecords(tmp_path).add_step(logged(0, 1, 3.0))
    with open(tmp_path / "losses.jsonl", "ab") as file:
        file.write(b'{"step": 1, "line')
    assert list(read_losses(tmp_path / "losses.jsonl")) == [0]


def test_of_a_long_life_the_last_reports_are_in_memory_and_all_in_the_file(tmp_path: Path) -> None:
    """A22: nothing grows with the number of switchovers."""
    count = KEPT_REPORTS + 30
    first = JobRecords(tmp_path)
    for number in range(count):
        first.add_incident(report(number))
        first.add_incident(report(number))  # agents and another controller say it again
    for records in (first, JobRecords(tmp_path)):
        assert len(records.incidents.last) == KEPT_REPORTS
        assert [each.number for each in records.incidents.all()] == list(range(count))


def test_a_report_that_the_disk_did_not_take_is_still_told(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "is not there")
    records.add_incident(report(1))
    assert [each.number for each in records.incidents.all()] == [1]


def report(number: int) -> IncidentReport:
    return IncidentReport(
        number=number,
        kind="planned",
        base_generation=number - 1,
        reason="asked for",
        culprits=(),
        phases=(),
        resumed_step=number,
        outcome="",
    )
