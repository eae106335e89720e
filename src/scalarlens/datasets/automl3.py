"""AutoML3: the data sets of the NeurIPS 2018 challenge on lifelong learning with drift, in their folder format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from scalarlens.datasets.files import Table, TableFile, open_text
from scalarlens.datasets.parts import Part, deal_in_order, deal_randomly
from scalarlens.datasets.source import ChangedFile, Opened, Source, SourceFile, SplitRule, note_on_digest, refuse_header, schema_of, sources
from scalarlens.errors import DataError
from scalarlens.table.cells import BadCell, labels

LABEL = "label"
KINDS = ("Time", "Numerical", "Categorical", "Multi-value")


@sources.register("automl3")
class AutoMl3(Source):
    """A folder of the AutoML3 challenge: batches in the order of time, numbers and categories as `f0`, `f1`, ...

    The labelled training batches are read; where a folder has none, its labelled test batches. Columns of the kinds
    Time and Multi-value are left out, as in the paper. A category is the text of its cell, so that codes agree
    between batches.

    NOTE[DIFF] The paper states row counts of about 60/21/19 % for AutoML-A and no rule; a random split here is
    80/10/10.

    >>> [split.name for split in AutoMl3.splits], AutoMl3.paper_split
    (['time', 'random'], 'random')
    """

    files = (
        SourceFile("<name>_feat.type", "the kind of each column: Time, Numerical, Categorical or Multi-value"),
        SourceFile("<name>_public.info", "lines such as feat_num = 22; not needed"),
        SourceFile("<name>_train<K>.data", "rows without a header, separated by spaces, NaN for missing"),
        SourceFile("<name>_train<K>.solution", "one label per row, 0 or 1"),
        SourceFile("<name>_test<K>.data", "further batches, read where no training batch is there"),
        SourceFile("<name>_test<K>.solution", "their labels"),
    )
    #: the practice set `rl`, as its starting kit has it
    practice: ClassVar[tuple[SourceFile, ...]] = (
        SourceFile("rl_public.info", "", "cefd4e5694dca071e23fc903a8a209e2e2cb2986a001220698ab5a51177665b0"),
        SourceFile("rl_feat.type", "", "7dc861ce1d38bf69c91d20b0c66f91de803b9016f31c6eb10198685dc0096997"),
        SourceFile("rl_test1.data", "", "00b68d9901db5dc4532787fd1d2aa0e963e52c1cdff3874921a17ad42337107d"),
        SourceFile("rl_test1.solution", "", "88c78d893d8946015cc7d338c86f5a7414c30f68c7d7480078c8d1791e90091f"),
        SourceFile("rl_test2.data", "", "853a329d95c8a9d4adec8337e553345192fa6e37e57ba9159db22b4048318132"),
        SourceFile("rl_test2.solution", "", "993cf2c67bd845cb11b20b78e54b77c7061521d8f2add6129c88a282ad48601a"),
        SourceFile("rl_test3.data", "", "9cd9f6226a598878796001574d88614b871f8e8b1fb8524f677667d8e69544de"),
        SourceFile("rl_test3.solution", "", "2caa764c356446ee20b33d674fb67fca20c298b45441ef969d22169dae232bb7"),
    )
