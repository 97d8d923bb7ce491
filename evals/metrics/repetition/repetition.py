"""Repetition for `evaluate`: the mean share of an answer's word 4-grams that stood there before.

`evaluate.load("evals/metrics/repetition")`; predictions are answers, references the prompts as JSON text (one line
of a prompt file each, unread here). The arithmetic
is quantkit.gate's.
"""

import datasets
import evaluate

from quantkit.gate.modules import repetition


class Repetition(evaluate.Metric):
    """`compute(predictions=[answer, ...], references=[prompt, ...])` gives `{"repetition": share}`."""

    def _info(self):
        strings = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(strings)
        )

    def _compute(self, predictions, references):
        return {"repetition": repetition(predictions)}
