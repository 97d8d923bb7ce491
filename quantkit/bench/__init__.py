"""Measuring an artifact on this machine: throughput now; load, knee and tuning beside it later."""
