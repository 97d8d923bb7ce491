"""The stages of a build in order."""

from quantkit.build.stages import allocate, calibrate, import_source, judge, package, quantize, sensitivity

STAGES = (
    import_source.STAGE,
    calibrate.STAGE,
    sensitivity.STAGE,
    allocate.STAGE,
    quantize.STAGE,
    package.STAGE,
    judge.STAGE,
)
