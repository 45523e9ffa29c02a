"""`python -m bench.gpu_check`: everything that only a GPU can tell, within ten minutes.

Imports the standard library only, so that missing packages can be named before anything needs them.
"""

import sys

from bench.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
