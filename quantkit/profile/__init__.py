"""The traffic profile: what production requests look like, as plain data; calibration, buckets and load follow it.

`model` holds the types, `file` reads and writes them as YAML or JSON, `logs` makes a profile from request logs,
`language` tells a text's language by its script.
"""

from quantkit.profile.file import profile_data, read_profile, write_profile
from quantkit.profile.model import Cell, Concurrency, Histogram, Profile

__all__ = ["Cell", "Concurrency", "Histogram", "Profile", "profile_data", "read_profile", "write_profile"]
