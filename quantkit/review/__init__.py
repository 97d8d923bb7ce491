"""The spot check by people: a sample of the gate's answers, a blind page, a chained record, a decision.

`plan` and `sample` say what is looked at, `record` keeps what was said, `decide` what it amounts to, `status` joins
them for an artifact; `session` and `server` are the page.
"""
