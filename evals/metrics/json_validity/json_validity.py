"""JSON validity for `evaluate`: the share of valid JSON among the answers that should be JSON.

`evaluate.load("evals/metrics/json_validity")`; predictions are answers, references the prompts as JSON text (one line
of a prompt file each). The arithmetic
is quantkit.gate's.
"""

import datasets
import evaluate

from quantkit.gate.modules import json_validity


class JsonValidity(evaluate.Metric):
    """`compute(predictions=[answer, ...], references=[prompt, ...])` gives `{"json_validity": share}`."""

    def _info(self):
        strings = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(strings)
        )

    def _compute(self, predictions, references):
        return {"json_validity": json_validity(predictions, references)}
