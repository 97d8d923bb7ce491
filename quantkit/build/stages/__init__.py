"""The stages of a build, one file each; `quantkit/build/pipeline.py` puts them in order.

Nothing is imported here: a stage's key covers the code it imports, and must not cover the other stages.
"""
