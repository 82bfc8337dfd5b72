"""What the fuzzer once found, and a few mutations of every seed: records or a clear refusal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from clusterprof.analysis.importers.registry import IMPORTERS
from tests.scenarios.fuzz.mutate import BYTES_AT_MOST, mutated
from tests.scenarios.fuzz.own_formats import OWN_FORMATS, OwnFormat
from tests.scenarios.fuzz.trial import (
    READ,
    REFUSED,
    REGRESSIONS,
    SEEDS,
    Case,
    Inputs,
    cases_in,
    importer_named,
    try_on_disk,
    try_one,
)

FEW = 25
FORMATS = [importer.name for importer in IMPORTERS if cases_in(SEEDS / importer.name)]
FOUND = [
    pytest.param(importer.name, case, id=f"{importer.name}-{case.name}")
    for importer in IMPORTERS
    for case in cases_in(REGRESSIONS / importer.name)
]


@pytest.mark.parametrize("name", FORMATS)
def test_seeds_are_read_and_mutations_end_in_records_or_a_refusal(
    name: str, tmp_path: Path
) -> None:
    cases, importer = cases_in(SEEDS / name), importer_named(name)
    assert {try_one(importer, case) for case in cases} == {READ}
    assert {try_on_disk(importer, case, tmp_path) for case in cases} == {READ}
    inputs = Inputs(cases, f"test-{name}")
    for number in range(FEW):
        try_one(importer, inputs.of(number))


@pytest.mark.parametrize("own_format", OWN_FORMATS, ids=lambda own_format: own_format.name)
def test_own_files_are_read_and_mutations_end_in_values_or_a_refusal(
    own_format: OwnFormat, tmp_path: Path
) -> None:
    assert {own_format.read(case, tmp_path) for case in own_format.cases} == {READ}
    generate = own_format.make_generator()
    outcomes = {own_format.read(generate(number), tmp_path) for number in range(FEW)}
    assert outcomes <= {READ, REFUSED}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "case"), FOUND)
def test_formerly_failing_inputs_are_handled(name: str, case: Case) -> None:
    try_one(importer_named(name), case)  # it raises nothing


def test_a_seed_number_gives_the_same_input_and_inputs_differ() -> None:
    cases = cases_in(SEEDS / "dftracer")
    several = [Inputs(cases, "dftracer").of(number).files for number in range(200)]
    inputs = Inputs(cases, "dftracer")
    assert several == [inputs.of(number).files for number in range(200)]
    assert len(set(several)) > 150
    assert all(len(data) <= BYTES_AT_MOST + 1024 for files in several for _, data in files)


def test_every_mutation_accepts_an_empty_file() -> None:
    for number in range(300):
        mutated(b"", [b""], random.Random(number))
