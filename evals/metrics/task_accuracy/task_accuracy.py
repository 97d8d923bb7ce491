"""Task accuracy for `evaluate`: the share of answers that pass all the checks of their prompts.

`evaluate.load("evals/metrics/task_accuracy")`; predictions are answers, references the prompts as JSON text (one line
of a prompt file each). The arithmetic
is quantkit.gate's.
"""

import datasets
import evaluate

from quantkit.gate.modules import task_accuracy


class TaskAccuracy(evaluate.Metric):
    """`compute(predictions=[answer, ...], references=[prompt, ...])` gives `{"task_accuracy": share}`."""

    def _info(self):
        strings = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(strings)
        )

    def _compute(self, predictions, references):
        return {"task_accuracy": task_accuracy(predictions, references)}
