"""What serves a model: text, scheduler, block pool, prefix cache, executor, sampler, engine. No HTTP in here.

`EngineCore` schedules and steps an `Executor`; `Engine` (api.py) wraps it for Python callers.
"""
