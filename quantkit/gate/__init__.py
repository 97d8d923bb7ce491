"""Judges the packaged artifact as it is served: held-out text, token metrics with intervals, policy, verdict.

Everything runs through the runtime's own executor, the unquantized baseline included.
"""

from quantkit.gate.evidence import read_evidence, write_evidence
from quantkit.gate.policy import Policy, load_policy
from quantkit.gate.rule import Rule
from quantkit.gate.run import GateResult, run_gate
from quantkit.gate.verdict import Verdict

__all__ = ["GateResult", "Policy", "Rule", "Verdict", "load_policy", "read_evidence", "run_gate", "write_evidence"]
