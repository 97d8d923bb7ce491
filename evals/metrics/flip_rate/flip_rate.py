"""Flips for `evaluate`: the share of prompts whose answer and baseline answer do not both pass or both fail.

`evaluate.load("evals/metrics/flip_rate")`; predictions are answers, references the prompts as JSON text (a line of
a prompt file with the answer to compare with as `baseline`). The arithmetic
is quantkit.gate's.
"""

import datasets
import evaluate

from quantkit.gate.modules import flip_rate


class FlipRate(evaluate.Metric):
    """`compute(predictions=[answer, ...], references=[prompt, ...])` gives `{"flip_rate": share}`."""

    def _info(self):
        strings = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(strings)
        )

    def _compute(self, predictions, references):
        return {"flip_rate": flip_rate(predictions, references)}
