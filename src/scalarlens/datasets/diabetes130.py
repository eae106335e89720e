"""Diabetes 130: stays of diabetic patients in US hospitals, and whether they came back within 30 days."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa

from scalarlens.datasets.files import Table, open_text
from scalarlens.datasets.parts import DROPPED, Part, deal_randomly
from scalarlens.datasets.source import Opened, Source, SourceFile, SplitRule, relabelled, schema_of, sources
from scalarlens.errors import DataError
from scalarlens.table.cells import texts

TABLE = "diabetic_data.csv"
#: an archive that claims to hold a table larger than this is not read
MAX_BYTES = 1 << 30
PATIENT, DISCHARGE, LABEL = "patient_nbr", "discharge_disposition_id", "readmitted"
#: discharge codes of patients who died or went to a hospice
DECEASED = ("11", "13", "14", "19", "20", "21")
NUMERIC = """
    time_in_hospital num_lab_procedures num_procedures num_medications number_outpatient number_emergency
    number_inpatient number_diagnoses
"""
CATEGORICAL = """
    race gender age weight admission_type_id discharge_disposition_id admission_source_id payer_code
    medical_specialty diag_1 diag_2 diag_3 max_glu_serum A1Cresult metformin repaglinide nateglinide chlorpropamide
    glimepiride acetohexamide glipizide glyburide tolbutamide pioglitazone rosiglitazone acarbose miglitol
    troglitazone tolazamide examide citoglipton insulin glyburide-metformin glipizide-metformin
    glimepiride-pioglitazone metformin-rosiglitazone metformin-pioglitazone change diabetesMed
"""
#: the word None is a value in this table: the test was not made
SCHEMA = schema_of(NUMERIC, CATEGORICAL, LABEL, missing=["?"])


@sources.register("diabetes130")
class Diabetes130(Source):
    """101,766 hospital stays, 11.2 % with a return within 30 days: 8 numbers and 39 categories (UCI Diabetes 130).

    `keep_deceased` keeps the 2,423 stays that ended in death or in a hospice, after which nobody can come back.

    >>> len(SCHEMA.numeric), len(SCHEMA.categorical), Diabetes130().keep_deceased
    (8, 39, False)
    """

    files = (
        SourceFile(
            "dataset_diabetes.zip",
            f"the archive of UCI; or {TABLE} out of it",
            "3a17a3b55b6dd4a1926703185c0ad8e2ed30bc8e2f9b927cdd1000b733d1de8e",
            "0689e7ec031237dc63031b938805c48377748761a3b26acab621567afa24df97",
        ),
    )
    licence = "UCI lists CC BY 4.0 (as remembered, not verified)"
    obtain = "download it from the page of UCI's data set 296, Diabetes 130-US hospitals for years 1999-2008"
    splits = (SplitRule("random", "80/10/10 % of the patients with all their stays, drawn with the seed", seeded=True),)

    def __init__(self, *, keep_deceased: bool = False) -> None:
        self.keep_deceased = keep_deceased

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        (path,), notes = self._find(place / TABLE if (place / TABLE).is_file() else place)
        table = open_text(path, ",", content=None if path.suffix == ".csv" else _unpacked(path))
        table.require([*SCHEMA.columns, PATIENT])
        patients, deceased = _column(table, PATIENT), np.isin(_column(table, DISCHARGE), DECEASED)
        if self.keep_deceased:
            notes += (f"kept: {int(deceased.sum()):,} stays that ended in death or in a hospice",)
            deceased[:] = False
        else:
            notes += (f"left out: {int(deceased.sum()):,} stays that ended in death or in a hospice",)
        dealt = np.full(len(patients), DROPPED, np.uint8)
        known, numbers = np.unique(patients[~deceased], return_inverse=True)
        dealt[~deceased] = deal_randomly(len(known), seed)[numbers]
        notes += ("left out: 'encounter_id' and 'patient_nbr' are identifiers; no patient is in two splits",)
        return Opened(SCHEMA, (Part(relabelled(table, LABEL, {"NO": 0, ">30": 0, "<30": 1}), dealt),), notes)


def _unpacked(path: Path) -> bytes:
    """The table out of the archive; it is small enough to be held."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if PurePosixPath(member.filename).name == TABLE]
            if len(members) != 1:
                raise DataError(f"{path} holds {len(members)} files named {TABLE}; it must hold one")
            if members[0].file_size > MAX_BYTES:
                raise DataError(f"{path} claims that {TABLE} has more than {MAX_BYTES:,} bytes; it is not read")
            return archive.read(members[0])
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path} is not a readable zip archive, or is damaged: {error}") from error


def _column(table: Table, name: str) -> np.ndarray:
    """All texts of a column."""
    cells = [texts(batch.column(name), name) for batch in table.batches([name])]
    return pa.chunked_array(cells, pa.string()).to_numpy().astype(str)
