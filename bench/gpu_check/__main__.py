"""`python -m bench.gpu_check`: the checks that need a GPU, within ten minutes.

Needs the standard library only, so that it can name missing packages before a check needs them.
"""

import sys

from bench.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
