"""The data sets of answers and retrieval: their files, their names on a page, and the arms that are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

FILE = "retrieval"
"""The file of figures with the answers of the same runs, and of rows beside this script; of ``synth``."""

JOINT = {"separate": "separate-infonce", "branched": "branched-infonce"}
"""The arms with InfoNCE beside the LM loss, by their layout, where a data set names no others."""
SEPARATE = {"separate": "separate-infonce"}
"""Those of data without a system prompt, where ``branched`` is the same training."""
WEIGHT_1 = {"separate": "separate-infonce-1"}
"""Those of SmolLM2."""
MEANS = {"separate": "separate-infonce-1-mean"}
"""Those of SmolLM2 where InfoNCE was run on means of texts alone."""


class DataSet(NamedTuple):
    """A data set of retrieval: its key, its file of figures and rows, its name on a page, and what its texts are."""

    data: str  # of ranking.DATA
    file: str
    name: str
    about: str
    joint: Mapping[str, str] = JOINT
    long: bool = False  # InfoNCE has 16 epochs of 128 pairs a step, not 4 of 32
    in_readme: bool = True

    @property
    def anchor(self) -> str:
        """The link to its section."""
        return re.sub(r"[^a-z0-9 -]", "", self.name.lower()).replace(" ", "-")


DATA_SETS = (
    DataSet("synth", FILE, "`synth`", "Generated sentences and regular expressions, the runs of `retrieval.yaml`"),
    DataSet(
        "synth-128",
        "retrieval-synth-128",
        "`synth`, 16 epochs of 128 pairs",
        "`retrieval-synth-128.yaml`, with the settings of TURK, nothing chosen anew; plain training: 28 epochs of 32",
        SEPARATE,
        long=True,
    ),
    DataSet(
        "turk",
        "retrieval-turk",
        "TURK",
        "Sentences of people for the same kind of expressions (`retrieval-turk.yaml`; 7,000 training records), as "
        "on `synth`, nothing chosen anew",
    ),
    DataSet(
        "turk-128",
        "retrieval-turk-128",
        "TURK, 16 epochs of 128 pairs",
        "`retrieval-turk-128.yaml`, run after one seed had found more so; plain training: 28 epochs of 32",
        SEPARATE,
        long=True,
    ),
    DataSet(
        "spider",
        "retrieval-spider",
        "Spider",
        "Questions and SQL queries (`retrieval-spider.yaml`), as on `synth`, nothing chosen anew",
    ),
    DataSet(
        "sums",
        "retrieval-sums",
        "Sums",
        "Two numbers below 100 and their sum, digit by digit: an answer that has to be computed "
        "(`retrieval-sums.yaml`; 8,000 training records). The best of three learning rates for both (`sums-lr.yaml`); "
        "plain training has 1.05 times the FLOPs of InfoNCE",
        SEPARATE,
    ),
    DataSet(
        "small",
        "retrieval-small",
        "`synth`, `preset:small`",
        "The data of `synth` with a model of 3.1 million parameters (`retrieval-small.yaml`), at the learning rate "
        "that is best for plain training, nothing else chosen anew",
        in_readme=False,
    ),
    DataSet(
        "smollm2",
        "retrieval-smollm2",
        "`synth`, SmolLM2-135M",
        "2,000 records of `synth` with SmolLM2-135M-Instruct and LoRA, one epoch (`retrieval-smollm2.yaml`). Beside "
        "the LM loss InfoNCE has weight 1, which was added when weight 0.1 had found little with its first seed; "
        "nothing else is chosen anew. Readouts of plain training are of layers 0, 15 and 30",
        WEIGHT_1,
    ),
    DataSet(
        "smollm2-turk",
        "retrieval-smollm2-turk",
        "TURK, SmolLM2-135M",
        "2,000 records of TURK with SmolLM2-135M-Instruct and LoRA, one epoch (`retrieval-smollm2-turk.yaml`), with "
        "the settings of `synth` with SmolLM2, nothing chosen anew. Readouts of plain training are of layers 0, 15 "
        "and 30",
        WEIGHT_1,
    ),
    DataSet(
        "smollm2-spider",
        "retrieval-smollm2-spider",
        "Spider, SmolLM2-135M",
        "2,000 records of Spider with SmolLM2-135M-Instruct and LoRA, one epoch (`retrieval-smollm2-spider.yaml`), "
        "with the settings of `synth` with SmolLM2, nothing chosen anew. InfoNCE of weight 1 is on means of texts, "
        "which had found most on `synth` and TURK. Readouts of plain training are of layers 0, 15 and 30",
        MEANS,
        in_readme=False,
    ),
    DataSet(
        "smollm2-sums",
        "retrieval-smollm2-sums",
        "Sums, SmolLM2-135M",
        "2,000 sums, asked as *What is 49 + 7?*, with SmolLM2-135M-Instruct and LoRA, one epoch "
        "(`retrieval-smollm2-sums.yaml`), with the settings of `synth` with SmolLM2, but that equal sums are no "
        "negatives of each other. Readouts of plain training are of layers 0, 15 and 30; it has 1.4 times the FLOPs of "
        "InfoNCE, 1.6 times those of means",
        WEIGHT_1,
    ),
)
RIGHT = {
    "equivalent": "the expression describes the same lines as the right one",
    "execution": "the query, executed, returns the rows of the right one",
    "exact": "the text is that of the right one",
}
"""When an answer is right, by the name of the score."""
