"""The stages of a build in order."""

from quantkit.build.stages import allocate, calibrate, compile, import_source, judge, package, quantize, sensitivity

STAGES = (
    import_source.STAGE,
    calibrate.STAGE,
    sensitivity.STAGE,
    allocate.STAGE,
    quantize.STAGE,
    compile.STAGE,
    package.STAGE,
    judge.STAGE,
)
