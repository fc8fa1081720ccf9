"""Measured times for an exploration: from tuned tables, and from recorded studies with the spaces they were recorded in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen import device as devices
from flashgen import table
from flashgen.errors import InvalidTable, StudyMismatch
from flashgen.model import CompileReport, DeviceLimits, Outcome, Problem, Variant
from flashgen.space import Space, load_space, parse_space
from flashgen.study import RecordedStudy, read_study
from flashgen.table_schema import device_record


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured time in µs (median), and where it is written."""

    problem: Problem
    variant: Variant
    median_us: float
    origin: str
    report: CompileReport | None = None


@dataclass(frozen=True)
class Evidence:
    """What `--measured` names: times, and the spaces they belong to where these were recorded beside them."""

    times: tuple[Measured, ...] = ()
    spaces: tuple[Space, ...] = ()

    def space(self, family: str) -> Space:
        """The recorded space of a family, else the shipped one."""
        return next((space for space in self.spaces if space.family == family), None) or load_space(family)


def read(paths: Sequence[Path], device: DeviceLimits) -> Evidence:
    """Tables (.yaml), studies (.jsonl), and folders of studies with their spaces.

    Raises StudyMismatch for a study of another device or another space digest, InvalidTable for a table that breaks its rules.
    """
    times: list[Measured] = []
    spaces: dict[str, Space] = {}
    for path in paths:
        if path.is_dir():
            found = {space.family: space for space in _spaces_in(path)}
            studies = sorted(path.glob("*.jsonl"))
            if not studies:
                raise StudyMismatch(f"{path} holds no study (*.jsonl). Name a folder that `flashgen tune` wrote, a study, or a table.")
            for each in studies:
                times += _study_times(each, device, found)
            spaces |= found
        elif path.suffix == ".jsonl":
            times += _study_times(path, device, {})
        else:
            times += _table_times(path, device)
    return Evidence(tuple(times), tuple(spaces.values()))


def known_tables(device: DeviceLimits) -> Evidence:
    """Measured entries of the user's and the shipped tables for this device."""
    found = [each for one in table.load_all() if _same(one, device) for each in _entries(one)]
    return Evidence(tuple(found))


def _spaces_in(folder: Path) -> Iterable[Space]:
    return (parse_space(path.read_text(encoding="utf-8"), str(path)) for path in sorted(folder.glob("*.yaml")))


def _study_times(path: Path, device: DeviceLimits, spaces: dict[str, Space]) -> list[Measured]:
    study = read_study(path)
    recorded = study.header.device
    if not devices.same_resources(recorded, device):
        raise StudyMismatch(f"{path} was recorded on {recorded.name}; the exploration is of {device.name}. Add --gpu with that name.")
    _check_digests(path, study, spaces)
    return [
        Measured(study.header.problem, trial.variant, trial.measurement.median_us, str(path), trial.report)
        for trial in study.trials
        if trial.outcome is Outcome.OK and trial.measurement is not None and trial.measurement.source == "measured"
    ]


def _check_digests(path: Path, study: RecordedStudy, spaces: dict[str, Space]) -> None:
    for family, digest in study.header.spaces.items():
        present = spaces.get(family) or load_space(family)
        if present.digest != digest:
            raise StudyMismatch(
                f"{path} was recorded in another search space of {family}: its digest is {digest[:19]}, that of {family}.yaml is "
                f"{present.digest[:19]}. Put the space file of the study beside it in a folder and name the folder, or record it again."
            )


def _table_times(path: Path, device: DeviceLimits) -> list[Measured]:
    if not path.is_file():
        raise InvalidTable(f"{path} is neither a table nor a study nor a folder. Name what `flashgen tune` wrote.")
    found = table.read(path, strict=True)
    if not _same(found, device):
        raise StudyMismatch(f"{path} is the table of {found.device.name}; the exploration is of {device.name}. Add --gpu with that name.")
    return _entries(found)


def _entries(found: table.Table) -> list[Measured]:
    times = []
    for entry in found.entries:
        if entry.measurement.source == "measured":
            times.append(Measured(entry.problem, entry.variant, entry.measurement.median_us, str(found.path)))
    return times


def _same(found: table.Table, device: DeviceLimits) -> bool:
    return table.same_device(found.device, device_record(device))
