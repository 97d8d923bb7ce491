"""`python -m quantkit_kernels.cpu.build`: build the library into the checkout's build/cpu, for developers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from quantkit_kernels.cpu.library import LIBRARY_NAME, checkout_build_folder


def main() -> int:
    """Configure and build with CMake; returns a process exit code."""
    folder = checkout_build_folder()
    if folder is None:
        print("not a checkout: `pip install .` builds the library", file=sys.stderr)
        return 2
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None:
        print("cmake is not installed: `pip install cmake ninja`", file=sys.stderr)
        return 3
    configure = [cmake, "-S", str(Path(__file__).resolve().parent), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, [cmake, "--build", str(folder), "--parallel"]):
        status = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        if status:
            return status
    print(folder / LIBRARY_NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
