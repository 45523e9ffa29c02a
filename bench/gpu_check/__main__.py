"""`python -m bench.gpu_check`: the checks that need a GPU, within ten minutes.

Starts without any package that the checks need, so that missing packages are named before a check needs them.
"""

import sys

from bench.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
