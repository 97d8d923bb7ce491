"""The artifact: an immutable folder with a compressed-tensors checkpoint and what quantkit adds, sealed by a manifest.

`write` makes one, `read` opens one, `verify` checks one to the last scale; `manifest` defines the payload digest and
`layout` the names.
"""
