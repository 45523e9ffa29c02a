"""Fails if a wheel lacks what Tidegate needs at run time, or holds what only this repository needs.

Use it as `python .ci/check_wheel.py dist/tidegate-0.1.0-py3-none-any.whl`.
"""

import sys
from fnmatch import filter as matching
from zipfile import ZipFile

PACKAGES = {"tidegate", "gateway", "scheduler", "engine", "loadtest", "demo_model"}
# One file of each kind that is not Python: settings, scripts of the store, kernels, pages, weights, licences.
NEEDED = (
    "tidegate/tiers.yaml",
    "scheduler/*.lua",
    "engine/native/cpu/*.cpp",
    "gateway/console/static/index.html",
    "gateway/console/static/vendor/uPlot.LICENSE",
    "loadtest/k6.js",
    "demo_model/weights/model.safetensors",
    "*.dist-info/licenses/LICENSE",
    "*.dist-info/licenses/NOTICE",
    "*.dist-info/licenses/gateway/console/static/vendor/uPlot.LICENSE",
)
UNWANTED = ("demo_model/training/", "bench/", "tests/", "__pycache__")
LARGEST = 3_000_000  # bytes; the demo model's weights are half of it


def faults(names: list[str], size: int) -> list[str]:
    """Return what is wrong with a wheel of these files and of `size` bytes."""
    lacking = [f"lacks {needed}" for needed in NEEDED if not matching(names, needed)]
    extra = [f"holds {name}" for name in names if any(part in name for part in UNWANTED)]
    packages = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    strange = [f"holds the package {package}" for package in sorted(packages - PACKAGES)]
    return lacking + extra + strange + ([f"has {size} bytes"] if size > LARGEST else [])


def main(path: str) -> int:
    """Print each fault of the wheel at `path`. Return 1 if there is one."""
    with ZipFile(path) as wheel:
        found = faults(wheel.namelist(), sum(item.compress_size for item in wheel.infolist()))
    for fault in found:
        print(f"{path} {fault}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
